"""Integer sums of per-sample gradients: closed forms.

A term is the float sum's, truncated: what the float sum multiplies into an operand, an integer sum
multiplies into the finished gradient, except for one position, where it goes into g as well, or
into both operands before they are rounded. Adding 1.5 2^23 counts as the conversion that it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ...base.counts import Counts, Itemised
from ...ops import _values
from ...ops._values import IdStatistics
from ._form import Form
from ._layers import WIDE, dots, itemised, widened
from .ghost_conv import geometry_of
from .ghost_embedding import tests_of

WHOLE = Counts(CVT=1, ADD=1)
"""An entry's integer, added."""


def _integers(made: Itemised) -> Itemised:
    """Return the same counts, with sums that are no floating operations."""
    items = (replace(item, flops=0) if item.name == "sums" else item for item in made.items)
    return Itemised(tuple(items))


def _chain(used: int, positions: int, entries: int, rows: int) -> tuple[Counts, Counts]:
    """Scaling, and products with their sums; ``rows``: numbers that one position scales."""
    if positions == 1:
        return Counts(MUL=used * rows), Counts(MUL=used * entries)
    return Counts(MUL=used * entries), dots(used * positions * entries)


def linear_integer_sum(
    a: torch.Tensor,
    g: torch.Tensor,
    factors: torch.Tensor,
    out: torch.Tensor,
    *,
    rounding: str = "truncate",
    used: int | None = None,
    **_: Any,
) -> Itemised:
    """Count ``ghost.linear_integer_sum``; ``used``: samples whose factor is not 0.

    Of factors one rounding is counted: few samples need a second.
    """
    (batch, positions, d), p = a.shape, g.shape[2]
    used = _values.count_used_samples(factors) if used is None else used
    rows, entries = used * positions, out.numel() if used else 0
    moved = [(rows * (d + p) + batch, a.dtype), (entries, out.dtype)]
    if rounding == "operands":
        return _integers(
            itemised(
                moved,
                moved[1:],
                tests=Counts(CMP=batch),
                rounding=used * _rounded_operands(a, g),
                products=dots(rows * entries),
                scaling=used * entries * Counts(CVT=1, MUL=1),
                sums=used * entries * WHOLE,
            )
        )
    if rounding == "factors":
        numbers = used * (d + p)
        return _integers(
            itemised(
                moved,
                moved[1:],
                tests=Counts(CMP=batch),
                norms=widened(a.dtype, numbers) + dots(numbers),
                scales=used * Counts(MUL=6, DIV=4, SUB=1, SQRT=7, CMP=4),
                rounding=numbers * Counts(MUL=1, CVT=1),
                sums=dots(numbers + used * entries),
            )
        )
    scaling, products = _chain(used, positions, entries, p)
    return _integers(
        itemised(
            moved,
            moved[1:],
            walked=("scaling", "products", "sums"),
            tests=Counts(CMP=batch),
            scaling=scaling,
            products=products,
            sums=used * entries * WHOLE,
        )
    )


def _rounded_operands(a: torch.Tensor, g: torch.Tensor) -> Counts:
    """Count a sample's operands made to integers: sizes of rows, scales, products, rounding."""
    positions, numbers = a.shape[1], a.shape[1] * (a.shape[2] + g.shape[2])
    each = Counts(MUL=9, DIV=1, SQRT=1, CMP=9)
    return numbers * Counts(MUL=2, ADD=1, CMP=1, CVT=1) + positions * each


def linear_integer_norm(a: torch.Tensor, g: torch.Tensor, **_: Any) -> Itemised:
    """Count ``ghost.linear_integer_norm``, by the route that the CPU's kernels take."""
    (batch, positions, d), p = a.shape, g.shape[2]
    if (positions + 16) * (d + p + 32) < 1.8 * d * p:
        pairs = positions * (positions + 1) // 2
        products, squares = dots(pairs * (d + p)), dots(pairs)
    else:
        products, squares = dots(positions * d * p), dots(d * p)
    return _integers(
        itemised(
            [(a.numel() + g.numel(), a.dtype)],
            [(batch, WIDE)],
            rounding=batch * _rounded_operands(a, g),
            sums=batch * products,
            squares=batch * (squares + Counts(MUL=3)),
        )
    )


