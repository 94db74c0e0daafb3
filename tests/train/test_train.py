"""The training session: what is refused, what is written, what resuming keeps."""

from __future__ import annotations

import json
import math
import os
import runpy
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dpkern.train.session
from dpkern.base.errors import DPKernError, InvalidInput, PrivacyError
from dpkern.base.outputs import CHECKPOINT, FIGURE, PAGE, REPORT, RESULTS, write_atomically
from dpkern.base.rng import Purpose
from dpkern.engine.demo.models import evaluate
from dpkern.engine.parameter import PrivateParameter
from dpkern.step.noise_tables import SampleTable
from dpkern.train import Session, build
from dpkern.train.checkpoint import read
from dpkern.train.options import CLIPPINGS, OPTIMIZERS, SAMPLINGS

ROWS, FEATURES, CLASSES = 60, 6, 3
EXAMPLE = Path(__file__).parents[2] / "examples" / "dp_step_loop.py"


def arrays(rows: int = ROWS, features: int = FEATURES) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    y = np.arange(rows) % CLASSES
    x = draw.normal(size=(rows, features)) + 2 * np.eye(CLASSES, features)[y]
    return x.astype(np.float32), y


@pytest.fixture
def points(tmp_path: Path) -> Path:
    path = tmp_path / "points.npz"
    x, y = arrays()
    np.savez(path, x=x, y=y)
    return path


@pytest.fixture
def options(points: Path, tmp_path: Path) -> dict[str, Any]:
    """A run of 8 steps on 48 rows."""
    return {
        "data": str(points),
        "model": "linear",
        "noise_multiplier": 1.0,
        "batch_size": 12,
        "epochs": 2,
        "out": tmp_path / "out",
        "figure": False,
    }


def stop_after(step: int) -> Callable[[int], None]:
    def on_step(done: int) -> None:
        if done == step:
            raise KeyboardInterrupt

    return on_step


def interrupted(options: dict[str, Any], step: int) -> Session:
    """A session that was stopped after ``step`` steps and has left its checkpoint."""
    session = Session(options)
    with pytest.raises(KeyboardInterrupt):
        session.run(on_step=stop_after(step))
    session.save()
    return session


@pytest.mark.parametrize(
    "change",
    [
        *({"optimizer": name} for name in OPTIMIZERS),
        *({"sampling": name} for name in SAMPLINGS),
        *({"clipping": name} for name in CLIPPINGS),
        {"arithmetic": "float"},
        {"backend": "reference"},
        {"max_physical_batch_size": 5},
        *({"clipping": name, "arithmetic": "float"} for name in CLIPPINGS),
        {"batch_size": 1},
        {"noise_multiplier": 0.0},
    ],
    ids=str,
)
def test_every_option_trains(options: dict[str, Any], change: dict[str, Any]) -> None:
    session = Session(options | {"epochs": 1} | change)
    start = [p.detach().clone() for p in session.training.model.parameters()]
    session.training.run()
    assert session.training.finished
    moved = [
        not torch.equal(a, b)
        for a, b in zip(start, session.training.model.parameters(), strict=True)
    ]
    assert all(moved)


def test_the_model_is_private_while_it_trains_and_ordinary_in_checkpoints(
    options: dict[str, Any],
) -> None:
    session = Session(options | {"diagnostics": True})
    model = session.training.model

    def on_step(done: int) -> None:
        assert {type(p) for p in model.parameters()} == {PrivateParameter}
        session.save()
        saved = read(options["out"] / CHECKPOINT)["model"]
        assert {type(value) for value in saved.values()} == {torch.Tensor}

    session.run(on_step=on_step)
    assert {type(p) for p in model.parameters()} == {torch.nn.Parameter}
    assert all(p.grad is None for p in model.parameters())


def test_what_a_run_writes(options: dict[str, Any]) -> None:
    summary = Session(options | {"figure": True}).run()
    out = options["out"]
    assert sorted(p.name for p in out.iterdir()) == sorted(set(RESULTS) - {PAGE})
    written = json.loads((out / REPORT).read_text(), parse_constant=pytest.fail)
    history = written.pop("history")
    assert written == summary
    assert [(record["epoch"], record["step"]) for record in history] == [(1, 4), (2, 8)]
    assert history[-1]["epsilon"] == summary["epsilon_certified"]
    assert summary["epsilon_claimed"] == pytest.approx(summary["epsilon_certified"])
    assert "diagnostics" not in written
    assert "training_loss" not in (out / REPORT).read_text()
    assert (out / FIGURE).read_bytes().startswith(b"\x89PNG")


