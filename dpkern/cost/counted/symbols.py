"""Count randomized response."""

from __future__ import annotations

import torch

from ...base.rng import Stream
from ...ops import symbols as op
from ...ops.backends._structs import BYTES
from ._native import kernels, tallied
from ._tally import CountedRun, Kernel


def _randomize(
    symbols: torch.Tensor, *, stream: Stream, keep: int, categories: int = 2, position: int = 0
) -> tuple[torch.Tensor, CountedRun]:
    out = torch.empty_like(symbols)
    packed = kernels().randomize_symbols(
        op.DTYPES.index(symbols.dtype),
        BYTES["Stream"](stream),
        position,
        categories,
        keep,
        symbols.data_ptr(),
        symbols.numel(),
        out.data_ptr(),
    )
    return out, tallied(packed)[1]


KERNELS: dict[str, Kernel] = {"symbols.randomize": _randomize}
