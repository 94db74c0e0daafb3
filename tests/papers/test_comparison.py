"""The comparison: equal certificates, tuned on a seed of its own, the same result every time."""

from __future__ import annotations

import pytest

from dpkern.ops.update import SGD
from dpkern.papers import comparison, runner
from dpkern.papers.comparison import CORRECTED, PUBLISHED, ComparedMechanism
from dpkern.papers.runner import ItemRequest, RunSetting
from dpkern.train import build, load

QUICK = ItemRequest(quick=True)
WHERE = comparison.task(QUICK, 0.3)


@pytest.mark.parametrize("entry", CORRECTED, ids=lambda entry: entry.label)
def test_corrected_modes_certify_what_they_claim(entry: ComparedMechanism) -> None:
    made = comparison.mechanism(entry, WHERE, "corrected", 4.0)
    shapes = [tuple(p.shape) for p in WHERE.model(0).parameters()]
    plan = made.plan(shapes)
    assert plan.private
    assert plan.neighbouring == "add_remove"
    assert plan.noise_multiplier == pytest.approx(4.0, rel=1e-3)


def test_published_modes_run_at_the_same_multiplier() -> None:
    for entry in PUBLISHED:
        made = comparison.mechanism(entry, WHERE, "published", 4.0)
        assert made.noise_multiplier == 4.0
        assert made.mode == "published"


def test_the_same_seed_gives_the_same_run() -> None:
    data = load("digits")
    where = RunSetting(
        data=data,
        model=lambda seed: build(
            "linear", row_shape=data.row_shape, classes=data.classes, init_seed=seed
        ),
        epochs=2,
        batch_size=400,
        rule=SGD(lr=0.3),
    )
    made = comparison.mechanism(CORRECTED[0], where, "corrected", 2.0)
    first, again, other = (runner.once(where, made, seed) for seed in (0, 0, 1))
    assert (first.accuracy, first.history) == (again.accuracy, again.history)
    assert first.history != other.history
    both = runner.summarised([first, other])
    assert both.seeds == 2
    assert both.accuracy == pytest.approx((first.accuracy + other.accuracy) / 2)
    assert both.spread == pytest.approx(abs(first.accuracy - other.accuracy) / 2)


def test_tuning_does_not_look_at_the_seeds_of_the_table() -> None:
    assert comparison.TUNING_SEED not in range(comparison.SEEDS)
    entry = CORRECTED[0]
    assert comparison.tuned(QUICK, [(entry, 3.0)])[entry.label, 3.0] in entry.grid
