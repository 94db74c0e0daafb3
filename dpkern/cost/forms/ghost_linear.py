"""Closed forms of linear layers and the matrix product, by the CPU kernels' routes.

B samples, T positions, d inputs, p outputs. A norm with its rounding bound takes, per sample,

    rank one   2 (d + p)                                                  one position
    Gram       T (T + 1) / 2 pairs of 2 (d + p) + 8, 4 T                  (Goodfellow 2015)
    direct     2 T d p + 2 d p, T (2 (d + p) + 4)                         tile by tile

floating operations and a few. Sums of products start at 0: n products take n additions. A library's
matrix product takes the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ...base.counts import Counts, Itemised
from ...ops import _values
from ...ops.ghost import linear
from ...ops.ghost._bounds import of_sums
from ._form import Form
from ._layers import WIDE, dots, itemised, summed, widened


def linear_norm(a: torch.Tensor, g: torch.Tensor, *, route: str = "auto", **_: Any) -> Itemised:
    """Count ``ghost.linear_norm``, without what kernels repeat where a Gram bound is loose."""
    (batch, positions, d), p = a.shape, g.shape[2]
    entries, pairs = a.numel() + g.numel(), positions * (positions + 1) // 2
    wide = widened(a.dtype, entries)
    way = linear.norm_route(a, g, route)
    edge = [(entries, a.dtype)], [(batch, WIDE)]
    if way == "rank_one":
        squares = dots(d + p) + Counts(MUL=2)
        return itemised(*edge, widened=wide, squares=batch * squares)
    if way == "gram":
        bound = pairs * Counts(MUL=4, ADD=2, AND=2) + positions * Counts(SQRT=2, MUL=1, ADD=1)
        return itemised(
            *edge,
            widened=wide,
            Gram_matrices=batch * dots(pairs * (d + p)),
            their_product=batch * (dots(pairs) + Counts(MUL=1, ADD=1)),
            rounding_bound=batch * (bound + Counts(MUL=4, ADD=3)),
        )
    norms = positions * (dots(d + p) + Counts(SQRT=2, MUL=1, ADD=1))
    return itemised(
        *edge,
        walked=("gradients", "squares"),
        widened=wide,
        gradients=batch * dots(positions * d * p),
        squares=batch * dots(d * p),
        rounding_bound=batch * (norms + Counts(SQRT=1, MUL=3, ADD=1)),
    )


def linear_norms(a: Sequence[torch.Tensor], g: Sequence[torch.Tensor], **_: Any) -> Itemised:
    """Count ``ghost.linear_norms``: the norms of as many layers of one shape, and their sum."""
    one, batch = linear_norm(a[0], g[0]), a[0].shape[0]
    entries = sum(x.numel() for x in (*a, *g))
    total = itemised(
        [(entries, a[0].dtype)],
        [(batch, WIDE)],
        sum_of_layers=batch * Counts(ADD=len(a), MUL=1),
    )
    norms = [replace(item, counts=len(a) * item.counts) for item in one.items[1:]]
    return total + Itemised(tuple(norms))


def linear_gradient(a: torch.Tensor, g: torch.Tensor, **_: Any) -> Itemised:
    """Count ``ghost.linear_gradient``."""
    (batch, positions, d), p = a.shape, g.shape[2]
    entries = batch * d * p
    return itemised(
        [(a.numel() + g.numel(), a.dtype)],
        [(entries, of_sums(a.dtype)), (batch, WIDE)],
        walked=("gradients", "squares"),
        widened=summed(a.dtype, a.numel() + g.numel()),
        gradients=dots(positions * entries),
        squares=widened(a.dtype, entries) + dots(entries) + Counts(MUL=batch),
    )


def rounded_gradient(a: torch.Tensor, g: torch.Tensor, **_: Any) -> Itemised:
    """Count ``ghost.rounded_gradient``."""
    (batch, positions, d), p = a.shape, g.shape[2]
    entries = batch * d * p
    return itemised(
        [(a.numel() + g.numel(), a.dtype)],
        [(entries, a.dtype), (batch, WIDE)],
        walked=("gradients", "squares"),
        widened=summed(a.dtype, a.numel() + g.numel()),
        gradients=dots(positions * entries),
        squares=widened(a.dtype, entries) + dots(entries) + Counts(MUL=batch),
    )


def rounded_sum(
    grads: Sequence[torch.Tensor],
    factors: torch.Tensor,
    outs: Sequence[torch.Tensor],
    *,
    used: int | None = None,
    **_: Any,
) -> Itemised:
    """Count ``ghost.rounded_sum``; ``used`` counts nonzero factors; None reads the factors."""
    batch, entries = len(factors), sum(out.numel() for out in outs)
    used = _values.count_used_samples(factors) if used is None else used
    touched = entries if used else 0
    return itemised(
        [(used * entries, grads[0].dtype), (batch + touched, factors.dtype)],
        [(touched, factors.dtype)],
        walked=("sums",),
        tests=Counts(CMP=batch),
        widened=summed(grads[0].dtype, used * entries),
        sums=dots(used * entries),
    )


def linear_sum(
    a: torch.Tensor,
    g: torch.Tensor,
    factors: torch.Tensor,
    out: torch.Tensor,
    *,
    used: int | None = None,
    **_: Any,
) -> Itemised:
    """Count ``ghost.linear_sum``; ``used`` counts nonzero factors; None reads the factors."""
    (batch, positions, d), p = a.shape, g.shape[2]
    used = _values.count_used_samples(factors) if used is None else used
    rows, entries = used * positions, out.numel() if used else 0
    return itemised(
        [(rows * (d + p), a.dtype), (batch + entries, out.dtype)],
        [(entries, out.dtype)],
        walked=("scaling", "sums"),
        tests=Counts(CMP=batch),
        widened=summed(a.dtype, rows * (d + p)),
        scaling=Counts(MUL=rows * p),
        sums=dots(rows * entries) + Counts(ADD=entries),
    )


def matmul(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None, **_: Any
) -> Itemised:
    """Count ``product.matmul``."""
    made = x.shape[0] * w.shape[1]
    # A matrix of no rows needs neither weight nor bias.
    weights = w.numel() if x.shape[0] else 0
    added = made if bias is not None else 0
    return itemised(
        [((x.numel() if w.shape[1] else 0) + weights + (w.shape[1] if added else 0), x.dtype)],
        [(made, x.dtype)],
        walked=("products", "bias"),
        products=dots(made * x.shape[1]),
        bias=Counts(ADD=added),
    )


FORMS: dict[str, Form] = {
    "ghost.linear_norm": linear_norm,
    "ghost.linear_norms": linear_norms,
    "ghost.linear_gradient": linear_gradient,
    "ghost.linear_sum": linear_sum,
    "ghost.rounded_gradient": rounded_gradient,
    "ghost.rounded_sum": rounded_sum,
    "product.matmul": matmul,
}
