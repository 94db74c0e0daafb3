"""dpkern train by the name of a mechanism: it trains, says what it claims, and refuses the rest."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dpkern import cli
from dpkern.base.errors import InvalidInput, PrivacyError
from dpkern.base.rng import Key
from dpkern.engine.demo.models import build
from dpkern.engine.named import NAMES, Run, make, parsed
from dpkern.ops.update import Ball
from dpkern.privacy.mechanisms import DPSGD, AdaClip, Directional, ProjectedSGD, SpectralDP
from dpkern.train import Session, gradient_report
from dpkern.train.data import load
from dpkern.train.label_privacy import released, unbiased_loss

ROWS, CLASSES = 48, 3


@pytest.fixture
def images(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    y = np.arange(ROWS) % CLASSES
    x = draw.normal(size=(ROWS, 8, 8)) + 2.0 * (np.arange(8)[None, :, None] % 3 == y[:, None, None])
    np.savez(tmp_path / "images.npz", x=x.astype(np.float32), y=y)
    return tmp_path / "images.npz"


@pytest.fixture
def options(images: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "data": str(images),
        "model": "lenet5",
        "noise_multiplier": 1.0,
        "batch_size": 12,
        "epochs": 1,
        "out": tmp_path / "out",
        "figure": False,
    }


ONE_RECORD = {"sampling": "fixed", "batch_size": 1, "optimizer": "sgd", "model": "linear"}
RUNS: dict[str, dict[str, Any]] = {
    "dpsgd": {},
    "laplace_sgd": {"model": "linear"},
    "spectral_dp": {},
    "gredp": {},
    "directional": {"settings": ("shape=elliptic",)},
    "adaclip": {},
    "pruned": {},
    "projected_sgd": ONE_RECORD | {"settings": ("projection=ball:2",)},
    "randomized_response": {"epsilon": 1.0, "noise_multiplier": None, "model": "linear"},
}
PUBLISHED: dict[str, dict[str, Any]] = RUNS | {
    "directional": {"epsilon": 2.0, "noise_multiplier": None},
}


@pytest.mark.parametrize("mode", ["corrected", "published"])
@pytest.mark.parametrize("name", NAMES)
def test_it_trains_and_reports(options: dict[str, Any], name: str, mode: str) -> None:
    change = (RUNS if mode == "corrected" else PUBLISHED).get(name, {})
    given = {k: v for k, v in (options | change).items() if v is not None}
    session = Session(given | {"mechanism": name, "mode": mode})
    start = [p.detach().clone() for p in session.training.model.parameters()]
    summary = session.run()
    assert summary["mechanism"] == name
    assert summary["mode"] == mode
    assert summary["claim"]
    moved = zip(start, session.training.model.parameters(), strict=True)
    assert all(not torch.equal(a, b) for a, b in moved)
    claimed, certified = float(summary["epsilon_claimed"]), float(summary["epsilon_certified"])
    if mode == "corrected":
        assert certified == pytest.approx(claimed)
        assert math.isfinite(certified)
        assert summary["notes"] == []
    elif math.isinf(certified):
        assert "not private" in summary["statement"]
        assert summary["non_private"]
    covered = summary["frequency_domain"]
    if name in ("gredp", "spectral_dp"):
        assert covered["text"].startswith("2 of 10 parameters in the frequency domain (")
        rows = dict(gradient_report.shown(summary).settings)
        assert rows["frequency domain"] == covered["text"]
    else:
        assert covered is None
    assert set(summary["blocks"][0] if summary["blocks"] else {"sd"}) >= {"sd"}


def test_published_epsilon_is_the_claim(
    options: dict[str, Any],
) -> None:
    del options["noise_multiplier"]
    given = options | {"mechanism": "gredp", "mode": "published", "epsilon": 5.0}
    summary = Session(given).run()
    assert summary["calibrated_to"] == "claimed"
    assert float(summary["epsilon_claimed"]) == pytest.approx(5, rel=2e-3)
    assert float(summary["epsilon_certified"]) > 6


def test_a_model_without_a_layer_of_its_domain_is_refused(options: dict[str, Any]) -> None:
    given = options | {"mechanism": "gredp", "model": "linear"}
    with pytest.raises(InvalidInput, match=r"sites: .*0 of 2 parameters in the frequency domain"):
        Session(given)
    asked = Session(given | {"settings": ("allow_time_domain=true",)}).run()
    assert asked["frequency_domain"]["parameters"] == 0
    assert asked["epsilon_certified"] > 0


def test_resuming_keeps_mechanism_mode_and_settings(options: dict[str, Any]) -> None:
    chosen = {"mechanism": "spectral_dp", "settings": ("keep_fraction=0.4",)}
    session = Session(options | chosen | {"epochs": 2})
    with pytest.raises(KeyboardInterrupt):
        session.run(on_step=_stop)
    session.save()
    again = Session({"out": options["out"], "resume": True, "figure": False})
    assert again.mechanism == session.mechanism
    assert isinstance(again.mechanism, SpectralDP)
    assert again.mechanism.keep_fraction == 0.4
    for change in ({"mechanism": "gredp"}, {"mode": "published"}, {"settings": ()}):
        with pytest.raises(PrivacyError, match="as when the run was started"):
            Session({"out": options["out"], "resume": True, **change})


def _stop(done: int) -> None:
    if done == 2:
        raise KeyboardInterrupt


def test_responses_are_drawn_once_and_survive_a_resume(options: dict[str, Any]) -> None:
    del options["noise_multiplier"]
    chosen = {"mechanism": "randomized_response", "epsilon": 1.0, "model": "linear", "epochs": 2}
    session = Session(options | chosen)
    told = session.data.y_train
    assert not torch.equal(told, load(options["data"]).y_train)
    with pytest.raises(KeyboardInterrupt):
        session.run(on_step=_stop)
    session.save()
    again = Session({"out": options["out"], "resume": True, "figure": False})
    assert torch.equal(again.data.y_train, told)
    assert again.training.data is again.data
    summary = again.run()
    assert summary["delta"] == 0
    assert "labels only" in summary["relation"]
    assert "differentially private" in summary["statement"]


def test_a_seeded_response_protects_nobody(options: dict[str, Any]) -> None:
    del options["noise_multiplier"]
    chosen = {"mechanism": "randomized_response", "epsilon": 1.0, "model": "linear"}
    summary = Session(options | chosen | {"unsafe_seed": 3}).run()
    assert summary["epsilon_certified"] == "inf"
    assert summary["epsilon_if_seed_secret"] == pytest.approx(1)


def test_the_corrected_loss_has_the_mean_of_the_true_one(images: Path) -> None:
    data = load(str(images))
    made, _ = make("randomized_response", _run(None), mode="corrected", epsilon=1.0)
    loss = unbiased_loss(made)  # type: ignore[arg-type]
    logits = torch.randn(1, CLASSES, dtype=torch.float64)
    channel = made.channel()  # type: ignore[attr-defined]
    for label in range(CLASSES):
        responses = torch.arange(CLASSES)
        each = torch.stack([loss(logits, z[None]) for z in responses])
        weights = torch.tensor([float(p) for p in channel[label]], dtype=torch.float64)
        true = torch.nn.functional.cross_entropy(logits, torch.tensor([label]))
        assert (weights * each).sum().item() == pytest.approx(true.item(), rel=1e-12)
    told = released(made, data, Key.from_unsafe_seed(1))  # type: ignore[arg-type]
    assert torch.equal(told.y_test, data.y_test)
    assert told.x_train is data.x_train


def _run(model: torch.nn.Module | None) -> Run:
    return Run(
        model=model,
        row_shape=(8, 8),
        classes=CLASSES,
        steps=10,
        sample_rate=0.25,
        rows=ROWS,
        batch_size=12,
        delta=1e-5,
    )


def test_projected_sgd_stays_in_its_set(options: dict[str, Any]) -> None:
    change = ONE_RECORD | {"settings": ("projection=ball:0.5", "steps=bound"), "epochs": 1}
    session = Session(options | change | {"mechanism": "projected_sgd"})
    norms = []

    def on_step(done: int) -> None:
        del done
        norms.append(torch.cat([p.detach().flatten() for p in session.training.step.params]).norm())

    session.run(on_step=on_step)
    assert all(norm <= 0.5 + 1e-6 for norm in norms)
    assert isinstance(session.mechanism, ProjectedSGD)
    assert session.mechanism.projection == Ball(0.5)
    optimizer = session.training.step.optimizer
    assert optimizer is not None
    dimension = session.training.step.plan.dimension
    wanted = session.mechanism.n * session.mechanism.step_size(len(norms), dimension)
    assert optimizer.lr == pytest.approx(wanted)


def test_the_builders_fill_in_what_follows_from_the_run() -> None:
    model = build("lenet5", row_shape=(8, 8), classes=CLASSES)
    made, open_noise = make("spectral_dp", _run(model), mode="corrected", epsilon=3.0)
    assert open_noise
    assert [s.kind for s in made.sites][:3] == ["conv", "other", "conv"]  # type: ignore[attr-defined]
    made, open_noise = make("directional", _run(model), mode="published", epsilon=3.0)
    assert not open_noise
    assert isinstance(made, Directional)
    assert (made.epsilon, made.delta, made.steps, made.sample_rate) == (3.0, 1e-5, 10, 0.25)
    made, _ = make("adaclip", _run(model), mode="corrected", noise_multiplier=2.0)
    assert isinstance(made, AdaClip)
    assert made.expected_batch_size == 12
    made, _ = make("dpsgd", _run(model), mode="corrected", noise_multiplier=2.0, clipping="group")
    assert isinstance(made, DPSGD)
    assert made.groups == (0, 0, 1, 1, 2, 2, 3, 3, 4, 4)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("gredp", "noise_kind=ab,0.6,0.8", {"noise_kind": ("ab", 0.6, 0.8)}),
        ("gredp", "noise_kind=real", {"noise_kind": "real"}),
        ("adaclip", "gamma=none", {"gamma": None}),
        ("adaclip", "gamma=0.01", {"gamma": 0.01}),
        ("directional", "amplified_budget=false", {"amplified_budget": False}),
        ("dpsgd", "batch_size=16", {"batch_size": 16}),
        ("projected_sgd", "projection=box:-1:1", None),
        ("projected_sgd", "projection=ball:2", {"projection": Ball(2.0)}),
    ],
)
def test_settings_are_read_by_type(name: str, text: str, value: dict[str, Any] | None) -> None:
    found = parsed(name, (text,))
    assert value is None or found == value


@pytest.mark.parametrize(
    ("name", "settings", "match"),
    [
        ("dpsgd", ("nothing=1",), "among noise_point, batch_size"),
        ("dpsgd", ("noise_point",), "KEY=VALUE"),
        ("dpsgd", ("batch_size=16", "batch_size=17"), "once per key"),
        ("dpsgd", ("batch_size=many",), "batch_size as"),
        ("dpsgd", ("mode=published",), "option of its own"),
        ("gredp", ("sites=none",), "follows from the run"),
        ("pruned", ("inner=dpsgd",), "follows from the run"),
        ("adaclip", ("beta1=nan",), "beta1 as float"),
        ("projected_sgd", ("projection=ball",), "projection as"),
    ],
)
def test_bad_settings_are_refused(name: str, settings: tuple[str, ...], match: str) -> None:
    with pytest.raises(InvalidInput, match=match):
        parsed(name, settings)


@pytest.mark.parametrize(
    "change",
    [
        {"mechanism": "nobody"},
        {"mode": "both"},
        {"mechanism": "adaclip", "clipping": "per_layer"},
        {"mechanism": "projected_sgd"},
        {"mechanism": "pruned", "settings": ("mask=published",)},
        {"mechanism": "randomized_response"},
        {"mechanism": "gredp", "arithmetic": "exact", "mode": "published"},
    ],
    ids=str,
)
def test_runs_that_make_no_sense_are_refused(
    options: dict[str, Any], change: dict[str, Any]
) -> None:
    with pytest.raises(InvalidInput):
        Session(options | change)
    assert not options["out"].exists()


def test_privacy_of_a_planned_run(capsys: pytest.CaptureFixture[str]) -> None:
    numbers = ("--sample-rate", "0.01", "--steps", "100", "--noise-multiplier", "1.1")
    chosen = ("--mechanism", "gredp", "--mode", "published", "--model", "gredp-lenet5")
    assert cli.main(["privacy", *numbers, *chosen]) == 0
    out = capsys.readouterr().out
    assert "G2" in out
    assert "G3" in out
    assert cli.main(["privacy", *numbers, *chosen[:4]]) == cli.REFUSED
    assert "--model" in capsys.readouterr().err


def planned(capsys: pytest.CaptureFixture[str], *chosen: str) -> dict[str, Any]:
    numbers = ("--sample-rate", "0.01", "--steps", "100", "--json")
    assert cli.main(["privacy", *numbers, *chosen]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_planned_epsilon_is_the_one_that_training_would_aim_at(
    capsys: pytest.CaptureFixture[str],
) -> None:
    chosen = ("--mechanism", "gredp", "--model", "gredp-lenet5", "--epsilon", "2")
    published = planned(capsys, *chosen, "--mode", "published")
    assert published["calibrated_to"] == "claimed"
    assert published["epsilon_claimed"] == pytest.approx(2, rel=5e-3)
    assert published["epsilon_certified"] > 10
    corrected = planned(capsys, *chosen)
    assert corrected["calibrated_to"] == "certified"
    assert corrected["epsilon_certified"] == pytest.approx(2, rel=5e-3)


def test_whose_claim_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    published = ("--mode", "published")
    found = planned(capsys, "--mechanism", "directional", "--epsilon", "2", *published)
    assert found["epsilon_claimed"] == 2
    assert "budget of 100 steps" in found["claim"]
    notes = ("--noise-multiplier", "100", "--sampling", "fixed", "--dataset-size", "100")
    found = planned(capsys, "--mechanism", "projected_sgd", *published, *notes)
    assert "notes" in found["claim"]
    found = planned(capsys, "--mechanism", "randomized_response", "--epsilon", "1")
    assert found["epsilon_certified"] == pytest.approx(1)
    assert found["delta"] == 0
