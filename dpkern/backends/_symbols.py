"""The compiled CPU kernel of randomized response."""

from __future__ import annotations

from typing import Any

import torch

from ..base.codes import SymbolType
from ..base.dtypes import by_dtype
from ..rng import Stream
from . import cpu as _cpu  # used when called: cpu imports this module to register it

_CODES = by_dtype(SymbolType)


def _refuse(symbols: torch.Tensor, **_: Any) -> str | None:
    return _cpu._on_cpu(symbols)


def _randomize(
    symbols: torch.Tensor,
    *,
    stream: Stream,
    keep: int,
    categories: int = 2,
    position: int = 0,
    backend: str | None = None,
) -> torch.Tensor:
    out = torch.empty_like(symbols)
    _cpu._C.randomize_symbols(
        _CODES[symbols.dtype],
        stream.packed(),
        position,
        categories,
        keep,
        symbols.data_ptr(),
        symbols.numel(),
        out.data_ptr(),
        _cpu._threads(),
    )
    return out


KERNELS: tuple[tuple[str, Any, Any], ...] = (("symbols.randomize", _randomize, _refuse),)
"""``(op, run, refuse)``."""
