"""Building blocks of the forms of layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...base.counts import FORMULA, WALK, Counts, Item, Itemised

WIDE = torch.float64

SIGMOID = Counts(AND=1, SUB=1, EXP=1, ADD=1, DIV=1, MUL=1, CMP=1, MUX=1)
"""``1 / (1 + e^-|x|)``, times ``e^-|x|`` where x is negative."""


def widened(dtype: torch.dtype, entries: int) -> Counts:
    """Count the conversion of operands to float64, once each."""
    return Counts() if dtype is torch.float64 else Counts(CVT=entries)


def summed(dtype: torch.dtype, entries: int) -> Counts:
    """Count the conversion of 16-bit operands to the dtype of the sums, once each."""
    return Counts(CVT=entries) if dtype.itemsize == 2 else Counts()


def dots(products: int) -> Counts:
    """Count sums of so many products together; they start at 0 and fuse."""
    return Counts(MUL=products, ADD=products)


Numbers = tuple[int, torch.dtype]
"""A number of entries, and their dtype."""


def moved(read: Sequence[Numbers], written: Sequence[Numbers], note: str = "") -> Item:
    """Return the line of operands and results, each number counted once."""
    return Item(
        name="read and written",
        counts=Counts(LOAD=sum(n for n, _ in read), STORE=sum(n for n, _ in written)),
        note=note,
        bytes_read=sum(n * dtype.itemsize for n, dtype in read),
        bytes_written=sum(n * dtype.itemsize for n, dtype in written),
    )


def itemised(
    read: Sequence[Numbers],
    written: Sequence[Numbers],
    *,
    walked: Sequence[str] = (),
    **parts: Counts,
) -> Itemised:
    """Return the line of operands and results, and the parts by name (underscores become spaces).

    ``walked``: the parts that a walk of the op's reference finds too
    (``tests/cost/test_walks.py``).
    """
    rest = [
        Item(
            name=name.replace("_", " "), counts=counts, evidence=WALK if name in walked else FORMULA
        )
        for name, counts in parts.items()
    ]
    return Itemised((moved(read, written), *rest))


__all__ = ["SIGMOID", "WIDE", "dots", "itemised", "moved", "summed", "widened"]