def test_the_trained_model_comes_back_from_the_checkpoint(options: dict[str, Any]) -> None:
    session = Session(options | {"epochs": 1})
    summary = session.run()
    model = build("linear", row_shape=(FEATURES,), classes=CLASSES, init_seed=9)
    model.load_state_dict(torch.load(options["out"] / CHECKPOINT, weights_only=True)["model"])
    accuracy = evaluate(model, session.data.x_test, session.data.y_test)[1]
    assert accuracy == summary["test_accuracy"]


def test_a_checkpoint_holds_nothing_that_epsilon_does_not_cover(options: dict[str, Any]) -> None:
    session = interrupted(options | {"diagnostics": True}, 5)
    session.training.step._nonfinite = 3  # as if gradients had overflowed
    session.save()
    saved = read(options["out"] / CHECKPOINT)
    assert "nonfinite" not in saved["step"]
    assert "diagnostics" not in saved
    key = session.training.step.key.stream(Purpose.NOISE, 0).key
    assert key not in (options["out"] / CHECKPOINT).read_bytes()
    assert {key for record in saved["history"] for key in record} == {
        "epoch",
        "step",
        "heldout_loss",
        "heldout_accuracy",
        "epsilon",
        "epsilon_if_seed_secret",
    }


def test_diagnostics_only_when_asked_for_and_labelled(options: dict[str, Any]) -> None:
    summary = Session(options | {"diagnostics": True}).run()
    diagnostics = summary["diagnostics"]
    assert diagnostics["note"] == "not covered by epsilon"
    assert len(diagnostics["training_loss"]) == 2
    assert len(diagnostics["batch_sizes"]) == 8
    assert diagnostics["nonfinite_samples"] == 0


@pytest.mark.parametrize(
    ("step", "optimizer", "sampling"),
    [
        (1, "adamw", "poisson"),
        (4, "momentum", "poisson"),
        (7, "adam", "fixed"),
        (3, "nesterov", "shuffled"),
    ],
)
def test_a_seeded_run_resumed_equals_the_uninterrupted_one(
    options: dict[str, Any], step: int, optimizer: str, sampling: str, tmp_path: Path
) -> None:
    given = options | {"unsafe_seed": 7, "optimizer": optimizer, "sampling": sampling}
    whole = Session(given | {"out": tmp_path / "whole"})
    whole.training.run()
    interrupted(given, step)
    second = Session({"out": options["out"], "resume": True, "figure": False})
    assert second.training.step.steps == step
    second.training.run()
    for a, b in zip(
        whole.training.model.parameters(), second.training.model.parameters(), strict=True
    ):
        assert torch.equal(a, b)
    for one, two in zip(whole.training.history, second.training.history, strict=True):
        # The ledger cannot know that a shuffled epoch went on where it was left: never less.
        spent, respent = one.epsilon_if_seed_secret, two.epsilon_if_seed_secret
        assert spent is not None
        assert respent is not None
        assert respent == spent or (sampling == "shuffled" and respent > spent)
        assert replace(one, epsilon_if_seed_secret=None) == replace(
            two, epsilon_if_seed_secret=None
        )
    assert math.isinf(second.training.step.epsilon(1e-5))


RING = {"noise_source": "ring"}


def values(session: Session) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in session.training.model.parameters()])


def source_of(session: Session) -> str:
    return str(session.training.step.provenance()["source"])


@pytest.mark.parametrize("arithmetic", ["exact", "float"])
def test_noise_made_ahead_changes_no_bit_resumed_or_not(
    options: dict[str, Any], arithmetic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dpkern.train.session, "EPSILON_POINTS", 0)  # the accountant takes longer
    given = options | {"unsafe_seed": 7, "arithmetic": arithmetic}
    plain, ring = (Session(given | more | {"out": tmp_path / "whole"}) for more in ({}, RING))
    for session in (plain, ring):
        session.training.run()
    assert torch.equal(values(plain), values(ring))
    assert (source_of(plain), source_of(ring)) == ("inline", "ring")
    for first, then in (RING, {}), ({}, RING):
        interrupted(given | first | {"overwrite": True}, 3)
        resumed = Session({"out": options["out"], "resume": True, "figure": False} | then)
        resumed.training.run()
        assert torch.equal(values(plain), values(resumed))
        assert source_of(resumed) == ("ring" if then else "inline")


