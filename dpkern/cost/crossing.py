"""Find the sizes at which the cheaper one of two compared mechanisms changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..base.counts import Counts
from ..ops.noise import TILE
from ._numbers import tidy
from .comparison import ComparisonSpec, pair_fact
from .forms import noise
from .processors import Processor
from .sensitivity import crossovers
from .systems import CostModel


def turns(question: ComparisonSpec) -> list[dict[str, Any]]:
    """Find crossovers in n, with a code of half the features, and in l at every requested n."""
    return [
        fact
        for machine in question.machines
        for system in question.others
        for source in question.sources
        for fact in (
            turns_in_n(question, machine, system, source),
            *(turns_in_l(question, machine, system, n, source) for n in dict(question.sizes)),
        )
    ]


def turns_in_n(
    question: ComparisonSpec, machine: Processor, system: CostModel, source: str
) -> dict[str, Any]:
    """Find crossovers of one mechanism and the baseline in n = 2 l."""
    axis = {"noise": source, "along": "n, l = n/2", "up_to": question.largest}
    last = question.largest // 2
    return _turns(question, machine, system, lambda code: (2 * code, code), last, 2, axis)


def turns_in_l(
    question: ComparisonSpec, machine: Processor, system: CostModel, n: int, source: str
) -> dict[str, Any]:
    """Find crossovers of one mechanism and the baseline in l, at n features."""
    axis = {"noise": source, "along": f"l, n = {n}", "up_to": n}
    return _turns(question, machine, system, lambda code: (n, code), n, 1, axis)


def _turns(
    question: ComparisonSpec,
    machine: Processor,
    system: CostModel,
    size: Callable[[int], tuple[int, int]],
    largest: int,
    step: int,
    axis: dict[str, Any],
) -> dict[str, Any]:
    """Find crossovers along ``size(1)`` to ``size(largest)``, ``step`` apart on the axis."""

    def price(code: int, of: CostModel = system) -> float:
        return question.price(of, machine, *size(code), axis["noise"])

    found = crossovers(
        _grid(largest),
        lambda code: price(code) - price(code, question.baseline),
        tie=_tie(question, machine),
    )
    return {
        **pair_fact(question, machine, system),
        **axis,
        "points": [
            {
                "from": c.low * step,
                "to": c.high * step,
                "near": round(c.near * step, 2),
                "cost": tidy(price(c.low) + (c.near - c.low) * (price(c.high) - price(c.low))),
                "cheaper_below": c.cheaper_below,
            }
            for c in found
        ],
    }


def _grid(largest: int) -> list[int]:
    """Return 1 to ``largest``, each at most a quarter more than the one before."""
    grid = [1]
    while grid[-1] < largest:
        grid.append(min(largest, grid[-1] + max(1, grid[-1] // 4)))
    return grid


def _tie(question: ComparisonSpec, machine: Processor) -> float:
    """Return the difference that is a tie.

    Kernels draw whole tiles. Where a step of one mechanism begins a tile that the other has not,
    the cheaper one may change from size to size: that is our tile, and no property of either.
    """
    if not question.whole:
        return 0.0
    tile = sum((item.counts for item in noise.streamed(0, TILE, "gaussian").items), Counts())
    tile += noise.roundings(0, TILE).counts
    return _TENSORS * machine.price(tile)


_TENSORS = 3
"""Parameters of a layer, each of which may begin a tile."""

__all__ = ["turns", "turns_in_l"]
