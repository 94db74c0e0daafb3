"""Compiled kernels that Python code calls piece by piece: addresses for tensors, null for None."""

from __future__ import annotations

from typing import Any

import torch

from ..base.schema import FLOATS
from . import cpu as _cpu  # used when called: cpu imports this module to register it

_TYPES = {torch.float32: "float32", torch.float64: "float64"}


def not_wide(x: torch.Tensor) -> str | None:
    """Why not, for 16-bit operands."""
    if x.dtype in FLOATS:
        return None
    return f"has float32 and float64 operands, got {str(x.dtype).removeprefix('torch.')}"


def _call(name: str, dtype: torch.dtype, *args: Any) -> None:
    """Run a kernel; tensors travel as addresses, None as null."""
    kernel = getattr(_cpu._C, f"{name}_{_TYPES[dtype]}")
    plain = [x.data_ptr() if isinstance(x, torch.Tensor) else 0 if x is None else x for x in args]
    kernel(*plain, _cpu._threads())