def test_an_interrupted_session_goes_on_with_its_source(options: dict[str, Any]) -> None:
    session = interrupted(options | RING | {"epochs": 1}, 3)
    assert session.run()["steps"] == 4
    with pytest.raises(PrivacyError, match="closed"):
        session.training.step.finish()


@pytest.mark.parametrize(
    "change",
    [
        {"noise_source": "samples"},
        RING | {"noise_multiplier": 0.0},
        RING | {"mechanism": "randomized_response", "epsilon": 1.0, "noise_multiplier": None},
        RING | {"mechanism": "pruned"},
    ],
    ids=str,
)
def test_noise_that_cannot_be_made_ahead(options: dict[str, Any], change: dict[str, Any]) -> None:
    given = {name: value for name, value in (options | change).items() if value is not None}
    with pytest.raises(InvalidInput) as caught:
        Session(given)
    assert caught.value.name == "noise_source"
    assert not options["out"].exists()


@pytest.mark.parametrize("mode", ["corrected", "published"])
def test_noise_from_samples_is_called_non_private(options: dict[str, Any], mode: str) -> None:
    given = options | {"noise_source": "table", "mode": mode}
    assert "epsilon" not in given
    session = Session(given)
    summary = session.run()
    assert source_of(session) == "table"
    source = session.noise_source
    assert isinstance(source, SampleTable)
    assert source.shape.distribution == "gaussian"
    for name in ("epsilon_claimed", "epsilon_certified"):
        assert summary[name] in (math.inf, "inf")
    assert summary["certified_for"] == "nothing"
    assert "no DP guarantee" in summary["non_private"]
    assert summary["noise"]["provenance"]["source"] == "table"


def test_noise_from_a_cumulative_table_is_paid_for(options: dict[str, Any]) -> None:
    certified = {}
    for name in ("inline", "cdt"):
        given = options | {"noise_source": name, "out": options["out"] / name}
        session = Session(given)
        summary = session.run()
        assert source_of(session) == name
        certified[name] = summary["epsilon_certified"]
        notes = summary["certificate"]["notes"]
        assert any("64-bit words" in note for note in notes) is (name == "cdt")
    assert certified["inline"] <= certified["cdt"] <= certified["inline"] * 1.001


def test_a_resumed_run_pays_for_each_steps_own_source(options: dict[str, Any]) -> None:
    interrupted(options, 3)
    again = {"out": options["out"], "resume": True, "figure": False, "noise_source": "table"}
    summary = Session(again).run()
    assert summary["epsilon_certified"] in (math.inf, "inf")
    assert "no DP guarantee" in summary["non_private"]


def test_no_noise_is_calibrated_to_what_samples_cannot_have(options: dict[str, Any]) -> None:
    given = {name: value for name, value in options.items() if name != "noise_multiplier"}
    with pytest.raises(PrivacyError, match="--noise-multiplier instead"):
        Session(given | {"epsilon": 3.0, "noise_source": "table"})
    multiplier = {}
    for name in ("inline", "cdt"):
        multiplier[name] = Session(
            given | {"epsilon": 3.0, "noise_source": name}
        ).mechanism.noise_multiplier
    assert multiplier["inline"] <= multiplier["cdt"]


@pytest.mark.parametrize("source", ["cdt", "table"])
def test_an_audit_of_inline_noise_says_nothing_of_a_tables(
    options: dict[str, Any], source: str
) -> None:
    with pytest.raises(InvalidInput, match="inline noise"):
        Session(options | {"noise_source": source, "audit": 100})


