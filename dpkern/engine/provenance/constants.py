"""Notice constants that the loop makes anew for a batch.

Torch reads a tensor of one number without a call of ``__torch_function__`` where an operation takes
a number: ``torch.full(size, x.mean())``, ``torch.tensor(x.max())``, ``torch.add(..., alpha=...)``.
What comes out looks like a constant, but changes from batch to batch. Such a tensor of few entries,
with values that constants do not have, is a condition of the certificate (``READ``) from the second
batch on. Constants of the first batch may have been made before the loop.

Python numbers of such values, once ``item()`` has been called after a backward pass, are the same:
``math.exp(-loss.item())`` has lost the mark that ``item()`` gave.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
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
        self._numbers: set[float] = set()
        """The numbers that samples of the first batch have met."""
        self.numbers_are_out = False
        """Whether the loop has read numbers that are no condition as long as it prints them."""

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

    def note_numbers(self, batch: YieldedBatch, values: Iterable[Any]) -> None:
        """Add the condition if a number among these may have been made of an earlier batch."""
        if batch.boundary is None or not batch.boundary.has_loader:
            return
        self._first = self._first or weakref.ref(batch)
        if self._first() is batch:
            self._numbers.update(numbers_in(values))
        elif self.numbers_are_out:
            new = (v for v in numbers_in(values) if v not in self._numbers)
            if not all(map(is_usual, new)):
                batch.boundary.assume(READ)


def numbers_in(values: Iterable[Any]) -> Iterator[float]:
    """Yield the floats among values, also in lists, tuples and mappings."""
    for value in values:
        if isinstance(value, (float, np.floating)):
            yield float(value)
        elif isinstance(value, (tuple, list)):
            yield from numbers_in(value)
        elif isinstance(value, Mapping):
            yield from numbers_in(value.values())


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
