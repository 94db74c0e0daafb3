"""Per-sample gradients that exist anyway, counted."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...ops.ghost import explicit
from ._native import addresses, kernels, tallied
from ._tally import Kernel, Tally

Tensors = Sequence[torch.Tensor]


def _columns(grads: Tensors) -> list[int]:
    return [part.shape[1:].numel() for part in grads]


def _explicit_norm(grads: Tensors) -> tuple[torch.Tensor, Tally]:
    batch = len(grads[0])
    wide = grads[0].dtype is torch.float64
    squares = torch.empty(batch, dtype=torch.float64)
    packed = kernels().explicit_norm(
        wide, addresses(grads), _columns(grads), batch, squares.data_ptr()
    )
    return squares, tallied(packed)[1]


def _contract(grads: Tensors, factors: torch.Tensor, outs: Tensors) -> tuple[None, Tally]:
    # Sums are added in the order of the gradients' entries in memory.
    orders = [[i - 1 for i in explicit.memory_order(part)] for part in grads]
    flat = [out.permute(order).contiguous() for out, order in zip(outs, orders, strict=True)]
    wide = factors.dtype is torch.float64
    packed = kernels().contract(
        wide, addresses(grads), _columns(grads), addresses(flat), factors.data_ptr(), len(factors)
    )
    with torch.no_grad():
        for out, total, order in zip(outs, flat, orders, strict=True):
            out.permute(order).copy_(total)
    return None, tallied(packed)[1]


def _clip_factors(
    squares: Tensors,
    max_grad_norm: float,
    *,
    dtype: torch.dtype,
    scale: float = 1.0,
    automatic: bool = False,
) -> tuple[tuple[torch.Tensor, torch.Tensor], Tally]:
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


KERNELS: dict[str, Kernel] = {
    "ghost.explicit_norm": _explicit_norm,
    "ghost.contract": _contract,
    "ghost.clip_factors": _clip_factors,
}
