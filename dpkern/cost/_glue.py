"""Closed forms of the few things that torch does between our ops, in elements."""

from __future__ import annotations

import torch

from ..base.counts import Counts
from ._aten import product, selecting, sorting

WIDE = torch.float64


def each(n: int, *, reads: int = 1, extra: int = 0, **primitives: int) -> Counts:
    """Count a result of n elements from ``reads`` tensors of n and ``extra`` other elements."""
    taken = Counts({name: n * times for name, times in primitives.items()})
    return taken + Counts(LOAD=reads * n + extra, STORE=n)


def converted(n: int, old: torch.dtype, new: torch.dtype) -> Counts:
    """Count the conversion of n elements; no operations where the formats are the same."""
    return Counts() if old is new else each(n, CVT=1)


def filled(n: int) -> Counts:
    """Count the writing of one value to n elements."""
    return Counts(STORE=n)


def gathered(n: int, places: int | None = None) -> Counts:
    """Count n elements read from ``places`` places; None means n places."""
    return each(n, extra=n if places is None else places)


def scattered(places: int, values: int) -> Counts:
    """Count ``values`` elements written to ``places`` places."""
    return Counts(LOAD=places + values, STORE=places)


def folded(n: int, results: int, *primitives: str) -> Counts:
    """Count n elements folded into ``results`` results."""
    taken = Counts({name: max(0, n - results) for name in primitives})
    return taken + Counts(LOAD=n, STORE=results)


def read_out() -> Counts:
    """Count the transfer of one number to the host."""
    return Counts(LOAD=1)


def sum_read(n: int) -> Counts:
    """Count the sum of n elements and its transfer to the host."""
    return folded(n, 1, "ADD") + read_out()


def are_finite(n: int) -> Counts:
    """Count ``x == x and |x| != inf``, as torch spells it."""
    return Counts(AND=2 * n, CMP=2 * n, LOAD=6 * n, STORE=4 * n)


def largest(n: int, k: int) -> tuple[Counts, Counts]:
    """Count the choice of the k largest magnitudes of n, in order: (exact part, modelled part)."""
    chosen = selecting(n, k) + Counts(LOAD=n, STORE=2 * k)
    ordered = sorting(k) + Counts(LOAD=k, STORE=2 * k)
    return each(n, AND=1), chosen + ordered


def multiplied(rows: int, inner: int, columns: int) -> Counts:
    """Count a product of matrices, modelled."""
    moved = Counts(LOAD=rows * inner + inner * columns, STORE=rows * columns)
    return product(rows, inner, columns) + moved


__all__ = [
    "WIDE",
    "are_finite",
    "converted",
    "each",
    "filled",
    "folded",
    "gathered",
    "largest",
    "multiplied",
    "read_out",
    "scattered",
    "sum_read",
]
