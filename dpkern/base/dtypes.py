"""Torch's dtypes, as signatures group them and as compiled kernels number them."""

from __future__ import annotations

from enum import IntEnum
from typing import TypeVar

import torch

from .signature import GROUPS

Code = TypeVar("Code", bound=IntEnum)
DTYPES = {name: tuple(getattr(torch, kind) for kind in kinds) for name, kinds in GROUPS.items()}
"""``GROUPS`` as torch's dtypes."""
FLOATS = DTYPES["Float"]


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of gradients, factors and sums of operands of this dtype."""
    return dtype if dtype in FLOATS else torch.float32


def by_dtype(kind: type[Code]) -> dict[torch.dtype, Code]:
    """Return the code of every torch type that is one of ``kind`` by its full name."""
    # torch.float is a second name of torch.float32.
    return {
        dtype: item
        for item in kind
        if isinstance(dtype := getattr(torch, item.name, None), torch.dtype)
        and str(dtype) == f"torch.{item.name}"
    }


__all__ = ["DTYPES", "FLOATS", "by_dtype", "sum_dtype"]
