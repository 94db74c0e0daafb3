"""The command line: what it prints, what it refuses, and that a refusal leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dpkern
from dpkern import cli
from dpkern.base import dispatch, errors
from dpkern.base.outputs import CHECKPOINT, REPORT, RESULTS
from dpkern.privacy.accounting.history import BATCHED_BITS
from dpkern.train import Session
from dpkern.train.options import CLIPPINGS

REQUIRED = {
    "mechanism": str,
    "mode": str,
    "epsilon_claimed": float,
    "epsilon_certified": float,
    "delta": float,
    "relation": str,
    "accountant": str,
    "noise_multiplier": float,
    "sample_rate": float,
    "steps": int,
    "max_grad_norm": float,
    "test_accuracy": float,
    "backend": str,
    "arithmetic": str,
    "seconds": float,
    "report": str,
    "certified_for": str,
    "sampling": str,
    "noise": dict,
}


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DPKERN_BACKEND", raising=False)


@pytest.fixture
def points(tmp_path: Path) -> str:
    y = np.arange(60) % 3
    x = np.random.default_rng(0).normal(size=(60, 6)) + 2 * np.eye(3, 6)[y]
    np.savez(tmp_path / "points.npz", x=x, y=y)
    (tmp_path / "narrow.csv").write_text("1,2,0\n3,4,1\n" * 30)
    return "points.npz"


SMALL = ("--model", "linear", "--batch-size", "12", "--epochs", "1")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    """Standard output must be one line, one strict JSON object."""
    code, out, _ = run(capsys, *arguments, "--json")
    assert out.count("\n") == 1
    found = json.loads(out, parse_constant=pytest.fail)
    assert isinstance(found, dict)
    return code, found


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.slow
def test_digits_within_epsilon_3(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = run_json(capsys, "train", "--data", "digits", "--epsilon", "3", "--out", "o")
    assert code == 0
    assert {name: type(found[name]) for name in REQUIRED} == REQUIRED
    assert 2.95 < found["epsilon_certified"] <= 3
    assert found["epsilon_claimed"] == pytest.approx(found["epsilon_certified"])
    assert (found["relation"], found["sampling"]) == ("add_remove", "poisson")
    assert found["certified_for"] == BATCHED_BITS
    assert found["steps"] == 90
    assert found["noise"]["key"] == "operating system"
    assert found["test_accuracy"] >= 0.88
    assert found["report"] == f"o/{REPORT}"
    assert "diagnostics" not in found
    assert "epsilon_if_seed_secret" not in found


def test_default_output_directory_and_table(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, points: str
) -> None:
    code, out, err = run(capsys, "train", "--data", points, "--noise-multiplier", "1", *SMALL)
    assert code == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert {p.name for p in folder.iterdir()} == set(RESULTS)
    assert "differentially private" in out
    assert "held-out accuracy" in out
    assert "held-out loss" in err
    assert "training loss" not in out + err


def test_seeded_run_certifies_nothing(capsys: pytest.CaptureFixture[str], points: str) -> None:
    arguments = ("train", "--data", points, "--noise-multiplier", "1", *SMALL, "--no-figure")
    code, found = run_json(capsys, *arguments, "--unsafe-seed", "3")
    assert code == 0
    assert found["epsilon_certified"] == "inf"
    assert 0 < found["epsilon_if_seed_secret"] < 100
    assert found["noise"]["key"] == "seed"
    assert found["certified_for"] == "nothing"
    assert found["statement"] == "not private against anyone who knows the seed of the noise"


def test_no_noise_is_called_not_private(capsys: pytest.CaptureFixture[str], points: str) -> None:
    code, found = run_json(
        capsys, "train", "--data", points, "--noise-multiplier", "0", *SMALL, "--no-figure"
    )
    assert code == 0
    assert found["epsilon_certified"] == found["epsilon_claimed"] == "inf"
    assert found["statement"] == "not private: parameter 0 is released without noise"


def test_diagnostics_are_labelled(capsys: pytest.CaptureFixture[str], points: str) -> None:
    arguments = ("train", "--data", points, "--noise-multiplier", "1", *SMALL, "--diagnostics")
    code, out, err = run(capsys, *arguments)
    assert code == 0
    seen = " ".join(err.split())
    assert "training loss" in seen
    assert "(not covered by epsilon)" in seen
    assert "not covered by epsilon" in out


GOOD = ("train", "--data", "points.npz", "--noise-multiplier", "1")
BAD_CALLS: dict[str, tuple[tuple[str, ...], str, str]] = {
    "no noise given": (("train",), "InvalidInput", "epsilon, noise_multiplier"),
    "both given": ((*GOOD, "--epsilon", "1"), "InvalidInput", "epsilon, noise_multiplier"),
    "epsilon 0": (("train", "--epsilon", "0"), "InvalidInput", "epsilon"),
    "epsilon NaN": (("train", "--epsilon", "nan"), "InvalidInput", "epsilon"),
    "epsilon out of reach": (
        ("train", "--epsilon", "1e-9", "--model", "linear"),
        "PrivacyError",
        "target_epsilon",
    ),
    "noise out of range": (
        ("train", "--data", "points.npz", "--noise-multiplier", "0.01"),
        "PrivacyError",
        "noise_multiplier",
    ),
    "negative noise": (
        ("train", "--data", "points.npz", "--noise-multiplier", "-1"),
        "InvalidInput",
        "noise_multiplier",
    ),
    "delta 0": ((*GOOD, "--delta", "0"), "InvalidInput", "delta"),
    "delta 1": ((*GOOD, "--delta", "1"), "InvalidInput", "delta"),
    "norm bound 0": ((*GOOD, "--max-grad-norm", "0"), "InvalidInput", "max_grad_norm"),
    "norm bound inf": ((*GOOD, "--max-grad-norm", "inf"), "InvalidInput", "max_grad_norm"),
    "no epochs": ((*GOOD, "--epochs", "0"), "InvalidInput", "epochs"),
    "batch size 0": ((*GOOD, "--batch-size", "0"), "InvalidInput", "batch_size"),
    "batch above rows": ((*GOOD, "--batch-size", "49"), "InvalidInput", "batch_size"),
    "physical batch 0": (
        (*GOOD, "--max-physical-batch-size", "0"),
        "InvalidInput",
        "max_physical_batch_size",
    ),
    "threads 0": ((*GOOD, "--threads", "0"), "InvalidInput", "threads"),
    "unknown noise source": ((*GOOD, "--noise-source", "dice"), "InvalidInput", "noise_source"),
    "no noise to make ahead": (
        (*"train --data points.npz --noise-multiplier 0 --noise-source ring".split(),),
        "InvalidInput",
        "noise_source",
    ),
    "lr NaN": ((*GOOD, "--lr", "nan"), "InvalidInput", "lr"),
    "unknown model": ((*GOOD, "--model", "vgg"), "InvalidInput", "model"),
    "unknown optimizer": ((*GOOD, "--optimizer", "lbfgs"), "InvalidInput", "optimizer"),
    "unknown sampling": ((*GOOD, "--sampling", "random"), "InvalidInput", "sampling"),
    "unknown clipping": ((*GOOD, "--clipping", "none"), "InvalidInput", "clipping"),
    "unknown arithmetic": ((*GOOD, "--arithmetic", "double"), "InvalidInput", "arithmetic"),
    "unknown backend": ((*GOOD, "--backend", "tpu"), "InvalidInput", "backend"),
    "rounds": ((*GOOD, "--rounds", "10"), "InvalidInput", "rounds"),
    "negative seed": ((*GOOD, "--unsafe-seed", "-1"), "InvalidInput", "unsafe_seed"),
    "huge seed": ((*GOOD, "--unsafe-seed", str(2**70)), "InvalidInput", "unsafe_seed"),
    "negative init seed": ((*GOOD, "--init-seed", "-1"), "InvalidInput", "init_seed"),
    "feature scale 0": ((*GOOD, "--feature-scale", "0"), "InvalidInput", "feature_scale"),
    "one class declared": ((*GOOD, "--classes", "1"), "InvalidInput", "classes"),
    "test fraction 1": ((*GOOD, "--test-fraction", "1"), "InvalidInput", "test_fraction"),
    "no such data": (
        ("train", "--data", "none.csv", "--noise-multiplier", "1"),
        "InvalidInput",
        "data",
    ),
    "lenet5 on 6 features": ((*GOOD, "--model", "lenet5"), "InvalidInput", "model"),
    "resnet on 6 features": ((*GOOD, "--model", "resnet"), "InvalidInput", "model"),
    "transformer on 2 features": (
        ("train", "--data", "narrow.csv", "--noise-multiplier", "1", "--model", "transformer"),
        "InvalidInput",
        "model",
    ),
    "out is a file": ((*GOOD, "--out", "points.npz"), "InvalidInput", "out"),
    "out below a file": ((*GOOD, "--out", "points.npz/run"), "InvalidInput", "out"),
    "out too long": ((*GOOD, "--out", "x" * 300), "InvalidInput", "out"),
    "resume without out": ((*GOOD, "--resume"), "InvalidInput", "out"),
    "resume nothing": (("train", "--resume", "--out", "none"), "InvalidInput", "resume"),
    "resume and overwrite": (
        ("train", "--resume", "--overwrite", "--out", "none"),
        "InvalidInput",
        "resume, overwrite",
    ),
    "privacy: nothing given": (("privacy",), "InvalidInput", "--sample-rate, --steps"),
    "privacy: no noise given": (
        ("privacy", "--sample-rate", "0.1", "--steps", "10"),
        "InvalidInput",
        "epsilon, noise_multiplier",
    ),
    "privacy: rate 2": (
        ("privacy", "--sample-rate", "2", "--steps", "10", "--noise-multiplier", "1"),
        "InvalidInput",
        "sample_rate",
    ),
    "privacy: fixed without size": (
        (*"privacy --sample-rate 0.1 --steps 9 --noise-multiplier 1 --sampling fixed".split(),),
        "InvalidInput",
        "dataset_size",
    ),
}


@pytest.mark.parametrize(("arguments", "kind", "name"), BAD_CALLS.values(), ids=BAD_CALLS.keys())
def test_bad_calls(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    points: str,
    arguments: tuple[str, ...],
    kind: str,
    name: str,
) -> None:
    before = files(tmp_path)
    code, out, err = run(capsys, *arguments, "--json")
    error = json.loads(out)["error"]
    assert code == 2
    assert (error["type"], error["name"]) == (kind, name)
    assert issubclass(getattr(errors, kind), errors.DPKernError)
    assert err.startswith(f"{kind}: {name}: expected ")
    assert error["remedy"] in err
    assert "Traceback" not in err
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "--epsilon", "many"),
        ("train", "--colour", "red"),
        ("fly",),
        ("privacy", "--steps", "many"),
    ],
    ids=" ".join,
)
def test_wrong_usage(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    code, found = run_json(capsys, *arguments)
    assert code == 2
    assert found["error"]["type"] == "UsageError"


def test_a_message_without_json_leaves_standard_output_empty(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, err = run(capsys, "train", "--data", "[red]none.csv", "--epsilon", "1")
    assert (code, out) == (2, "")
    assert "got [red]none.csv" in err


def test_backend_that_cannot_run(
    capsys: pytest.CaptureFixture[str], points: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = dpkern.base.dispatch.table()
    for row in rows:
        if row["backend"] == "cpu":
            row.update(available=False, reason="was not built")
    monkeypatch.setattr(dpkern.base.dispatch, "table", lambda: rows)
    code, found = run_json(capsys, *GOOD, "--backend", "cpu")
    assert code == 2
    assert found["error"]["type"] == "BackendError"
    assert "was not built" in found["error"]["message"]


def test_interrupt_and_resume(
    capsys: pytest.CaptureFixture[str], points: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = (*GOOD, *SMALL, "--out", "o", "--no-figure")
    original = Session.run

    def interrupt(session: Session, **callbacks: Any) -> dict[str, Any]:
        def on_step(done: int) -> None:
            callbacks["on_step"](done)
            if done == 3:
                raise KeyboardInterrupt

        return original(session, on_step=on_step, on_epoch=callbacks["on_epoch"])

    with monkeypatch.context() as patch:
        patch.setattr(Session, "run", interrupt)
        code, found = run_json(capsys, *arguments)
    assert code == 130
    assert found["interrupted"] is True
    assert found["steps"] == 3
    assert found["report"] is None
    assert {p.name for p in Path("o").iterdir()} == {CHECKPOINT}

    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert "continue with --resume" in err

    code, found = run_json(capsys, "train", "--resume", "--out", "o", "--max-grad-norm", "2")
    assert code == 2
    assert found["error"]["type"] == "PrivacyError"

    resume = ("train", "--resume", "--out", "o", "--no-figure", "--noise-source", "ring")
    code, found = run_json(capsys, *resume)
    assert code == 0
    made = found["noise"]["provenance"]
    assert made["source"] == "ring"
    assert made["words"]["consumed"] > 0
    assert (made["words"]["reused"], made["words"]["waiting"]) == (0, 0)
    assert "noise_source" not in found["options"]
    assert found["steps"] == 4
    planned = run_json(
        capsys, *"privacy --noise-multiplier 1 --sample-rate 0.25 --steps 4".split()
    )[1]
    assert found["epsilon_certified"] == pytest.approx(planned["epsilon_certified"], rel=1e-3)
    assert Path("o", REPORT).exists()


def test_control_c_in_a_real_process(points: str) -> None:
    """SIGINT to the process itself, as a terminal sends it."""
    command = [sys.executable, "-m", "dpkern", *GOOD, "--epochs", "100000", "--out", "o"]
    process = subprocess.Popen(
        [*command, "--no-figure", "--batch-size", "12"],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "120"},
    )
    assert process.stderr is not None
    seen = ""
    while "held-out" not in seen:  # the bar appears once steps are being taken
        piece = process.stderr.read(1)
        assert piece, seen
        seen += piece
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "dpkern train --resume --out o" in rest
    assert "Traceback" not in rest
    assert {p.name for p in Path("o").iterdir()} == {CHECKPOINT}


def test_privacy_of_the_reference_point(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "privacy --noise-multiplier 1.1 --sample-rate 0.01 --steps 10000 --delta 1e-5"
    code, found = run_json(capsys, *arguments.split())
    assert code == 0
    assert found["epsilon_certified"] == pytest.approx(5.1926, abs=0.005)
    assert found["accountant"] == "PLD"
    assert found["bounds"]["RDP"] == pytest.approx(5.632, abs=0.005)


@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_privacy_of_a_plan_covers_a_run(
    capsys: pytest.CaptureFixture[str], points: str, clipping: str
) -> None:
    run_of = ("--clipping", clipping, "--no-figure", *SMALL)
    trained = run_json(capsys, *GOOD, *run_of, "--model", "transformer")[1]
    arguments = "privacy --noise-multiplier 1 --sample-rate 0.25 --steps 4".split()
    planned = run_json(capsys, *arguments, "--clipping", clipping)[1]
    assert trained["clipping"] == clipping
    assert trained["epsilon_certified"] <= planned["epsilon_certified"] * (1 + 1e-9)
    assert trained["epsilon_certified"] == pytest.approx(planned["epsilon_certified"], rel=1e-3)


def test_privacy_calibrates(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "privacy --epsilon 2 --sample-rate 0.1 --steps 100"
    code, found = run_json(capsys, *arguments.split())
    assert code == 0
    assert 1.99 < found["epsilon_certified"] <= 2
    assert found["noise_multiplier"] > 1


def test_privacy_of_shuffled_batches_is_not_amplified(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (
        "privacy --noise-multiplier 1.1 --sample-rate 0.01 --steps 1000 "
        "--sampling shuffled --mode published"
    )
    code, out, _ = run(capsys, *arguments.split())
    assert code == 0
    shown = dict(
        (cell.strip() for cell in line.split("│")[1:3]) for line in out.splitlines() if "│" in line
    )
    assert shown["relation"] == "zero_out"
    assert float(shown["epsilon certified"]) > 2 * float(shown["epsilon claimed"])


def test_privacy_of_batches_of_fixed_size_is_amplified(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (
        "privacy --noise-multiplier 4 --sample-rate 0.01 --steps 1000 "
        "--sampling fixed --dataset-size 60000"
    )
    code, found = run_json(capsys, *arguments.split())
    assert code == 0
    assert (found["relation"], found["accountant"]) == ("replace_one", "PLD")
    assert 0.718 < found["epsilon_certified"] < 0.721 < found["bounds"]["RDP"]


def test_privacy_says_where_the_noise_ends(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "privacy --noise-multiplier 0.07 --sample-rate 1 --steps 1"
    code, found = run_json(capsys, *arguments.split())
    assert code == 0
    assert found["epsilon_certified"] == "inf"
    assert any("the noise ends 12 standard deviations out" in note for note in found["notes"])


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = run_json(capsys, "info")
    assert code == 0
    assert found["version"] == dpkern.__version__
    assert found["build"]["native"] in (True, False)
    rows = found["ops"]
    assert {row["op"] for row in rows} >= {"clip.clip_sum", "noise.add_noise", "update.step"}
    assert all(row["available"] for row in rows if row["backend"] == "reference")
    assert all(row["reason"] for row in rows if not row["available"])
    code, out, _ = run(capsys, "info")
    assert code == 0
    header = next(line for line in out.splitlines() if "reference" in line)
    columns = [cell.strip() for cell in header.strip("┃").split("┃")]
    assert columns == ["op", *dispatch.BACKENDS]
    shown = next(line for line in out.splitlines() if "update.step" in line)
    cells = [cell.strip() for cell in shown.strip("│").split("│")]
    wanted = {row["backend"]: row["available"] for row in rows if row["op"] == "update.step"}
    assert cells == ["update.step", *("yes" if wanted[name] else "-" for name in columns[1:])]
    absent = {(row["backend"], row["reason"]) for row in rows if not row["available"]}
    assert all(f"{backend} {reason}" in out for backend, reason in absent)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, f"dpkern {dpkern.__version__}\n", "")
