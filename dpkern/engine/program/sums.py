"""Keep the memory of a program's clipped sums from step to step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

_ALIGNED = 16


def starts_of(shapes: Sequence[tuple[int, ...]]) -> list[int]:
    """Return the offset of each parameter's sum in the memory of all, and its size, in numbers."""
    starts = [0]
    for shape in shapes:
        starts.append(starts[-1] + -(-math.prod(shape) // _ALIGNED) * _ALIGNED)
    return starts


class SumMemory:
    """Contiguous memory, split into the shapes of the parameters' sums.

    Attributes:
        whole: all of it.
        tensors: the sums, by parameter.
        addresses: where they begin.
        address, size: where all of it begins, and how many numbers it has.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> None:
        starts = starts_of(shapes)
        self.whole = torch.zeros(starts[-1], dtype=dtype)
        self.tensors = tuple(
            self.whole[start : start + math.prod(shape)].view(shape)
            for start, shape in zip(starts, shapes, strict=False)
        )
        self.addresses = [tensor.data_ptr() for tensor in self.tensors]
        self.address, self.size = self.whole.data_ptr(), starts[-1]
        self.place = self.address, self.whole.nbytes
        """The beginning of all of it, and its bytes."""
        self.samples = 0
        """Number of samples whose gradients were made last."""


class Sums:
    """Memory for the step's sums, and for those of another physical batch of the same step.

    Integers of more samples than 32 bits are sure to hold have memory of 64 bits.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> None:
        self._shapes = shapes
        self._dtype = dtype
        self._first: SumMemory | None = None
        self._further: SumMemory | None = None
        self._wide: SumMemory | None = None

    def first(self, *, wide: bool = False) -> SumMemory:
        """Return memory for the first physical batch of a step, whose sums replace all in it."""
        if wide:
            if self._wide is None:
                self._wide = SumMemory(self._shapes, torch.int64)
            return self._wide
        if self._first is None:
            self._first = SumMemory(self._shapes, self._dtype)
        return self._first

    def further(self, *, wide: bool = False) -> SumMemory:
        """Return memory for another physical batch of the step, whose sums replace all in it."""
        if wide:
            return SumMemory(self._shapes, torch.int64)
        if self._further is None:
            self._further = SumMemory(self._shapes, self._dtype)
        return self._further

    def of(self, tensors: object) -> SumMemory | None:
        """Return the memory of a step's unfinished sums, or None if it is not ours."""
        for mine in (self._first, self._wide):
            if mine is not None and tensors is mine.tensors:
                return mine
        return None

    def give_away(self) -> None:
        """Leave the memory to a holder of the step's sums; the next step allocates its own."""
        self._first = self._wide = None