def linear_sum_error(a: torch.Tensor, g: torch.Tensor, **_: Any) -> Itemised:
    """Count ``ghost.linear_sum_error``."""
    (batch, positions, d), p = a.shape, g.shape[2]
    norms = positions * (dots(d + p) + Counts(SQRT=2, MUL=1, ADD=1))
    return itemised(
        [(a.numel() + g.numel(), a.dtype)],
        [(batch, WIDE)],
        widened=widened(a.dtype, a.numel() + g.numel()),
        norms=batch * norms,
        rounding=batch * Counts(MUL=1, ADD=1),
    )


def conv_integer_sum(
    x: torch.Tensor,
    g: torch.Tensor,
    factors: torch.Tensor,
    out: torch.Tensor,
    *,
    used: int | None = None,
    **arguments: Any,
) -> Itemised:
    """Count ``ghost.conv_integer_sum``; ``used``: samples whose factor is not 0."""
    geometry = geometry_of(x, g, arguments)
    used = _values.count_used_samples(factors) if used is None else used
    gradient = geometry.out_channels * geometry.positions
    operands, entries = used * (geometry.reached + gradient), out.numel() if used else 0
    return _integers(
        itemised(
            [(operands + geometry.batch, x.dtype), (entries, out.dtype)],
            [(entries, out.dtype)],
            walked=("scaling", "products", "sums"),
            tests=Counts(CMP=geometry.batch),
            scaling=Counts(MUL=used * entries),
            products=dots(used * entries * geometry.positions),
            sums=used * entries * WHOLE,
        )
    )


def conv_sum_error(x: torch.Tensor, g: torch.Tensor, **arguments: Any) -> Itemised:
    """Count ``ghost.conv_sum_error``; inputs count as often as the kernel touches them."""
    geometry = geometry_of(x, g, arguments)
    batch = geometry.batch
    outputs = geometry.out_channels * geometry.positions
    operands = batch * (geometry.reached + outputs)
    return itemised(
        [(operands, x.dtype)],
        [(batch, WIDE)],
        widened=widened(x.dtype, operands),
        squares=dots(operands) + Counts(MUL=operands),
        rounding=batch * (dots(geometry.groups) + Counts(SQRT=1, MUL=1, ADD=1)),
    )


def embedding_integer_sum(
    ids: torch.Tensor,
    g: torch.Tensor,
    factors: torch.Tensor,
    out: torch.Tensor,
    *,
    padding_idx: int | None = None,
    used: int | None = None,
    found: IdStatistics | None = None,
    **_: Any,
) -> Itemised:
    """Count ``ghost.embedding_integer_sum``; ``used``: samples whose factor is not 0,
    ``found``: their ids."""
    batch, columns = len(ids), g.shape[2]
    if found is None:
        found = IdStatistics.of(ids if ids.is_meta else ids[factors != 0], padding_idx)
    used = _values.count_used_samples(factors) if used is None else used
    read, table = used * ids.shape[1], min(found.table, len(out)) * columns
    shared = found.shared * columns
    return _integers(
        itemised(
            [
                (read, ids.dtype),
                (batch + found.kept * columns, g.dtype),
                (table, out.dtype),
            ],
            [(table, out.dtype)],
            tests=Counts(CMP=batch) + tests_of(read, padding_idx),
            rows_of_one_id=widened(g.dtype, shared) + Counts(ADD=shared),
            scaling=Counts(MUL=found.rows * columns),
            sums=found.rows * columns * WHOLE,
        )
    )


