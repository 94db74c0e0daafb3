"""``dpkern train --mechanism spof|fm``: what is written, certified, resumed and refused."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from dpkern import cli
from dpkern.base import dispatch
from dpkern.base.errors import BackendError, InvalidInput, PrivacyError
from dpkern.base.outputs import FIGURE, PAGE, REPORT, RESULTS
from dpkern.base.rng import Key, Purpose
from dpkern.objective import SpofTraining, VisitSchedule
from dpkern.objective.records import load
from dpkern.privacy.mechanisms import SPOF
from dpkern.step.noise_tables.named import SOURCES
from dpkern.train import checkpoint, objective_mechanism
from dpkern.train.objective import ObjectiveSession
from dpkern.train.session_factory import make_session

STEPS = 24
"""Two epochs of 12 records."""

LONG = {"lr": 1e-9}
"""Steps so short that no run of the printed loss diverges."""

ONCE = {"settings": ("noise_schedule=once_per_record",)}


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    return {
        "mechanism": "spof",
        "epsilon": 2.0,
        "samples": 12,
        "features": 4,
        "code": 2,
        "epochs": 2,
        "figure": False,
        "out": tmp_path / "out",
    }


def interrupted(options: dict[str, Any], step: int) -> ObjectiveSession:
    """A session that was stopped after ``step`` steps and has left its checkpoint."""
    session = started(options)

    def on_step(done: int) -> None:
        if done == step:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.run(on_step=on_step)
    session.save()
    return session


def started(options: dict[str, Any]) -> ObjectiveSession:
    session = make_session(options)
    assert isinstance(session, ObjectiveSession)
    return session


def table(path: Path, rows: int = 30) -> Path:
    lines = [f"{i % 4},{i},{2 * i},{(7 * i) % 11},{i % 3}\n" for i in range(rows)]
    path.write_text("Id,Steps,Distance,Calories,Flights\n" + "".join(lines))
    return path


def test_what_a_run_writes(options: dict[str, Any]) -> None:
    summary = started(options | {"figure": True}).run()
    out = options["out"]
    assert sorted(p.name for p in out.iterdir()) == sorted(set(RESULTS) - {PAGE})
    written = json.loads((out / REPORT).read_text(), parse_constant=pytest.fail)
    history = written.pop("history")
    assert written == summary
    assert [(record["epoch"], record["step"]) for record in history] == [(1, 12), (2, STEPS)]
    assert history[-1]["heldout_accuracy"] == summary["test_accuracy"]
    assert summary["epsilon_claimed"] == summary["epsilon_certified"] == 2.0
    assert summary["certified_for"] == "released bits"
    assert summary["noise"]["scale_at_most"] == 4 / 2  # n / epsilon
    assert summary["visits"] == 2
    assert summary["public"]["synthetic"]
    assert (out / FIGURE).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("change", "certified", "alone"),
    [
        ({}, 2.0, None),
        ({"mechanism": "fm"}, 2.0, None),
        ({"sigma": 0.5}, 2.0, None),
        ({"settings": ("release=coefficients",)}, "inf", 2.0),
        ({"mode": "published", **LONG}, "inf", 2 * 2.0 * math.sqrt(2)),
        ({"mode": "published", "mechanism": "fm", **LONG}, "inf", 2 * 2.0 * math.sqrt(2)),
        ({"mode": "published", **ONCE, **LONG}, "inf", 2.0 * math.sqrt(2)),
        ({"unsafe_seed": 3}, "inf", None),
    ],
    ids=str,
)
def test_claimed_and_certified(
    options: dict[str, Any], change: dict[str, Any], certified: object, alone: float | None
) -> None:
    summary = started(options | change).run()
    assert summary["epsilon_claimed"] == 2.0
    assert summary["epsilon_certified"] == certified
    assert summary.get("epsilon_of_target_alone") == (alone and pytest.approx(alone))
    assert (summary["non_private"] is None) == (certified != "inf")
    assert summary.get("epsilon_if_seed_secret") == (2.0 if "unsafe_seed" in change else None)


def test_maxima_of_the_data_certify_nothing_and_public_bounds_do(
    options: dict[str, Any], tmp_path: Path
) -> None:
    data = {"data": str(table(tmp_path / "days.csv")), "samples": None}
    given = {name: value for name, value in (options | data).items() if value is not None}
    summary = started(given).run()
    assert summary["epsilon_certified"] == "inf"
    assert summary["certified_for"] == "nothing"
    assert summary["epsilon_if_bounds_public"] == 2.0
    assert "maxima" in summary["non_private"]
    assert summary["public"]["bounds"] == "maxima of the data"
    bounds = {"bounds": "Steps=60, Distance=60, Calories=60, Flights=60"}
    public = started(given | bounds | {"overwrite": True}).run()
    assert public["epsilon_certified"] == 2.0
    assert "epsilon_if_bounds_public" not in public


def test_samples_of_one_record_are_visits_of_it_too(
    options: dict[str, Any], tmp_path: Path
) -> None:
    data = {"data": str(table(tmp_path / "days.csv")), "bounds": "60", "samples": 40}
    summary = started(options | data | {"mode": "published", **LONG}).run()
    copies = summary["public"]["copies_of_a_record"]
    assert copies > 1
    expected = 2 * copies * 2.0 * math.sqrt(2)
    assert summary["epsilon_of_target_alone"] == pytest.approx(expected)


def test_initial_weights_have_a_public_seed_of_their_own(options: dict[str, Any]) -> None:
    first, other = (started(options | {"unsafe_seed": seed}).training for seed in (3, 4))
    assert torch.equal(first.weights.encoder, other.weights.encoder)
    moved = started(options | {"unsafe_seed": 3, "init_seed": 1}).training
    assert not torch.equal(first.weights.encoder, moved.weights.encoder)


def test_samples_of_one_record_share_its_one_release(tmp_path: Path) -> None:
    path = table(tmp_path / "days.csv")
    records = load(path, features=4, bounds=60, samples=40)
    assert records.copies > 1
    training = SpofTraining(
        records,
        SPOF(epsilon=1.0),
        VisitSchedule(epochs=1),
        seeds=[0, 1],
        code=2,
        keys=[Key.fresh(), Key.fresh()],
    )
    training.step()
    released = training.state_dict()["rule"]["targets"].view(2, 2, 40, 4)
    for run in range(2):
        for user in range(2):
            for row in records.rows[user].unique():
                same = released[run, user][records.rows[user] == row]
                assert torch.equal(same, same[:1].expand_as(same))
    assert not torch.equal(released[0], released[1])
    pooled = records.pooled()
    assert pooled.rows.unique().numel() == sum(u.unique().numel() for u in records.rows)
    assert torch.equal(pooled.train[0][pooled.firsts[0]], pooled.train[0])


@pytest.mark.parametrize(
    "change",
    [{}, {"mode": "published", "epsilon": 1e3}, {"mechanism": "fm", "sigma": 0.3}],
    ids=str,
)
def test_a_seeded_run_resumed_equals_the_uninterrupted_one(
    options: dict[str, Any], change: dict[str, Any], tmp_path: Path
) -> None:
    given = options | {"unsafe_seed": 7} | change
    whole = started(given | {"out": tmp_path / "whole"})
    expected = whole.run()
    interrupted(given, 13)
    second = started({"out": options["out"], "resume": True, "figure": False})
    assert second.steps_done == 13
    got = second.run()
    for name in ("test_accuracy", "test_mse", "test_bce", "epsilon_certified", "visits"):
        assert got[name] == expected[name]
    assert torch.equal(second.training.weights.encoder, whole.training.weights.encoder)
    assert second.history == whole.history


def test_an_unseeded_run_resumed_releases_nothing_again(options: dict[str, Any]) -> None:
    first = interrupted(options, 5)
    released = first.training.state_dict()["rule"]["targets"]
    second = started({"out": options["out"], "resume": True, "figure": False})
    summary = second.run()
    assert torch.equal(second.training.state_dict()["rule"]["targets"], released)
    assert summary["epsilon_certified"] == 2.0


def test_a_checkpoint_holds_neither_key_nor_records(options: dict[str, Any]) -> None:
    session = interrupted(options, 5)
    content = session.checkpoint_path.read_bytes()
    assert session.training.keys[0].stream(Purpose.LAPLACE, 0).key not in content
    assert session.records.train[0, 0].numpy().tobytes() not in content
    saved = checkpoint.read(session.checkpoint_path, kind=checkpoint.OBJECTIVE_FORMAT)
    assert saved["training"]["step_number"] == 5


@pytest.mark.parametrize(
    ("change", "error", "name"),
    [
        ({"epsilon": 3.0}, PrivacyError, "epsilon"),
        ({"sigma": 1.0}, PrivacyError, "sigma"),
        ({"code": 3}, InvalidInput, "code"),
        ({"mechanism": "fm"}, PrivacyError, "mechanism"),
        ({"mechanism": "dpsgd"}, InvalidInput, "resume"),
    ],
    ids=str,
)
def test_resuming_with_other_options_is_refused(
    options: dict[str, Any], change: dict[str, Any], error: type[Exception], name: str
) -> None:
    interrupted(options, 3)
    with pytest.raises(error, match=f"^{name}: "):
        make_session({"out": options["out"], "resume": True, "figure": False} | change)


def test_a_complete_run_and_other_records_are_refused(
    options: dict[str, Any], tmp_path: Path
) -> None:
    path = table(tmp_path / "days.csv")
    given = {**options, "data": str(path), "samples": 12}
    interrupted(given, 3)
    again = {"out": options["out"], "resume": True, "figure": False}
    with path.open("a") as file:
        file.write("1,2,3,4,5\n" * 20)
    with pytest.raises(PrivacyError, match=r"^data: "):
        make_session(again)
    table(path)
    started(again).run()
    with pytest.raises(InvalidInput, match=r"^resume: .*complete"):
        make_session(again)


@pytest.mark.parametrize("mechanism", ["spof", "fm"])
def test_every_source_trains_and_says_what_it_is(options: dict[str, Any], mechanism: str) -> None:
    given = options | {"mechanism": mechanism}
    given |= {"users": 1} if mechanism == "fm" else {}
    found = {}
    for name in SOURCES:
        more = {"noise_source": name, "out": options["out"] / name, "unsafe_seed": 5}
        session = started(given | more)
        summary = session.run()
        assert summary["noise"]["source"] == name
        found[name] = summary, session.training.weights.encoder
    assert torch.equal(found["inline"][1], found["ring"][1])
    assert not torch.equal(found["inline"][1], found["cdt"][1])
    for name, (summary, _) in found.items():
        secret, claimed = summary["epsilon_if_seed_secret"], summary["epsilon_claimed"]
        lost = name == "table"
        assert (claimed in (math.inf, "inf")) is (secret in (math.inf, "inf")) is lost
        assert ("no DP guarantee" in summary["non_private"]) is lost
        event = summary["certificate"]["event"]["event"]
        assert (event == "NonPrivateDpEvent") is lost
    assert any("total variation" in note for note in found["cdt"][0]["certificate"]["notes"])


def test_the_certificate_pays_for_a_cumulative_table() -> None:
    mechanism = SPOF(epsilon=2.0)
    given: dict[str, Any] = {"visits": 3, "seeded": False}
    plain = objective_mechanism.certificate(mechanism, **given)
    near = objective_mechanism.certificate(mechanism, variation=1e-15, **given)
    far = objective_mechanism.certificate(mechanism, variation=1e-3, **given)
    assert (near.epsilon, far.epsilon) == (plain.epsilon, math.inf)
    paid = 3 * 2**20 * (1 + math.exp(plain.epsilon)) * 1e-15
    assert near.delta - plain.delta == pytest.approx(paid)
    assert far.certified_for == "nothing"


def test_a_run_with_a_tables_noise_is_not_resumed_with_anothers(options: dict[str, Any]) -> None:
    interrupted(options | {"noise_source": "cdt"}, 3)
    again = {"out": options["out"], "resume": True}
    for source in ({}, {"noise_source": "table"}):
        with pytest.raises(InvalidInput, match="settings that the state"):
            make_session(again | source)
    make_session(again | {"noise_source": "cdt"}).run()


def test_a_run_that_diverges_stops_and_says_so(options: dict[str, Any]) -> None:
    given = options | {"mode": "published", "epochs": 50, "unsafe_seed": 7}
    summary = started(given).run()
    assert summary["diverged"]
    assert math.isfinite(summary["test_bce"])
    assert summary["steps"] < 50 * 12


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"noise_multiplier": 1.0}, "noise_multiplier"),
        ({"model": "mlp"}, "model"),
        ({"max_grad_norm": 1.0}, "max_grad_norm"),
        ({"sampling": "poisson"}, "sampling"),
        ({"delta": 1e-5}, "delta"),
        ({"noise_source": "dice"}, "noise_source"),
        ({"diagnostics": True}, "diagnostics"),
        ({"mechanism": "dpsgd"}, "samples"),
        ({"mechanism": "secret"}, "mechanism"),
        ({"mechanism": "fm", "users": 2}, "users"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"code": 4}, "code"),
        ({"settings": ("constant=-1",)}, "constant"),
        ({"settings": ("epsilon=9",)}, "set"),
        ({"settings": ("noise_schedule=per_visit",)}, "noise_schedule"),
        ({"columns": "Steps"}, "columns"),
        ({"data": "missing.csv"}, "data"),
        ({"bounds": "large"}, "bounds"),
        ({"backend": "abacus"}, "backend"),
    ],
    ids=str,
)
def test_what_does_not_apply_is_refused_before_anything_is_written(
    options: dict[str, Any], change: dict[str, Any], name: str
) -> None:
    with pytest.raises(InvalidInput, match=f"^{name}: "):
        make_session(options | change)
    assert not options["out"].exists()


def test_a_backend_without_kernels_for_losses_is_refused_and_never_chosen(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("numba")
    refused = "numba: has no kernel for this op"
    with pytest.raises(BackendError, match=refused):
        make_session(options | {"backend": "numba"})
    assert not options["out"].exists()
    monkeypatch.setattr(dispatch, "PREFERENCE", {"cpu": ("numba", "reference")})
    assert make_session(options).backend == "reference"


def test_no_epsilon_is_refused(options: dict[str, Any]) -> None:
    del options["epsilon"]
    with pytest.raises(InvalidInput, match=r"^epsilon: "):
        make_session(options)


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    small = ["--samples", "12", "--features", "4", "--code", "2", "--epochs", "1", "--no-figure"]
    run = ["train", "--mechanism", "spof", "--epsilon", "1", "--sigma", "0", "--out", out]
    assert cli.main([*run, *small, "--unsafe-seed", "0", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["options"]["unsafe_seed"] == 0
    assert summary["epsilon_if_seed_secret"] == 1.0
    assert cli.main([*run, *small, "--overwrite"]) == 0
    shown = capsys.readouterr().out
    assert "claimed 1 | certified 1" in shown
    assert "(synthetic)" in shown
    assert cli.main([*run, "--clipping", "flat", "--json"]) == cli.REFUSED
    assert json.loads(capsys.readouterr().out)["error"]["name"] == "clipping"


@pytest.mark.parametrize(
    ("arguments", "certified", "alone"),
    [
        (("--mechanism", "spof"), 1.0, None),
        (("--mechanism", "spof", "--mode", "published"), "inf", 20 * math.sqrt(2)),
        (("--mechanism", "fm", "--mode", "published", "--set", "joint=true"), "inf", 20.0),
    ],
    ids=str,
)
def test_privacy_of_a_planned_run(
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    certified: object,
    alone: float | None,
) -> None:
    assert cli.main(["privacy", *arguments, "--epsilon", "1", "--steps", "20", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["epsilon_certified"] == certified
    assert facts.get("epsilon_of_target_alone") == (alone and pytest.approx(alone))
    assert cli.main(["privacy", *arguments, "--epsilon", "1", "--delta", "1e-6"]) == cli.REFUSED
    assert cli.main(["privacy", *arguments]) == cli.REFUSED


def test_notes_of_the_register_are_in_the_facts() -> None:
    made = objective_mechanism.make("spof", mode="published", settings=(), epsilon=1.0)
    facts = objective_mechanism.facts(made, visits=1, seeded=False)
    assert {"S1", "S2", "S4", "S5", "S6", "S7", "S8"} <= {note["id"] for note in facts["notes"]}
    fixed = objective_mechanism.make("spof", mode="corrected", settings=(), epsilon=1.0)
    assert objective_mechanism.facts(fixed, visits=1, seeded=False)["notes"] == []
