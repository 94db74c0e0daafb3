"""Match torch's types with the codes by which compiled kernels know them."""

from __future__ import annotations

from enum import IntEnum
from typing import TypeVar

import torch

Code = TypeVar("Code", bound=IntEnum)


def by_dtype(kind: type[Code]) -> dict[torch.dtype, Code]:
    """Return the code of every torch type that is one of ``kind`` by its full name."""
    # torch.float is a second name of torch.float32.
    return {
        dtype: item
        for item in kind
        if isinstance(dtype := getattr(torch, item.name, None), torch.dtype)
        and str(dtype) == f"torch.{item.name}"
    }
