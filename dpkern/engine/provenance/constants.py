"""Notice constants that the loop makes anew for a batch.

Torch reads a tensor of one number without a call of ``__torch_function__`` where an operation takes
a number: ``torch.full(size, x.mean())``, ``torch.tensor(x.max())``, ``torch.add(..., alpha=...)``.
What comes out looks like a constant, but changes from batch to batch. Such a tensor of few entries,
with values that constants do not have, is a condition of the certificate (``READ``) from the second
batch on. Constants of the first batch may have been made before the loop.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from .states import YieldedBatch
from .statistic import READ, is_usual

FEW = 64
"""Number of entries up to which constants are looked at."""

_MOST = 1024


class Constants:
    """The constants that have met samples of one module."""

    def __init__(self) -> None:
        self._first: weakref.ref[YieldedBatch] | None = None
        self._known: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        """Each constant by its ``id``, with the number of writes to it."""

    def note(self, batch: YieldedBatch, constants: Sequence[Tensor]) -> None:
        """Add the condition if one of these may have been made of the batch."""
        if batch.boundary is None or not batch.boundary.has_loader:
            return
        self._first = self._first or weakref.ref(batch)
        for tensor in constants:
            known = self._known.get(id(tensor))
            if known is not None and known[0]() is tensor and known[1] == tensor._version:
                continue
            if len(self._known) >= _MOST:
                self._known = {k: v for k, v in self._known.items() if v[0]() is not None}
            self._known[id(tensor)] = weakref.ref(tensor), tensor._version
            if self._first() is not batch and not _has_usual_values(tensor):
                batch.boundary.assume(READ)


def may_be_read(tensor: Tensor) -> bool:
    """Whether a constant is of the kind that numbers read from samples are made into."""
    return (
        type(tensor) is Tensor
        and tensor.is_floating_point()
        and tensor.is_cpu
        and tensor.numel() <= FEW
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and not tensor.is_inference()
    )


def _has_usual_values(tensor: Tensor) -> bool:
    values = tensor.flatten().tolist()
    rounded = torch.tensor([float(f"{v:.5g}") for v in values], dtype=tensor.dtype).tolist()
    return all(is_usual(v) or v == other for v, other in zip(values, rounded, strict=True))
