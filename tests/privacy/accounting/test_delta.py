"""A delta that is not below 1 / records is said to be so: terminal, engine, report, certificate."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpkern import PrivacyEngine, PrivacyWarning, cli
from dpkern.privacy import accounting
from dpkern.privacy.accounting import delta_warning
from dpkern.privacy.mechanisms import DPSGD

RECORDS = 40


@pytest.mark.parametrize(
    ("delta", "records", "warned"),
    [(0.1, 1438, True), (1 / 1438, 1438, True), (1 / 1439, 1438, False), (1e-5, 10**5, True)],
)
def test_below_one_over_n(delta: float, records: int, warned: bool) -> None:
    text = delta_warning(delta, dataset_size=records)
    assert (text is not None) == warned
    if text is not None:
        assert f"1/n = 1/{records}" in text
        assert "a whole record drawn at random" in text


def test_without_a_size_only_what_is_certain() -> None:
    assert delta_warning(0.5) is None
    assert delta_warning(1e-3, sample_rate=0.01) is None
    assert "sample rate 0.01" in str(delta_warning(0.01, sample_rate=0.01))


def parts() -> dict[str, Any]:
    model = nn.Linear(3, 2)
    data = TensorDataset(torch.randn(RECORDS, 3), torch.zeros(RECORDS, dtype=torch.long))
    return {
        "module": model,
        "optimizer": torch.optim.SGD(model.parameters(), 0.1),
        "data_loader": DataLoader(data, batch_size=8),
    }


def test_an_engine_warns_once_for_each_delta_where_it_was_called() -> None:
    engine = PrivacyEngine()
    engine.make_private(**parts(), noise_multiplier=1.0, max_grad_norm=1.0)
    with pytest.warns(PrivacyWarning, match="1/n = 1/40") as seen:
        engine.get_epsilon(0.1)
    assert [Path(one.filename) for one in seen] == [Path(__file__)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert engine.get_epsilon(0.1) == engine.accountant.get_epsilon(0.1)
        assert engine.report(0.1)["warnings"]
        assert engine.report(1e-3)["warnings"] == []
    with pytest.warns(PrivacyWarning) as seen:
        engine.report(0.2)
    assert [Path(one.filename) for one in seen] == [Path(__file__)]


def test_calibration_warns_before_anything_is_changed() -> None:
    engine, given = PrivacyEngine(), parts()
    target = {"target_epsilon": 3.0, "target_delta": 0.1, "epochs": 2, "max_grad_norm": 1.0}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(PrivacyWarning):
            engine.make_private_with_epsilon(**given, **target)
    other = PrivacyEngine()
    with pytest.warns(PrivacyWarning) as seen:
        other.make_private_with_epsilon(**given, **target)
    assert [Path(one.filename) for one in seen] == [Path(__file__)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.get_epsilon(0.1)


def test_a_certificate_notes_it_from_one_over_n_on() -> None:
    run = {"sample_rate": 0.1, "steps": 10, "dataset_size": 500}
    mechanism = DPSGD(noise_multiplier=1.0, max_grad_norm=1.0)
    notes = [
        sum("1/n" in note for note in accounting.certify(mechanism, delta=delta, **run).notes)
        for delta in (0.1, 1 / 500, 1 / 501)
    ]
    assert notes == [1, 1, 0]


def test_planned_runs(capsys: pytest.CaptureFixture[str]) -> None:
    planned = "privacy --noise-multiplier 1 --sample-rate 0.1 --steps 10 --delta 0.002".split()
    assert cli.main([*planned, "--dataset-size", "500", "--json"]) == 0
    out, err = capsys.readouterr()
    assert err.startswith("Warning: delta 0.002 is not below 1/n = 1/500")
    assert json.loads(out)["warnings"] == [err.removeprefix("Warning: ").strip()]
    assert cli.main([*planned, "--dataset-size", "500"]) == 0
    assert capsys.readouterr().out.count("1/500") == 1
    assert cli.main([*planned, "--json"]) == 0
    out, err = capsys.readouterr()
    assert (json.loads(out)["warnings"], err) == ([], "")


def test_training(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = "train --data digits --model linear --epochs 1 --noise-multiplier 1 --no-figure"
    assert cli.main([*options.split(), "--delta", "0.1", "--out", str(out)]) == 0
    table, err = capsys.readouterr()
    # Before the first step, in one line.
    assert err.splitlines()[0].startswith("Warning: delta 0.1 is not below 1/n = 1/1438: such a")
    assert "warning" in table
    report = json.loads((out / "report.json").read_text())
    assert report["warnings"] == [err.splitlines()[0].removeprefix("Warning: ")]
    again = [*options.split(), "--delta", "1e-4", "--out", str(tmp_path / "other"), "--json"]
    assert cli.main(again) == 0
    table, err = capsys.readouterr()
    assert json.loads(table)["warnings"] == []
    assert "Warning" not in err


def test_a_pure_guarantee_has_no_delta(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Labels that were released by randomized responses: delta is 0, whatever was asked."""
    options = "train --data digits --model linear --epochs 1 --mechanism randomized_response"
    given = ["--epsilon", "2", "--delta", "0.1", "--no-figure", "--json", "--out", str(tmp_path)]
    assert cli.main([*options.split(), *given]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["warnings"] == []
    assert "Warning" not in err
