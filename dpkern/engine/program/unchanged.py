"""Check whether tensors have moved or changed their shape or dtype, by a few loops in C."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

import torch
from torch import Tensor

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
        with torch._C.DisableTorchFunctionSubclass():
            self._looks = self._look()

    def _look(self) -> tuple[list[object], ...]:
        tensors = self._tensors
        return (
            list(map(_POINTER, tensors)),
            list(map(_SHAPE, tensors)),
            list(map(_CONTIGUOUS, tensors)),
            list(map(_DTYPE, tensors)),
            list(map(_TRAINED, tensors)),
        )

    def holds(self) -> bool:
        """Whether nothing has changed; call it inside ``without_torch_function()``."""
        return self._look() == self._looks

    def is_of(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are the same tensors in the same order."""
        return len(tensors) == len(self._tensors) and all(map(is_, tensors, self._tensors))
