"""Samples from simulated clocks: the same is the same, and five per cent are found."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable

import pytest

from dpkern.bench import paired
from dpkern.bench.paired import FASTER, SAME, SLOWER, UNCLEAR, PairedRatio, StopRule, collect

RUNS = 200
RULE = StopRule(seconds=math.inf, most=300, lasting=0)


class Machine:
    """Times of calls on a machine that drifts, jitters and is interrupted now and then."""

    def __init__(
        self, seed: int, jitter: float = 0.01, drift: float = 0.01, interrupted: float = 0.05
    ) -> None:
        self.draw, self.jitter, self.drift = random.Random(seed), jitter, drift
        self.interrupted = interrupted
        self.now, self.slowness = 0.0, 0.0

    def way(self, seconds: float) -> Callable[[], float]:
        """A call that takes about so long."""

        def call() -> float:
            self.slowness = 0.98 * self.slowness + self.draw.gauss(0, self.drift)
            taken = seconds * math.exp(self.slowness + self.draw.gauss(0, self.jitter))
            if self.draw.random() < self.interrupted:
                taken *= 1 + self.draw.expovariate(1)
            self.now += taken
            return taken

        return call

    def compared(self, factor: float, rule: StopRule = RULE) -> PairedRatio:
        """The ratio of two calls, the first slower by the factor."""
        ways = {"a": self.way(factor * 1e-3), "b": self.way(1e-3)}
        found = collect(ways, rule, lambda _: ("a", "b"), lambda: self.now, seed=7)
        return found.ratio("a", "b")


def _verdicts(factor: float) -> Counter[str]:
    return Counter(Machine(seed).compared(factor).verdict for seed in range(RUNS))


def test_the_same_code_is_the_same() -> None:
    assert _verdicts(1.0)[SAME] >= 0.95 * RUNS


@pytest.mark.parametrize(("factor", "verdict"), [(1.05, SLOWER), (0.95, FASTER)])
def test_five_per_cent_are_found(factor: float, verdict: str) -> None:
    found = _verdicts(factor)
    assert found[verdict] >= 0.9 * RUNS
    assert found[FASTER if verdict == SLOWER else SLOWER] == 0


def test_too_few_samples_are_unclear_and_not_the_same() -> None:
    few = StopRule(least=5, most=5)
    found = Counter(Machine(s, jitter=0.2).compared(1.0, few).verdict for s in range(40))
    assert found[UNCLEAR] > 30
    assert found[SAME] < 4


def test_intervals_hold_the_truth() -> None:
    short = StopRule(least=30, most=30)
    ratios = [Machine(seed).compared(1.2, short) for seed in range(RUNS)]
    assert sum(r.low <= 1.2 <= r.high for r in ratios) >= 0.9 * RUNS


def test_without_pairs_drift_looks_like_a_difference() -> None:
    """The negative control: all samples of one way, then all of the other."""
    machine = Machine(1, drift=0.05)
    first = [machine.way(1e-3)() for _ in range(60)]
    second = [machine.way(1e-3)() for _ in range(60)]
    apart = paired.Rounds({"a": first, "b": second}).ratio("a", "b")
    assert apart.verdict != SAME


def test_sampling_stops_by_width_and_never_by_the_answer() -> None:
    calm = Machine(3, jitter=1e-4, drift=0, interrupted=0)
    ways = {"a": calm.way(2e-3), "b": calm.way(1e-3)}
    found = collect(ways, RULE, lambda _: ("a", "b"), lambda: calm.now)
    assert len(found.seconds["a"]) == RULE.least
    wild = Machine(3, jitter=0.5)
    ways = {"a": wild.way(2e-3), "b": wild.way(1e-3)}
    found = collect(ways, RULE, lambda _: ("a", "b"), lambda: wild.now)
    assert len(found.seconds["a"]) == RULE.most  # twice as slow is plain to see; it went on


def test_a_limit_of_time_is_kept_and_all_samples_too() -> None:
    machine = Machine(5, jitter=0.5)
    ways = {"a": machine.way(0.1), "b": machine.way(0.1)}
    rule = StopRule(seconds=10.0, least=3)
    found = collect(ways, rule, lambda _: ("a", "b"), lambda: machine.now)
    assert 10 <= machine.now < 12
    assert len(found.seconds["a"]) == len(found.seconds["b"]) == len(found.orders)


def test_sampling_lasts_long_enough_for_the_guard() -> None:
    machine = Machine(5, jitter=0, drift=0, interrupted=0)
    ways = {"a": machine.way(1e-4), "b": machine.way(1e-4)}
    collect(ways, paired.QUICK, lambda _: ("a", "b"), lambda: machine.now)
    assert 0.1 <= machine.now < 0.16


def test_orders_are_shuffled() -> None:
    machine = Machine(5)
    ways = {name: machine.way(1e-3) for name in "abc"}
    found = collect(ways, StopRule(least=90, most=90), lambda _: None, lambda: machine.now)
    firsts = Counter(order[0] for order in found.orders)
    assert set(firsts) == {"a", "b", "c"}
    assert min(firsts.values()) > 15
