"""Decide which mechanisms are on the frontier of accuracy against cost, from runs with equal seeds.

Run s of every mechanism has seed s, and the difference of two mechanisms is taken run by run. The
interval of a median over n runs reaches from the k-th smallest to the k-th largest value: whatever
the distribution, it misses the median with probability at most

    2 P(Binomial(n, 1/2) < k)

(H. A. David and H. N. Nagaraja, Order Statistics, 3rd edition, 7.1). A report makes several such
statements, and each may miss with probability ``MISS`` over their number: then all hold at once
with probability at least ``1 - MISS``. Too few runs allow no interval at all; ``needed_runs`` says
how many are the fewest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

MISS = 0.05
"""Probability that any statement of a report is wrong."""
MARGIN = 0.025
"""Ratios of times closer to 1 than this are the same, as in ``dpkern bench``."""
BETTER, WORSE, TIE, IDENTICAL, UNCLEAR = "better", "worse", "tie", "identical", "unclear"
LESS, MORE = "less", "more"
COSTS = ("time", "operations", "energy")


@dataclass(frozen=True)
class MedianInterval:
    """The median of some runs, and an interval of the median of all runs."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The runs of one mechanism at one epsilon, in the order of their seeds.

    Attributes:
        name: the mechanism, with its settings.
        accuracies: held-out accuracy of each run.
        digests: of the trained parameters' bits of each run.
        seconds: median seconds of a step of each run; None where the machine was busy.
        operations: of one step.
        joules: least and largest energy of one step.
        work: everything that was counted of one step; equal for the same work.
    """

    name: str
    accuracies: tuple[float, ...]
    digests: tuple[str, ...]
    seconds: tuple[float | None, ...]
    operations: int
    joules: tuple[float, float]
    work: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class MechanismPair:
    """One mechanism beside another at the same epsilon.

    Attributes:
        first, second: their names.
        difference: accuracy of the first less that of the second, by seed.
        accuracy: ``better`` or ``worse`` is the first one; ``tie``: no difference was shown;
            ``identical``: every run trained the same bits.
        ratio: seconds of the first over those of the second; None with too few quiet runs.
        costs: by each of ``COSTS``: ``less`` or ``more`` takes the first one; ``tie``: the same;
            ``unclear``: not shown.
    """

    first: str
    second: str
    difference: MedianInterval
    accuracy: str
    ratio: MedianInterval | None
    costs: Mapping[str, str]


def statements(mechanisms: int, epsilons: int) -> int:
    """Return how many intervals a report has: accuracies, and both of every pair."""
    return epsilons * (mechanisms + mechanisms * (mechanisms - 1))


def needed_runs(count: int, miss: float = MISS) -> int:
    """Return the fewest runs of each mechanism that allow ``count`` statements at once."""
    return 1 + math.ceil(math.log2(count / miss))


def interval(values: Sequence[float], miss: float) -> MedianInterval | None:
    """Return the interval of the median that misses it with probability at most ``miss``.

    None where there are too few values for any.
    """
    n, ordered = len(values), sorted(values)
    rank, tail = 0, 0.0
    while 2 * rank < n:
        tail += math.comb(n, rank) * 2.0 ** (1 - n)
        if tail > miss:
            break
        rank += 1
    if rank == 0:
        return None
    return MedianInterval(median(ordered), ordered[rank - 1], ordered[n - rank])


def pair(first: Outcome, second: Outcome, miss: float) -> MechanismPair:
    """Compare two mechanisms; identical ones tie whatever the clock says.

    Args:
        first, second: outcomes of the same seeds, at least as many as ``miss`` needs.
        miss: probability that one interval is wrong.
    """
    each = zip(first.accuracies, second.accuracies, strict=True)
    difference = interval([a - b for a, b in each], miss)
    if difference is None:
        raise ValueError(f"{len(first.accuracies)} runs allow no interval")
    same_bits = first.digests == second.digests
    times = zip(first.seconds, second.seconds, strict=True)
    logs = [math.log(a / b) for a, b in times if a is not None and b is not None]
    found = interval(logs, miss)
    ratio = None if found is None else MedianInterval(*map(math.exp, _ends(found)))
    costs = {
        "time": _of_times(ratio),
        "operations": _order(first.operations, second.operations),
        "energy": _of_ranges(first.joules, second.joules),
    }
    if same_bits and first.work == second.work:  # the same program: the rest is the machine's
        costs["time"] = TIE
    return MechanismPair(
        first=first.name,
        second=second.name,
        difference=difference,
        accuracy=IDENTICAL if same_bits else _of_accuracies(difference),
        ratio=ratio,
        costs=costs,
    )


def on_frontier(name: str, pairs: Sequence[MechanismPair], cost: str) -> bool:
    """Return whether no other mechanism is shown better in one and not shown worse in the other.

    One without a difference from the best stays on the frontier: a tie excludes nobody.
    """
    for one in pairs:
        if name not in (one.first, one.second):
            continue
        accuracy, spent = one.accuracy, one.costs[cost]
        own = one.first == name
        beaten = accuracy == (WORSE if own else BETTER)
        ahead = accuracy == (BETTER if own else WORSE)
        dearer, cheaper = spent == (MORE if own else LESS), spent == (LESS if own else MORE)
        if (beaten and not cheaper) or (dearer and not ahead):
            return False
    return True


def _ends(found: MedianInterval) -> tuple[float, float, float]:
    return found.value, found.low, found.high


def _of_accuracies(difference: MedianInterval) -> str:
    if difference.low > 0:
        return BETTER
    return WORSE if difference.high < 0 else TIE


def _of_times(ratio: MedianInterval | None) -> str:
    if ratio is None:
        return UNCLEAR
    if ratio.low > 1 + MARGIN:
        return MORE
    if ratio.high < 1 / (1 + MARGIN):
        return LESS
    inside = 1 / (1 + MARGIN) <= ratio.low and ratio.high <= 1 + MARGIN
    return TIE if inside else UNCLEAR


def _order(first: float, second: float) -> str:
    if first == second:
        return TIE
    return LESS if first < second else MORE


def _of_ranges(first: tuple[float, float], second: tuple[float, float]) -> str:
    """Compare ranges whose ends have the same assumptions: both must agree."""
    ends = {_order(a, b) for a, b in zip(first, second, strict=True)}
    return ends.pop() if len(ends) == 1 else UNCLEAR


__all__ = [
    *("BETTER", "COSTS", "IDENTICAL", "LESS", "MARGIN", "MISS", "MORE", "TIE", "UNCLEAR", "WORSE"),
    *("MechanismPair", "MedianInterval", "Outcome"),
    *("interval", "needed_runs", "on_frontier", "pair", "statements"),
]
