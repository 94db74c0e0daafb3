"""Whether tensors are where they were and look the same, in C++ or by a few loops in C."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from ...ops import direct

_POINTER = Tensor.data_ptr
_CONTIGUOUS = Tensor.is_contiguous
_SHAPE = Tensor.size
_DTYPE = Tensor.dtype.__get__  # type: ignore[attr-defined]
_TRAINED = Tensor.requires_grad.__get__  # type: ignore[attr-defined]


class Unchanged:
    """Addresses, shapes, dtypes and ``requires_grad`` of tensors, to compare with later ones.

    Args:
        tensors: the tensors.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        self._looks = self._look()
        self.seen = direct.unchanged_tensors(self._tensors)
        """The same in C++, or None."""

    def _look(self) -> tuple[list[object], ...]:
        tensors = self._tensors
        with torch._C.DisableTorchFunctionSubclass():
            return (
                list(map(_POINTER, tensors)),
                list(map(_SHAPE, tensors)),
                list(map(_CONTIGUOUS, tensors)),
                list(map(_DTYPE, tensors)),
                list(map(_TRAINED, tensors)),
            )

    def holds(self) -> bool:
        """Whether everything is as it was."""
        if self.seen is not None:
            same: bool = self.seen.hold()
            return same
        return self._look() == self._looks

    def holds_beside(
        self, x: Any, shape: tuple[int, ...], dtype: torch.dtype, trained: bool
    ) -> bool:
        """Whether it is, and ``x`` is an ordinary tensor of this shape and dtype on the CPU.

        Args:
            x: an operand.
            shape, dtype: how it has to look.
            trained: whether it has to need a gradient.
        """
        if self.seen is not None:
            same: bool = self.seen.hold_beside(x, shape, dtype, trained)
            return same
        alike = type(x) is Tensor and x.shape == shape and x.dtype is dtype and x.is_cpu
        return alike and x.requires_grad is trained and self.holds()

    def is_of(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are the same tensors in the same order."""
        return len(tensors) == len(self._tensors) and all(map(is_, tensors, self._tensors))
