"""Count clip factors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ._native import addresses, kernels, tallied
from ._tally import CountedRun, Kernel

Tensors = Sequence[torch.Tensor]


def _clip_factors(
    squares: Tensors,
    max_grad_norm: float,
    *,
    dtype: torch.dtype,
    scale: float = 1.0,
    automatic: bool = False,
) -> tuple[tuple[torch.Tensor, torch.Tensor], CountedRun]:
    batch = len(squares[0])
    norms = torch.empty(batch, dtype=torch.float64)
    factors = torch.empty(batch, dtype=dtype)
    packed = kernels().clip_factors(
        dtype is torch.float64,
        addresses(squares),
        batch,
        float(max_grad_norm),
        float(scale),
        automatic,
        norms.data_ptr(),
        factors.data_ptr(),
    )
    return (factors, norms), tallied(packed)[1]


KERNELS: dict[str, Kernel] = {"ghost.clip_factors": _clip_factors}
