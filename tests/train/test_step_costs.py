"""Every report of a run has the costs of one step: closed, counted and measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dpkern.base.counts import Counts, Item, Itemised
from dpkern.cost.forms import FORMS
from dpkern.ops.update import SGD
from dpkern.privacy.mechanisms import DPSGD
from dpkern.step import DPStep
from dpkern.step.noise_tables.named import source_of
from dpkern.train import Session, step_costs
from dpkern.train.session_factory import make_session

BASE: dict[str, Any] = {"data": "digits", "model": "linear", "noise_multiplier": 1.0}
BASE |= {"epochs": 1, "figure": False, "unsafe_seed": 5}


def given(folder: Path, **options: Any) -> dict[str, Any]:
    return BASE | {"out": folder / "out"} | options


@pytest.mark.parametrize("arithmetic", ["exact", "float"])
def test_a_report_has_the_costs_of_a_step(tmp_path: Path, arithmetic: str) -> None:
    session = Session(given(tmp_path, arithmetic=arithmetic))
    summary = session.run()
    costs = summary["costs"]
    batch = round(session.training.step.expected_batch_size)
    assert costs["of"] == f"one step of {batch} generated samples"
    # Whole tiles of 512, as the ledger counts them.
    words = session.training.step.plan.words["produced"]
    assert costs["closed"]["random_words"] == costs["counted"]["random_words"] == words
    assert costs["counted"]["agrees"]
    assert "update.step" in costs["counted"]["executed_ops"]
    assert costs["measured"]["seconds"] > costs["measured"]["seconds_in_ops"] > 0
    rows = {row["op"]: row for row in costs["ops"]}
    update = rows["update.step"]
    n = 650  # 64 pixels, 10 classes
    assert update["bytes_counted"] == 3 * 4 * n  # parameters, momentum and sums, once each
    assert update["bytes_closed"] == 5 * 4 * n  # parameters and momentum are read and written
    for part in ("closed", "counted"):
        assert costs[part]["bytes"] == sum(row[f"bytes_{part}"] for row in costs["ops"])
    shown = dict(session._shown(summary).settings)
    assert f"{costs['closed']['operations']:,} operations" in shown["costs"]
    assert "Not counted: torch's own operations" in shown["costs"]


def test_costs_change_nothing_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Session(given(tmp_path / "a"))
    with_costs = first.run()
    monkeypatch.setattr(Session, "_costs", lambda _: None)
    second = Session(given(tmp_path / "b"))
    without = second.run()
    for name in ("steps", "epsilon_certified", "test_loss", "noise"):
        assert with_costs[name] == without[name]
    pairs = zip(first.training.step.params, second.training.step.params, strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_costs_do_not_tell_how_many_were_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two seeds draw other batches; who was drawn, and how many, is no one's to read off costs."""
    sizes, bytes_ = [], []
    for seed in (5, 6):
        session = Session(given(tmp_path / str(seed), unsafe_seed=seed))
        costs = session.run()["costs"]
        sizes.append(session.training.diagnostics.batch_sizes)
        bytes_.append([(row["op"], row["calls"], row["bytes_counted"]) for row in costs["ops"]])
    assert sizes[0] != sizes[1]
    assert bytes_[0] == bytes_[1]


def test_a_wrong_closed_form_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = FORMS["update.step"]
    more = Itemised((Item(name="more", counts=Counts(ADD=1)),))
    monkeypatch.setitem(FORMS, "update.step", lambda *a, **k: right(*a, **k) + more)
    assert not Session(given(tmp_path)).run()["costs"]["counted"]["agrees"]


def test_large_steps_are_counted_by_their_forms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_costs, "COUNTED_NUMBERS", 10)
    counted = Session(given(tmp_path)).run()["costs"]["counted"]
    assert counted["executed_ops"] == []
    assert counted["evidence"] == "formula"


def test_a_table_that_stays_in_the_cache_adds_no_bytes() -> None:
    """Closed forms read a table for nothing, and so do the counted bytes."""
    found = []
    for source in ("inline", "cdt", "table"):
        step = DPStep(
            DPSGD(noise_multiplier=1.0, max_grad_norm=1.0, arithmetic="float"),
            [torch.zeros(50, 3)],
            optimizer=SGD(lr=0.1),
            unsafe_seed=1,
            noise_source=source_of(source),
            sample_rate=0.1,
            expected_batch_size=1.0,
        )

        def train(step: DPStep = step) -> None:
            step.add([torch.ones(2, 50, 3)])
            step.finish()

        costs = step_costs.costs_of(train, of="a step", numbers=150)
        found.append((costs["closed"]["bytes"], costs["counted"]["bytes"]))
        assert "torch's own operations" in costs["not_counted"]
        assert "ring" in costs["not_counted"]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("source", ["inline", "ring", "cdt", "table"])
def test_reports_of_objective_runs_have_them_too(tmp_path: Path, source: str) -> None:
    """32 records of each of 2 users: 1,792 coefficients by every source, whole tiles of words.

    The example is never stopped, whatever its noise does to a run at the rate that was asked for.
    """
    options = {"mechanism": "spof", "mode": "published", "epsilon": 1.0, "noise_source": source}
    options |= {"epochs": 1, "figure": False, "out": tmp_path / "out", "samples": 40}
    session = make_session(options)
    costs = session.run()["costs"]
    assert costs["of"] == "one epoch of 32 generated records of each of 2 users"
    assert costs["counted"]["agrees"]
    assert costs["counted"]["evidence"] == "executed"
    if source == "inline":
        # SPOF draws 2 n numbers of each record: 2 x 14 x 2 x 32, each with 48 and 16 bits.
        assert costs["closed"]["random_words"] >= 2 * 14 * 2 * 32 * 2
