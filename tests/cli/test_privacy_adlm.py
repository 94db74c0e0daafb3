"""``dpkern privacy --mechanism adlm|ilm``: what a planned run claims, and what is certified."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpkern import cli
from dpkern.privacy.mechanisms import ILM
from dpkern.privacy.theory.adlm import MNIST
from dpkern.train.session_factory import make_session

pytestmark = pytest.mark.usefixtures("one_thread")

DENSE = "--model adlm-dense --row-shape 6 --classes 3 --dataset-size 48 --sample-rate 0.25"
SOURCE = "--model adlm-mnist --dataset-size 60000 --sample-rate 0.03"


def planned(capsys: pytest.CaptureFixture[str], arguments: str) -> dict[str, Any]:
    assert cli.main(["privacy", *arguments.split(), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("mode", ["published", "corrected"])
def test_a_plan_certifies_what_its_run_does(
    capsys: pytest.CaptureFixture[str], mode: str, tmp_path: Path
) -> None:
    y = np.arange(60) % 3
    np.savez(tmp_path / "rows.npz", x=np.random.default_rng(0).random((60, 6)), y=y)
    run = {"mechanism": "ilm", "mode": mode, "epsilon": 3.0, "batch_size": 12, "epochs": 2}
    files = {"data": str(tmp_path / "rows.npz"), "figure": False, "out": tmp_path / "out"}
    summary = make_session(run | files).run()
    arguments = f"--mechanism ilm --mode {mode} --epsilon 3 --steps 2 {DENSE}"
    plan = planned(capsys, arguments)
    for name in ("epsilon_claimed", "epsilon_certified", "epsilon_by_part", "relation", "visits"):
        assert plan[name] == summary[name]
    for name in ("delta", "event", "certified_for"):
        assert plan[name] == summary["certificate"][name]


def test_the_sources_sizes_are_its_experiment(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, f"--mechanism ilm --mode published --epsilon 1 {SOURCE}")
    source = ILM(epsilon=1.0, setting=MNIST, mode="published")
    assert plan["epsilon_claimed"] == 1
    assert plan["epsilon_certified"] == source.epsilon_certified()
    # A1: |L| rho eps2 / (2 |h0|).
    assert plan["epsilon_by_part"]["inputs"] == pytest.approx(1800 * 0.5 / 64)
    assert plan["sizes"]["batch"] == 1800
    small = SOURCE.replace("0.03", "0.003")
    smaller = planned(capsys, f"--mechanism ilm --mode published --epsilon 1 {small}")
    assert smaller["epsilon_by_part"]["inputs"] == pytest.approx(180 * 0.5 / 64)


@pytest.mark.parametrize(
    ("arguments", "certified"),
    [
        ("--mechanism adlm", 1.0),
        ("--mechanism adlm --mode published", "inf"),
        ("--mechanism ilm --mode published --set noise_sharing=shared_per_feature", "inf"),
    ],
)
def test_what_is_not_protected_is_said(
    capsys: pytest.CaptureFixture[str], arguments: str, certified: object
) -> None:
    plan = planned(capsys, f"{arguments} --epsilon 1 {SOURCE}")
    found = plan["epsilon_certified"]
    assert found == (pytest.approx(1.0, abs=1e-9) if certified == 1.0 else "inf")
    assert (plan["non_private"] is None) == (certified == 1.0)


def test_the_table_shows_parts_and_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["privacy", "--mechanism", "ilm", "--epsilon", "3", *DENSE.split()]) == 0
    shown = capsys.readouterr().out
    for name in ("epsilon of inputs", "epsilon of labels", "batch", "records", "classes"):
        assert name in shown


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ("--epsilon 1", "model, dataset_size, sample_rate"),
        ("--epsilon 1 --model adlm-mnist --dataset-size 10", "model, dataset_size, sample_rate"),
        ("--epsilon 1 --model adlm-dense --dataset-size 10 --sample-rate 0.1", "row_shape"),
        (f"--epsilon 1 {SOURCE} --row-shape 6", "row_shape"),
        (f"--epsilon 1 {SOURCE} --classes 1", "classes"),
        (f"--epsilon 1 {SOURCE} --delta 1e-6", "delta"),
        (f"--epsilon 1 {SOURCE} --noise-multiplier 1", "noise_multiplier"),
        (f"--epsilon 1 {SOURCE} --mode best", "mode"),
        (f"--epsilon 1 {SOURCE.replace('mnist', 'vgg')}", "model"),
        (f"--epsilon 1 {SOURCE.replace('0.03', '3')}", "sample_rate"),
        (SOURCE, "epsilon"),
    ],
)
def test_what_is_missing_or_does_not_apply_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: str, name: str
) -> None:
    assert cli.main(["privacy", "--mechanism", "ilm", *arguments.split(), "--json"]) == cli.REFUSED
    assert json.loads(capsys.readouterr().out)["error"]["name"] == name
