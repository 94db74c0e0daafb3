"""How the counted kernels of layers are called: by name and type, tensors as addresses."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import InvalidInput
from ._native import kernels, tallied
from ._tally import Tally

_TYPES = {torch.float32: "float32", torch.float64: "float64"}


def run(name: str, dtype: torch.dtype | None, *args: Any) -> Tally:
    """What the kernel ``name`` of this type took; None among the arguments stays None.

    Raises:
        InvalidInput: 16-bit operands, which no kernel on the CPU takes either.
    """
    if dtype is not None and dtype not in _TYPES:
        raise InvalidInput(
            "dtype",
            expected="float32 or float64 operands",
            got=str(dtype),
            remedy="Count them by their closed form in dpkern.cost.forms.",
        )
    kernel = getattr(kernels(), name if dtype is None else f"{name}_{_TYPES[dtype]}")
    packed = kernel(*(x.data_ptr() if isinstance(x, torch.Tensor) else x for x in args))
    return tallied(packed)[1]


def address(tensor: torch.Tensor | None) -> int:
    """Where it begins; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


__all__ = ["address", "run"]