def test_an_unseeded_run_resumed_keeps_the_history_and_takes_a_fresh_key(
    options: dict[str, Any],
) -> None:
    first = interrupted(options, 5)
    parameters = [p.detach().clone() for p in first.training.model.parameters()]
    second = Session({"out": options["out"], "resume": True, "figure": False})
    for a, b in zip(parameters, second.training.model.parameters(), strict=True):
        assert torch.equal(a, b)
    one, two = (s.training.step.key.stream(Purpose.NOISE, 6).key for s in (first, second))
    assert one != two
    assert second.training.step.epsilon(1e-5) == first.training.step.epsilon(1e-5)
    summary = second.run()
    whole = Session(options | {"out": options["out"].with_name("whole")}).run()
    assert summary["steps"] == whole["steps"] == 8
    assert summary["epsilon_certified"] == whole["epsilon_certified"]
    assert [record.step for record in second.training.history] == [4, 8]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"epochs": 3}, PrivacyError),
        ({"noise_multiplier": 0.5}, PrivacyError),
        ({"epsilon": 3.0}, PrivacyError),
        ({"delta": 1e-6}, PrivacyError),
        ({"max_grad_norm": 2.0}, PrivacyError),
        ({"batch_size": 13}, PrivacyError),
        ({"sampling": "fixed"}, PrivacyError),
        ({"unsafe_seed": 1}, PrivacyError),
        ({"data": "digits"}, PrivacyError),
        ({"lr": 0.1}, InvalidInput),
        ({"model": "mlp"}, InvalidInput),
        ({"overwrite": True}, InvalidInput),
    ],
    ids=str,
)
def test_resuming_with_other_options_is_refused(
    options: dict[str, Any], change: dict[str, Any], error: type[DPKernError]
) -> None:
    interrupted(options, 3)
    before = (options["out"] / CHECKPOINT).read_bytes()
    with pytest.raises(error) as caught:
        Session(options | {"resume": True} | change)
    assert type(caught.value) is error
    assert (options["out"] / CHECKPOINT).read_bytes() == before


def test_resuming_on_other_rows_is_refused(options: dict[str, Any], points: Path) -> None:
    interrupted(options, 3)
    x, y = arrays(rows=90)
    np.savez(points, x=x, y=y)
    with pytest.raises(PrivacyError, match="training_rows"):
        Session({"out": options["out"], "resume": True, "figure": False})


def test_resuming_a_complete_run_is_refused(options: dict[str, Any]) -> None:
    session = Session(options)
    session.training.run()
    session.save()  # as if interrupted while the results were being written
    again = {"out": options["out"], "resume": True, "figure": False}
    assert Session(again).run()["steps"] == 8
    with pytest.raises(InvalidInput, match="complete after 8 steps"):
        Session(again)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 no", b"hello"], ids=["empty", "zip", "text"])
def test_a_damaged_checkpoint_is_refused(options: dict[str, Any], content: bytes) -> None:
    options["out"].mkdir()
    (options["out"] / CHECKPOINT).write_bytes(content)
    with pytest.raises(InvalidInput, match="resume"):
        Session({"out": options["out"], "resume": True})


@pytest.mark.parametrize("content", [{"a": 1}, {"format": "dpkern training checkpoint"}, [1]])
def test_a_foreign_checkpoint_is_refused(options: dict[str, Any], content: object) -> None:
    options["out"].mkdir()
    torch.save(content, options["out"] / CHECKPOINT)
    with pytest.raises(InvalidInput, match="resume"):
        Session({"out": options["out"], "resume": True})


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_signal_lets_the_step_finish(
    options: dict[str, Any], number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session(options)
    finish = session.training.step.finish

    def finish_after_signal() -> object:
        if session.training.step.steps == 2:
            os.kill(os.getpid(), number)
        return finish()

    monkeypatch.setattr(session.training.step, "finish", finish_after_signal)
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        session.run()
    assert session.training.between_steps
    assert session.training.step.steps == 3
    assert signal.getsignal(number) is before


def test_an_interrupt_within_a_step_is_not_a_state_to_save(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session(options)

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(session.training.step, "finish", interrupt)
    with pytest.raises(KeyboardInterrupt):
        session.run()
    assert not session.training.between_steps


def test_no_results_are_overwritten_unasked(options: dict[str, Any]) -> None:
    options["out"].mkdir()
    (options["out"] / REPORT).write_text("{}")
    with pytest.raises(InvalidInput, match="without results"):
        Session(options)
    Session(options | {"overwrite": True, "epochs": 1}).run()
    assert json.loads((options["out"] / REPORT).read_text())["steps"] == 4


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("old")

    def fail(file: Any) -> None:
        file.write(b"new")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_atomically(path, fail)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_no_matplotlib_is_said_before_training(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(DPKernError, match="pip install matplotlib"):
        Session(options | {"figure": True})
    Session(options | {"figure": False})


def test_example_loop(capsys: pytest.CaptureFixture[str]) -> None:
    found = runpy.run_path(str(EXAMPLE))
    assert found["step"].epsilon(found["DELTA"]) <= 1.0
    assert found["accuracy"] > 0.9
    assert "certified epsilon" in capsys.readouterr().out
