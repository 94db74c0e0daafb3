"""Decide from paired samples whether two ways of a computation take the same time.

Every round runs each way once, in an order that is drawn anew, so that whatever changes slowly
meets all of them. The ratio of medians has a bootstrap interval over rounds; sampling stops where
that interval is narrow, never where it says something, so that its level stays what it is. All
samples are kept.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

MARGIN = 0.025
"""Ratios closer to 1 than this are the same: half of the smallest change that must be found."""
RESAMPLES = 400
FASTER, SLOWER, SAME, UNCLEAR = "faster", "slower", "same", "unclear"
VERDICTS = (FASTER, SLOWER, SAME, UNCLEAR)


@dataclass(frozen=True, kw_only=True)
class StopRule:
    """Bounds on how long a pair is sampled.

    Attributes:
        half_width: relative half-width of the ratio's interval that suffices.
        least, most: rounds.
        seconds: time after which no further round begins, once there are ``least`` rounds.
        lasting: time that sampling takes at least: counters of the system are read in ticks, and a
            shorter look would not see a busy machine.
    """

    half_width: float = 0.01
    least: int = 12
    most: int = 400
    seconds: float = 3.0
    lasting: float = 0.1

    def is_due(self, rounds: int) -> bool:
        """Whether to look at the interval after so many rounds; looks grow rarer."""
        return rounds >= self.least and (rounds - self.least) % max(4, rounds // 4) == 0


QUICK = StopRule(half_width=0.05, least=5, most=1000, seconds=0.15)


@dataclass(frozen=True)
class PairedRatio:
    """The ratio of two medians and its 95 % interval.

    Attributes:
        value: median of ``a`` over median of ``b``.
        low, high: ends of the interval.
    """

    value: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half of the interval's width on a logarithmic scale."""
        return 0.5 * math.log(self.high / self.low)

    @property
    def verdict(self) -> str:
        """One of ``VERDICTS``: of ``a`` compared with ``b``."""
        if self.low > 1 + MARGIN:
            return SLOWER
        if self.high < 1 / (1 + MARGIN):
            return FASTER
        inside = 1 / (1 + MARGIN) <= self.low and self.high <= 1 + MARGIN
        return SAME if inside else UNCLEAR


@dataclass
class Rounds:
    """The samples of several ways, seconds per call by name; entry r is of round r."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    orders: list[list[str]] = field(default_factory=list)

    def median(self, name: str) -> float:
        """Return the median of a way's samples."""
        return float(np.median(self.seconds[name]))

    def fastest(self, names: list[str]) -> str | None:
        """Return the way with the smallest median among ``names``; None where there are none."""
        return min(names, key=self.median) if names else None

    def interval(self, name: str) -> tuple[float, float]:
        """Return the 95 % interval of a way's median."""
        medians = _medians(np.array([self.seconds[name]]))[0]
        low, high = np.quantile(medians, (0.025, 0.975))
        return float(low), float(high)

    def ratio(self, a: str, b: str) -> PairedRatio:
        """Return median of ``a`` over median of ``b``; rounds are resampled as a whole."""
        first, second = _medians(np.array([self.seconds[a], self.seconds[b]]))
        low, high = np.quantile(first / second, (0.025, 0.975))
        return PairedRatio(self.median(a) / self.median(b), float(low), float(high))


def _medians(samples: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return medians of resampled rounds: the same rounds for every way, so pairs stay pairs."""
    rounds = samples.shape[1]
    draw = np.random.default_rng(rounds)
    picked: NDArray[np.int64] = draw.integers(rounds, size=(RESAMPLES, rounds))
    found: NDArray[np.float64] = np.median(samples[:, picked], axis=2)
    return found


Sampler = Callable[[], float]
"""Runs a way once and returns seconds per call."""


def collect(
    ways: Mapping[str, Sampler],
    rule: StopRule,
    pair: Callable[[Rounds], tuple[str, str] | None],
    clock: Callable[[], float],
    seed: int = 0,
) -> Rounds:
    """Sample ways in rounds of random order until the ratio's interval is narrow.

    Args:
        ways: samplers by name.
        rule: when to stop.
        pair: the names whose ratio must be known, given what was sampled; None asks for no ratio,
            and stops by time or rounds alone.
        clock: seconds now.
        seed: of the orders.
    """
    draw, found = random.Random(seed), Rounds({name: [] for name in ways})
    began, names = clock(), list(ways)
    for count in range(1, rule.most + 1):
        draw.shuffle(names)
        found.orders.append(list(names))
        for name in names:
            found.seconds[name].append(ways[name]())
        if count < rule.least:
            continue
        spent = clock() - began
        if spent > rule.seconds:
            break
        wanted = pair(found) if spent >= rule.lasting and rule.is_due(count) else None
        if wanted is not None and found.ratio(*wanted).half_width <= rule.half_width:
            break
    return found
