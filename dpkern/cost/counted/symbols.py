"""Randomized response, counted."""

from __future__ import annotations

import torch

from ...base.codes import SymbolType
from ...base.dtypes import by_dtype
from ...rng import Stream
from ._native import kernels, tallied
from ._tally import Kernel, Tally

_CODES = by_dtype(SymbolType)


def _randomize(
    symbols: torch.Tensor, *, stream: Stream, keep: int, categories: int = 2, position: int = 0
) -> tuple[torch.Tensor, Tally]:
    out = torch.empty_like(symbols)
    packed = kernels().randomize_symbols(
        _CODES[symbols.dtype],
        stream.packed(),
        position,
        categories,
        keep,
        symbols.data_ptr(),
        symbols.numel(),
        out.data_ptr(),
    )
    return out, tallied(packed)[1]


KERNELS: dict[str, Kernel] = {"symbols.randomize": _randomize}
