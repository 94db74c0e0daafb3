"""The frontier: intervals of medians, verdicts on pairs, and who is dominated by whom."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from statistics import median

import pytest

from dpkern.cost import frontier
from dpkern.cost.frontier import IDENTICAL, LESS, MISS, TIE, UNCLEAR, Outcome


def outcome(name: str, accuracies: list[float], **given: object) -> Outcome:
    runs = len(accuracies)
    made = Outcome(
        name=name,
        accuracies=tuple(accuracies),
        digests=tuple(f"{name} {seed}" for seed in range(runs)),
        seconds=(1.0,) * runs,
        operations=100,
        joules=(1.0, 2.0),
        work={"operations": 100},
    )
    return replace(made, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [1, 4, 9, 27])
def test_the_fewest_runs_allow_an_interval_and_one_less_allows_none(count: int) -> None:
    needed = frontier.needed_runs(count)
    values = [float(k) for k in range(needed)]
    assert frontier.interval(values, MISS / count) is not None
    assert frontier.interval(values[:-1], MISS / count) is None


@pytest.mark.parametrize("runs", [6, 9, 12])
def test_an_interval_misses_the_median_as_seldom_as_it_says(runs: int) -> None:
    # Whatever the distribution, only on which side of its median each value lies matters: -1 or 1
    # for a median of 0, every pattern equally likely. So this is the probability, not an estimate.
    patterns = list(itertools.product((-1.0, 1.0), repeat=runs))
    for miss in (0.05, 0.2):
        found = [frontier.interval(pattern, miss) for pattern in patterns]
        missed = sum(one is not None and (one.low > 0 or one.high < 0) for one in found)
        assert missed / len(patterns) <= miss
        narrower = runs >= 9 and miss == 0.2
        if narrower:  # more runs than needed are used: not always the whole range
            values = [float(k) for k in range(runs)]
            one = frontier.interval(values, miss)
            assert one is not None
            assert one.low > 0
            assert one.value == median(values)


def test_mechanisms_of_one_distribution_tie() -> None:
    draw, ties = random.Random(0), 0
    for _ in range(200):
        both = [outcome(name, [draw.gauss(0.9, 0.01) for _ in range(8)]) for name in "ab"]
        ties += frontier.pair(*both, MISS / 4).accuracy == TIE
    assert ties >= 190


def test_the_same_program_ties_whatever_the_clock_says() -> None:
    first = outcome("dpsgd", [0.9, 0.91] * 4, digests=("same",) * 8)
    second = replace(first, name="other", seconds=(2.0,) * 8)
    found = frontier.pair(first, second, MISS / 4)
    assert found.accuracy == IDENTICAL
    assert set(found.costs.values()) == {TIE}
    assert found.difference == frontier.MedianInterval(0.0, 0.0, 0.0)
    for name in ("dpsgd", "other"):
        assert all(frontier.on_frontier(name, [found], cost) for cost in frontier.COSTS)
    # The same bits by more work are no tie in what they cost.
    dearer = replace(second, work={"operations": 200}, operations=200)
    found = frontier.pair(first, dearer, MISS / 4)
    assert found.accuracy == IDENTICAL
    assert found.costs == {"time": LESS, "operations": LESS, "energy": TIE}
    assert not frontier.on_frontier("other", [found], "time")


def test_a_better_and_cheaper_one_leaves_the_other_off_the_frontier() -> None:
    good = outcome("good", [0.95] * 8)
    bad = outcome("bad", [0.9] * 8, operations=200, seconds=(2.0,) * 8, joules=(0.5, 3.0))
    found = frontier.pair(good, bad, MISS / 4)
    assert (found.accuracy, found.costs["operations"]) == (frontier.BETTER, LESS)
    assert found.costs["energy"] == UNCLEAR  # the two ends of the range disagree
    assert frontier.on_frontier("good", [found], "operations")
    assert not frontier.on_frontier("bad", [found], "operations")
    # More accurate and dearer: both stay.
    fast = replace(bad, operations=50)
    found = frontier.pair(good, fast, MISS / 4)
    assert all(frontier.on_frontier(name, [found], "operations") for name in ("good", "bad"))


def test_busy_runs_are_in_no_verdict_on_time() -> None:
    first = outcome("a", [0.9] * 8, seconds=(1.0,) * 7 + (None,))
    second = outcome("b", [0.9] * 8, seconds=(3.0,) * 8)
    found = frontier.pair(first, second, MISS / 4)
    assert found.ratio is None
    assert found.costs["time"] == UNCLEAR
