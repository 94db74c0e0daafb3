"""Choose the way to a layer's clipped sum: materialize its gradients, or take the norm alone.

Materialized gradients cost memory and save a pass: the sum is one contraction with the clip
factors. Otherwise the operands stay (layer input and output gradient) until the factors are known,
and the sum is one weighted product. Where the gradients are no larger than the operands, they are
free; beyond that a budget decides. On the CPU the times were measured; on devices they are
predicted (``device_cost``), and materialized gradients are the usual way of long sequences.
"""

from __future__ import annotations

import math

import torch

from ..base.errors import BackendError
from ..base.validate import non_negative
from ..ops import ghost
from .device_cost import Work, memory_for_gradients
from .per_sample_gradients import (
    ConvolutionGradients,
    ExplicitGradients,
    LinearGradients,
    PerSampleGradients,
    RoundedGradients,
)

SHARE = 0.25
"""The budget of None, as a fraction of the captured layer inputs."""


class KeepBudget:
    """The memory for materialized per-sample gradients beyond the operands that they replace.

    Args:
        limit: bytes if an int; if a float, a fraction of the layer inputs that were captured for
            the current samples. 0 keeps nothing that costs memory. None is a quarter of these
            inputs, and on a device at least a quarter of its memory.
    """

    def __init__(self, limit: int | float | None) -> None:
        if limit is not None:
            non_negative(keep_budget=limit)
        self.limit = limit
        self.used = 0
        """Bytes in use beyond the replaced operands."""
        self.peak = 0
        self.activations = 0
        """Bytes of layer inputs in the forward pass of the current samples."""
        self.cached = CACHED
        """Bytes of a record that stay in the cache; 0 lets no choice depend on the batch size."""

    @property
    def in_bytes(self) -> bool:
        """Whether the limit is a positive number of bytes, which more samples reach earlier."""
        return isinstance(self.limit, int) and self.limit > 0

    def bytes_on(self, device: torch.device) -> int:
        """Return the limit in bytes, now, for gradients on this device."""
        if isinstance(self.limit, int):
            return self.limit
        share = int((SHARE if self.limit is None else self.limit) * self.activations)
        if self.limit is None and self.cached:
            return max(share, memory_for_gradients(device))
        return share

    def kept(self, record: PerSampleGradients, *, written: bool = False) -> PerSampleGradients:
        """Return the gradients as they are, or materialized where that is faster and fits.

        Args:
            record: gradients of one use.
            written: whether the norm needs materialized gradients anyway.
        """
        if not isinstance(record, (LinearGradients, ConvolutionGradients)):
            return record
        linear = record if isinstance(record, LinearGradients) else None
        if linear is not None and not self.cached and not record.g.is_cpu:
            # A device's library may multiply a sample otherwise among others, and nothing may
            # depend on them.
            return record
        # Exact arithmetic lets nothing depend on the batch, and truncates float32 gradients.
        rounded = linear is not None and linear.rounded and bool(self.cached) and not written
        stored = record.gradient_bytes // (2 if rounded else 1)
        extra = max(0, stored - record.held_bytes)
        worth = worth_writing(record) if written else worth_keeping(record, self.cached)
        if self.used + extra > self.bytes_on(record.device) or not worth:
            return record
        made = _materialized(record, rounded, or_fail=not self.cached)
        if made is None:
            return record
        self.used += extra
        self.peak = max(self.peak, self.used)
        return made


def _materialized(
    record: LinearGradients | ConvolutionGradients, rounded: bool, *, or_fail: bool
) -> ExplicitGradients | RoundedGradients | None:
    """Return the gradients, or None if a device has no room for them: the norm alone needs none.

    ``or_fail``: nothing may depend on what else is in memory, so that this is an error.
    """
    try:
        if rounded and isinstance(record, LinearGradients):
            return record.materialize_rounded()
        return record.materialize()
    except torch.OutOfMemoryError:
        if or_fail:
            raise
        return None
    except BackendError as error:
        if isinstance(error.__cause__, torch.OutOfMemoryError) and not or_fail:
            return None
        raise


# Nanoseconds per thousand multiply-adds, and per thousand numbers stored in fresh pages and read
# once more, as measured with AVX-512 on one core; only their ratios matter.
_LINEAR_SUM, _LINEAR_KEPT, _LINEAR_GRAM = 10.5, 15.0, 15.5
_CONV_SUM, _CONV_KEPT, _CONV_GRAM = 13.0, 14.0, 45.0
_STORED = 700.0
CACHED = 1 << 16
"""Bytes of all samples' gradients that stay in the cache until they are summed."""


def worth_keeping(record: LinearGradients | ConvolutionGradients, cached: int = CACHED) -> bool:
    """Whether materialized gradients are the faster way to norm and sum.

    They cost one product per sample and a contraction. The other way takes the norm, by the Gram
    matrices or by a product that is squared and dropped, and one product for the sum.
    """
    width, size = record.shape[0], math.prod(record.shape)
    if isinstance(record, LinearGradients) and record.a.shape[1] == 1:
        return False
    if not record.g.is_cpu:
        work = Work.of(record)
        return work.gradients <= work.held or work.materialized <= work.norm_alone
    if isinstance(record, LinearGradients):
        positions = int(record.a.shape[1])
        gram = _LINEAR_GRAM * positions * positions * (width + record.shape[1]) / 2
        kept, summed = _LINEAR_KEPT * positions * size, _LINEAR_SUM * positions * size
    else:
        geometry = record.sizes
        positions, gram = geometry.positions, math.inf
        if ghost.conv.norm_route(geometry) == "gram":
            gram = _CONV_GRAM * ghost.conv.gram_multiplications(geometry) / geometry.batch
        kept, summed = _CONV_KEPT * positions * size, _CONV_SUM * positions * size
    stored = _STORED if record.gradient_bytes > cached else 0.0
    return kept + stored * size <= min(gram, kept) + summed


def worth_writing(record: LinearGradients | ConvolutionGradients) -> bool:
    """Whether gradients that are made for the norm are worth their memory until the sum."""
    if isinstance(record, LinearGradients):
        positions, each = int(record.a.shape[1]), _LINEAR_SUM
        if positions == 1:
            return False
    else:
        positions, each = math.prod(record.g.shape[2:]), _CONV_SUM
    if not record.g.is_cpu:
        work = Work.of(record)
        return work.reread <= work.summed
    return _STORED <= each * positions
