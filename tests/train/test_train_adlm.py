"""``dpkern train --mechanism adlm|ilm``: what is released, certified, resumed and refused."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dpkern import cli
from dpkern.base import dispatch
from dpkern.base.errors import BackendError, InvalidInput, PrivacyError
from dpkern.base.outputs import CHECKPOINT, FIGURE, REPORT
from dpkern.train.adlm import AdlmSession
from dpkern.train.session_factory import make_session

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, FEATURES = 60, 6


def table(path: Path, *, seed: int = 0, **changes: Any) -> str:
    """Rows in [0, 1] of three classes, which their first feature tells apart."""
    draw = np.random.default_rng(seed)
    y = np.arange(ROWS) % 3
    x = draw.random((ROWS, FEATURES))
    x[:, 0] = y / 2
    np.savez(path, **{"x": x, "y": y, **changes})
    return str(path)


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    return {
        "mechanism": "ilm",
        "data": table(tmp_path / "rows.npz"),
        "epsilon": 3.0,
        "epochs": 4,
        "batch_size": 12,
        "figure": False,
        "out": tmp_path / "out",
    }


def started(options: dict[str, Any]) -> AdlmSession:
    session = make_session(options)
    assert isinstance(session, AdlmSession)
    return session


def test_a_corrected_run_is_certified_for_what_it_claims(options: dict[str, Any]) -> None:
    summary = started({**options, "figure": True}).run()
    assert summary["epsilon_claimed"] == 3
    assert summary["epsilon_certified"] == pytest.approx(3, abs=1e-9)
    assert summary["relation"] == "replace_one, local, one record"
    assert 0 < summary["delta"] < 2.0**-40
    written = json.loads((options["out"] / REPORT).read_text())
    assert written["history"][-1]["step"] == 4 * (48 // 12)
    assert (options["out"] / FIGURE).stat().st_size > 5000


def test_an_environment_without_kernels_for_losses_is_refused_before_the_release(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("numba")
    monkeypatch.setattr(dispatch, "environment_choice", lambda: "numba")
    with pytest.raises(BackendError, match=r"no kernel for this op.*unset DPKERN_BACKEND"):
        make_session(options)
    assert not options["out"].exists()


def test_adlm_takes_relevances_from_public_records(options: dict[str, Any], tmp_path: Path) -> None:
    adaptive = {**options, "mechanism": "adlm"}
    with pytest.raises(InvalidInput, match="public_data"):
        make_session(adaptive)
    with pytest.raises(InvalidInput, match="other records"):
        make_session({**adaptive, "public_data": options["data"]})
    where = Path(options["data"])
    with pytest.raises(InvalidInput, match="other records"):
        make_session({**adaptive, "public_data": f"{where.parent}/./{where.name}"})
    copied = str(shutil.copy(where, tmp_path / "copied.npz"))
    with pytest.raises(InvalidInput, match="the same rows"):
        make_session({**adaptive, "public_data": copied})
    with pytest.raises(InvalidInput, match="none: nothing here"):
        make_session({**options, "public_data": options["data"]})
    public = table(tmp_path / "public.npz", seed=1)
    session = started({**adaptive, "public_data": public})
    assert session.mechanism.costs()["relevances"] == pytest.approx(1)
    assert session.mechanism.epsilon_certified() == pytest.approx(3, abs=1e-6)
    free = started({**adaptive, "public_data": public, "settings": ("relevance_from=public",)})
    assert "relevances" not in free.mechanism.costs()
    assert free.mechanism.epsilon_certified() == pytest.approx(3, abs=1e-6)


def test_a_run_that_diverges_stops_and_says_so(options: dict[str, Any]) -> None:
    # Noise of this size turns the loss around.
    given = {**options, "epsilon": 0.01, "mode": "published", "epochs": 50, "unsafe_seed": 3}
    session = started(given)
    summary = session.run()
    assert summary["diverged"]
    assert 0 < summary["steps"] < 50 * (48 // 12)
    assert session.history[-1].diverged
    assert session.history[-1].step == summary["steps"]
    with pytest.raises(InvalidInput, match=r"^resume: .*complete"):
        make_session({"out": options["out"], "resume": True, "figure": False})


@pytest.mark.parametrize(
    ("mechanism", "settings", "reason"),
    [
        ("adlm", (), "trained on the same rows"),
        ("ilm", ("noise_sharing=shared_per_feature",), "share one draw"),
        ("ilm", ("coefficient_form=feature_expanded",), "clean part"),
        ("ilm", (), None),
    ],
)
def test_published_runs_say_what_is_not_protected(
    options: dict[str, Any], mechanism: str, settings: tuple[str, ...], reason: str | None
) -> None:
    given = {**options, "mechanism": mechanism, "mode": "published", "settings": settings}
    summary = started({**given, "epochs": 1}).run()
    if reason is None:
        # A1: |L| eps2 / (2 |h0|), |h0| = 32, and the coefficients.
        assert summary["epsilon_by_part"]["inputs"] == pytest.approx(12 * 1.5 / 64)
        assert summary["epsilon_certified"] == pytest.approx(
            sum(summary["epsilon_by_part"].values()), rel=1e-6
        )
        assert summary["non_private"] is None
    else:
        assert summary["epsilon_certified"] == "inf"
        assert reason in summary["statement"]
        assert summary["certified_for"] == "nothing"


def test_a_known_seed_is_certified_for_nothing(options: dict[str, Any]) -> None:
    summary = started({**options, "unsafe_seed": 1, "epochs": 1}).run()
    assert summary["epsilon_certified"] == "inf"
    assert summary["epsilon_if_seed_secret"] == pytest.approx(3, abs=1e-9)


@pytest.mark.parametrize(("mode", "epsilon"), [("corrected", 3.0), ("published", 3000.0)])
def test_a_resumed_run_goes_on_with_what_was_released(
    options: dict[str, Any], mode: str, epsilon: float
) -> None:
    # The key is fresh: with printed noise for 3 some runs would diverge before they are stopped.
    options = {**options, "mode": mode, "epsilon": epsilon}
    whole = started(options)

    def stop(done: int) -> None:
        if done == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        whole.run(on_step=stop)
    whole.save()
    saved = torch.load(options["out"] / CHECKPOINT, weights_only=True)
    # No true label and no clean input is kept.
    kept = saved["training"]["released"]
    assert not torch.equal(kept["inputs"], whole.data.inputs(whole.data.x, "unit").float())
    again = started({"out": options["out"], "resume": True, "figure": False})
    assert torch.equal(again.training.released[0].inputs, whole.training.released[0].inputs)
    summary = again.run()
    whole.training.run()
    for mine, other in zip(
        again.training.stack.parameters.values(),
        whole.training.stack.parameters.values(),
        strict=True,
    ):
        assert torch.equal(mine, other)
    assert summary["steps"] == 16
    with pytest.raises(InvalidInput, match="a run with steps left"):
        make_session({"out": options["out"], "resume": True, "figure": False})


def test_resuming_refuses_other_options_and_data(options: dict[str, Any], tmp_path: Path) -> None:
    session = started(options)
    session.save()
    resumed = {"out": options["out"], "resume": True}
    with pytest.raises(PrivacyError, match="epsilon"):
        make_session({**resumed, "epsilon": 4.0})
    with pytest.raises(InvalidInput, match="lr"):
        make_session({**resumed, "lr": 0.3})
    table(tmp_path / "rows.npz", x=np.zeros((30, FEATURES)), y=np.arange(30) % 3)
    with pytest.raises(PrivacyError, match="training_rows"):
        make_session(resumed)


def test_true_labels_never_reach_a_checkpoint(options: dict[str, Any]) -> None:
    given = {**options, "mode": "published", "settings": ("coefficient_form=feature_expanded",)}
    session = started(given)
    session.save()
    saved = torch.load(options["out"] / CHECKPOINT, weights_only=True)
    assert saved["training"]["released"]["targets"] is None
    again = started({"out": options["out"], "resume": True})
    targets = again.training.released[0].targets
    assert targets is not None
    assert torch.equal(targets.argmax(1), session.data.y)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": np.full((ROWS, FEATURES), 2.0)}, "inside their public domain"),
        ({"x": np.full((ROWS, FEATURES), -0.5)}, "inside their public domain"),
        ({"x": np.full((ROWS, FEATURES), np.nan)}, "finite"),
        ({"y": np.zeros(ROWS, dtype=np.int64)}, "at least two classes"),
    ],
)
def test_bad_rows_are_refused_before_anything_is_written(
    options: dict[str, Any], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    table(tmp_path / "rows.npz", **changes)
    with pytest.raises(InvalidInput, match=message):
        make_session(options)
    assert not options["out"].exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epsilon": None}, "epsilon"),
        ({"model": "mlp"}, "adlm-dense"),
        ({"model": "adlm-mnist"}, "images"),
        ({"settings": ("labels=coefficients",)}, "published"),
        ({"settings": ("setting=1",)}, "follows from the run"),
        ({"batch_size": 1000}, "at most"),
        ({"noise_multiplier": 1.0}, "no such option"),
        ({"backend": "cpu"}, "no such option"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    options: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    given = {name: value for name, value in {**options, **changes}.items() if value is not None}
    with pytest.raises(InvalidInput, match=message):
        make_session(given)


def test_the_command_line(options: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--mechanism", "ilm", "--data", options["data"], "--epsilon", "3", "--epochs", "1"]
    words += ["--batch-size", "12", "--no-figure", "--out", str(options["out"])]
    assert cli.main(["train", *words]) == 0
    assert "claimed 3 | certified 3" in capsys.readouterr().out
    assert cli.main(["train", *words, "--overwrite", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert math.isclose(summary["epsilon_certified"], 3, abs_tol=1e-9)
