"""Randomized response on a set of launchers of the CUDA kernels."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from ...base.rng import Stream
from .. import symbols as op
from . import _device, _tables

_CODES = {dtype: code for code, dtype in enumerate(op.DTYPES)}


@lru_cache(maxsize=64)
def lies(keep: int, categories: int) -> bytes:
    """``Lies`` of ``csrc/core/lies.h``."""
    width = op.lie_width(keep, categories)
    fields = {"keep": keep, "width": width, "reciprocal": (2**64 - 1) // width}
    return _tables.one(_tables.LIES, **fields, categories=categories).tobytes()


def randomize(
    launchers: Any,
    symbols: torch.Tensor,
    *,
    stream: Stream,
    keep: int,
    categories: int = 2,
    position: int = 0,
) -> tuple[torch.Tensor, int]:
    """The responses, and the error of the launch."""
    out = torch.empty_like(symbols)
    with _device.guard(symbols.device) as cuda:
        error = launchers.randomize_symbols(
            _tables.stream(stream).tobytes(),
            position,
            lies(keep, categories),
            _CODES[symbols.dtype],
            symbols.data_ptr(),
            symbols.numel(),
            out.data_ptr(),
            cuda,
        )
    return out, error
