"""Find how a comparison of two counts depends on each operation's price, and where it turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from .processors import Processor


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """The response of the reduction 1 - A/B to the price of one operation.

    Attributes:
        operation: name of the operation.
        cost: its price.
        slope: percentage points of reduction per percent of price.
        free, halved, doubled: the reduction in percent at these prices; None where B is free.
    """

    operation: str
    cost: float
    slope: float
    free: float | None
    halved: float | None
    doubled: float | None


@dataclass(frozen=True, kw_only=True)
class Crossover:
    """Neighbouring sizes between which the cheaper of two systems changes.

    Attributes:
        low, high: the sizes.
        near: size at which the straight line between their differences is 0.
        cheaper_below: whether A is the cheaper one at ``low``.
    """

    low: int
    high: int
    near: float
    cheaper_below: bool


def reduction(price: float, baseline: float) -> float | None:
    """Return ``100 (B - A)/B`` in percent; None where B is 0."""
    return 100 * (baseline - price) / baseline if baseline else None


def sensitivities(
    counts: Mapping[str, int], baseline: Mapping[str, int], processor: Processor
) -> list[Sensitivity]:
    """Return the reduction of ``counts`` against ``baseline`` for each price that it depends on.

    With R = 1 - A/B, dR/d(log p) = -p (A_p B - A B_p)/B^2, A_p and B_p being how often the
    operation of price p occurs.
    """
    mine, theirs = processor.operations(counts), processor.operations(baseline)
    ours, base = processor.price(counts), processor.price(baseline)
    found = []
    for operation, cost in processor.costs.items():
        a, b = mine.get(operation, 0), theirs.get(operation, 0)
        if not a and not b:
            continue

        def at(factor: float, a: int = a, b: int = b, cost: float = cost) -> float | None:
            more = (factor - 1) * cost
            return reduction(ours + more * a, base + more * b)

        found.append(
            Sensitivity(
                operation=operation,
                cost=cost,
                slope=-cost * (a * base - ours * b) / base**2 if base else 0.0,
                free=at(0),
                halved=at(0.5),
                doubled=at(2),
            )
        )
    return found


def crossovers(
    grid: Sequence[int], difference: Callable[[int], float], *, tie: float = 0.0
) -> list[Crossover]:
    """Find where ``difference`` changes its sign between the first and last of ``grid``.

    Differences up to ``tie`` decide nothing: their sizes are left out of the grid.

    Each change between neighbours of ``grid``, which ascends, is narrowed to neighbouring integers
    by bisection; two changes between the same neighbours are not seen.
    """
    known = [(size, difference(size)) for size in grid]
    found = []
    for (low, before), (high, after) in pairwise([point for point in known if abs(point[1]) > tie]):
        if (before < 0) == (after < 0):
            continue
        while high - low > 1:
            middle = (low + high) // 2
            there = difference(middle)
            if there and (there < 0) == (before < 0):
                low, before = middle, there
            else:
                high, after = middle, there
        near = low + before / (before - after)
        found.append(Crossover(low=low, high=high, near=near, cheaper_below=before < 0))
    return found


__all__ = ["Crossover", "Sensitivity", "crossovers", "reduction", "sensitivities"]