def tied_integer_sum(
    ids: torch.Tensor,
    a: torch.Tensor,
    g: torch.Tensor,
    e: torch.Tensor,
    factors: torch.Tensor,
    out: torch.Tensor,
    *,
    padding_idx: int | None = None,
    used: int | None = None,
    found: IdStatistics | None = None,
    **_: Any,
) -> Itemised:
    """Count ``ghost.tied_integer_sum``; ``used``: samples whose factor is not 0,
    ``found``: their ids."""
    (batch, positions, d), p = a.shape, g.shape[2]
    if found is None:
        found = IdStatistics.of(ids if ids.is_meta else ids[factors != 0], padding_idx)
    used = _values.count_used_samples(factors) if used is None else used
    rows, entries = used * positions, out.numel() if used else 0
    read, given = used * ids.shape[1], found.kept * d
    return _integers(
        itemised(
            [(read, ids.dtype), (given + rows * (d + p) + batch, a.dtype), (entries, out.dtype)],
            [(entries, out.dtype)],
            tests=Counts(CMP=batch) + tests_of(read, padding_idx),
            rows_of_one_id=2 * widened(a.dtype, given) + Counts(ADD=given + found.rows * d),
            products=dots(rows * entries),
            scaling=Counts(MUL=used * entries),
            sums=used * entries * WHOLE,
        )
    )


def tied_sum_error(
    ids: torch.Tensor,
    a: torch.Tensor,
    g: torch.Tensor,
    e: torch.Tensor,
    *,
    padding_idx: int | None = None,
    found: IdStatistics | None = None,
    **_: Any,
) -> Itemised:
    """Count ``ghost.tied_sum_error``."""
    found = IdStatistics.of(ids, padding_idx) if found is None else found
    (batch, positions, d), p = a.shape, g.shape[2]
    entries = a.numel() + g.numel() + found.kept * d
    norms = batch * positions * (dots(d + p) + Counts(SQRT=2, MUL=1, ADD=1))
    return itemised(
        [(ids.numel(), ids.dtype), (entries, a.dtype)],
        [(batch, WIDE)],
        tests=tests_of(ids.numel(), padding_idx),
        widened=widened(a.dtype, entries),
        norms=norms + found.kept * (dots(d) + Counts(SQRT=1, ADD=1)),
        rounding=batch * Counts(MUL=1, ADD=1),
    )


def explicit_integer_sum(
    grads: Sequence[torch.Tensor],
    factors: torch.Tensor,
    outs: Sequence[torch.Tensor],
    *,
    dropped: int = 0,
    **_: Any,
) -> Itemised:
    """Count ``ghost.explicit_integer_sum``; ``dropped``: samples of factor 0, whose
    gradients are not read."""
    columns = [math.prod(part.shape[1:]) for part in grads]
    batch, entries = len(factors), sum(columns)
    used, parts = batch - dropped, sum(1 for n in columns if n)
    touched = entries if used else 0
    return _integers(
        itemised(
            [(used * entries + (batch if parts else 0), factors.dtype), (touched, outs[0].dtype)],
            [(touched, outs[0].dtype)],
            walked=("scaling", "sums"),
            tests=Counts(CMP=batch * parts),
            scaling=Counts(MUL=used * entries),
            sums=used * entries * WHOLE,
        )
    )


FORMS: dict[str, Form] = {
    "ghost.conv_integer_sum": conv_integer_sum,
    "ghost.conv_sum_error": conv_sum_error,
    "ghost.embedding_integer_sum": embedding_integer_sum,
    "ghost.explicit_integer_sum": explicit_integer_sum,
    "ghost.linear_integer_norm": linear_integer_norm,
    "ghost.linear_integer_sum": linear_integer_sum,
    "ghost.linear_sum_error": linear_sum_error,
    "ghost.tied_integer_sum": tied_integer_sum,
    "ghost.tied_sum_error": tied_sum_error,
}
