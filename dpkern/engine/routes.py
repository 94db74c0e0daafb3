"""Which way to a layer's clipped sum: keep its per-sample gradients, or take the norm alone.

Keeping costs memory and saves a pass: the sum is then one contraction with the clip factors.
Otherwise the operands stay (layer input and output gradient) until the factors are known, and the
sum is one weighted product. Where the per-sample gradients are no larger than the operands, keeping
them is free; beyond that a budget decides.
"""

from __future__ import annotations

from .._validate import non_negative
from .records import Convolution, Linear, Record

_BYTES = 4


class KeepBudget:
    """Memory for kept per-sample gradients beyond the operands that they replace.

    Args:
        limit: bytes if an int; if a float, a fraction of the layer inputs that were captured for
            the current samples. 0 keeps nothing that costs memory.
    """

    def __init__(self, limit: int | float) -> None:
        non_negative(keep_budget=limit)
        self.limit = limit
        self.used = 0
        """Bytes in use beyond the replaced operands."""
        self.peak = 0
        self.activations = 0
        """Bytes of layer inputs in the forward pass of the current samples."""

    @property
    def bytes(self) -> int:
        """The limit in bytes, now."""
        if isinstance(self.limit, int):
            return self.limit
        return int(self.limit * self.activations)

    def kept(self, record: Record) -> Record:
        """The record, or its per-sample gradients written out where that is better."""
        if not isinstance(record, (Linear, Convolution)):
            return record
        extra = max(0, _BYTES * (record.gradient_size - record.held))
        if self.used + extra > self.bytes or not worth_keeping(record):
            return record
        self.used += extra
        self.peak = max(self.peak, self.used)
        return record.kept()

    def release(self) -> None:
        """New samples: nothing is kept any more."""
        self.used = 0


def worth_keeping(record: Linear | Convolution) -> bool:
    """Whether writing the gradients out is the faster way, by modelled operations."""
    if isinstance(record, Linear):
        positions = int(record.a.shape[1])
        p, d = record.shape
        if positions == 1:
            return False
        gram = positions * positions * (p + d) / 2
        # Norm by Gram and then the weighted product, or the product per sample and a contraction.
        return positions * p * d < gram + positions * p * d * 0.8
    positions = record.g[0, 0].numel() if record.batch else 0
    co, ci, *taps = record.shape
    area = 1
    for tap in taps:
        area *= tap
    product = positions * co * ci * area
    gram = positions * positions * (co + ci) / 2
    return product < gram + 0.9 * product
