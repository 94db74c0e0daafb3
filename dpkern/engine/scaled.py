"""Bound norms of gradients that are scaled and centred by entry, ``||grad_b / s - m / s||``.

Entries differ in their weights, so no product of norms gives them. Gradients are materialized for
some samples at a time and scaled in one pass in their own dtype; the bound of the rounding is added
to their norms. With unit roundoff u an entry y comes out as y', and

    |y| <= (|y'| + 3.2 u |m / s|) (1 + 3.3 u) + 2 tiny

three roundings of grad / s (the factor 1 / s, product, sum), two of m / s, and underflow.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from ..ops import ghost
from ..ops.ghost.explicit import memory_order
from .per_sample_gradients import (
    ConvolutionGradients,
    ExplicitGradients,
    LinearGradients,
    PerSampleGradients,
    RoundedGradients,
    to_sum_dtype_dense,
)

_TOGETHER = 4
"""Factor by which fewer samples are scaled at a time than are materialized, so that the scaled ones
are read again while they are in the cache."""


def scaled_square(record: PerSampleGradients, each: Tensor, shift: Tensor | None) -> Tensor:
    """Return upper bounds of ``||grad_b each + shift||^2``, float64 ``[B]``.

    Materialized gradients are taken as they are, for they are what is summed. Others are summed as
    products of operands: they are materialized in float64, with the rounding of these sums added.

    Args:
        record: the gradients.
        each, shift: float64, of the parameter's shape.
    """
    exists = isinstance(record, (ExplicitGradients, RoundedGradients))
    entries = _Entries(each, shift)
    norms = record.by_pieces(
        lambda piece: entries.norms(piece if exists else _in_float64(piece)),
        each.numel() * (_TOGETHER if exists else 1),
    )
    if not exists:
        terms, products = record.rounding_terms()
        unit = torch.finfo(_in_float64(record.part(slice(0, 1))).dtype).eps
        norms = norms + (terms + 4) * unit * each.max() * products
    return norms.square() * (1 + 2.0**-40)


def _in_float64(record: PerSampleGradients) -> PerSampleGradients:
    """Return the same gradients as sums of float64 products, where they are products at all."""
    if isinstance(record, LinearGradients):
        return LinearGradients(record.a.double(), record.g.double())
    if isinstance(record, ConvolutionGradients):
        return replace(record, x=record.x.double(), g=record.g.double())
    return record


class _Entries:
    """The scaling, in whatever dtype and order of memory the gradients have."""

    def __init__(self, each: Tensor, shift: Tensor | None) -> None:
        self.each, self.shift = each, shift
        self.shift_norm = 0.0 if shift is None else shift.norm()
        self._rows: Tensor | None = None
        self._made: dict[tuple[torch.dtype, tuple[int, ...]], tuple[Tensor, Tensor | None]] = {}

    def norms(self, record: PerSampleGradients) -> Tensor:
        grads = to_sum_dtype_dense(record.per_sample().reshape(-1, *self.each.shape))
        order = memory_order(grads)
        factor, shift = self._in(grads.dtype, tuple(i - 1 for i in order))
        rows = grads.permute(0, *order).flatten(1)
        scaled = self._room(rows)
        if shift is None:
            torch.mul(rows, factor, out=scaled)
        else:
            torch.addcmul(shift, rows, factor, out=scaled)
        norms: Tensor = ghost.explicit_norm([scaled]).sqrt()
        kind = torch.finfo(grads.dtype)
        slack = 2 * kind.eps * self.shift_norm + 4 * kind.tiny * math.sqrt(self.each.numel())
        return norms * (1 + 2 * kind.eps) + slack

    def _room(self, rows: Tensor) -> Tensor:
        """Return memory that all pieces share: fresh pages would cost more than the scaling."""
        if self._rows is None or self._rows.dtype is not rows.dtype or len(self._rows) < len(rows):
            self._rows = torch.empty_like(rows)
        return self._rows[: len(rows)]

    def _in(self, dtype: torch.dtype, order: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        if (dtype, order) not in self._made:
            # A factor that underflows would hide its entry: NaN and infinity drop the sample.
            each = self.each.masked_fill(self.each < torch.finfo(dtype).tiny, torch.inf)
            pair = (
                None if t is None else t.permute(order).flatten().to(dtype)
                for t in (each, self.shift)
            )
            factor, shift = pair
            assert factor is not None
            self._made[dtype, order] = factor, shift
        return self._made[dtype, order]


__all__ = ["scaled_square"]
