"""Per-sample gradients that exist anyway: their norms, clip factors and weighted sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.graph import increment_version

from ....base.memory import memory_order
from .. import _numbers
from . import rows
from .factor import clip_factor, round_down
from .launch import launch, number

Tensors = Sequence[torch.Tensor]
_ROWS = 128


@triton.jit(do_not_specialize=["parts", "batch", "max_norm", "scale"])
def _factor_kernel(
    squares,
    norms,
    factors,
    parts: tl.int64,
    batch: tl.int64,
    max_norm: tl.int64,
    scale: tl.int64,
    AUTOMATIC: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Compute norms and factors ``[B]`` from squares ``[parts, B]``."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < batch
    total = tl.zeros((ROWS,), tl.float64)
    for i in range(parts):
        total += tl.load(squares + i * batch + row, mask=inside, other=0)
    norm = tl.sqrt(total) * number(scale, tl.float64)
    factor = clip_factor(norm, number(max_norm, tl.float64), AUTOMATIC)
    factor = round_down(factor * number(scale, tl.float64), factors.dtype.element_ty)
    tl.store(norms + row, norm, mask=inside)
    tl.store(factors + row, factor, mask=inside)


def _never(*_: Any, **__: Any) -> None:
    return None


def _explicit_norm(grads: Tensors) -> torch.Tensor:
    batch, device = grads[0].shape[0], grads[0].device
    powers = torch.empty(len(grads), batch, dtype=torch.float64, device=device)
    for part, power in zip(grads, powers, strict=True):
        rows.power_sums(part, batch, part.shape[1:].numel(), 2, power)
    return rows.combine(powers, torch.empty_like(powers[0]))


def _clip_factors(
    squares: Tensors,
    max_grad_norm: float,
    *,
    dtype: torch.dtype,
    scale: float = 1.0,
    automatic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    together = torch.stack(list(squares))
    parts, batch = together.shape
    norms = torch.empty_like(together[0])
    factors = torch.empty_like(norms, dtype=dtype)
    launch(
        _factor_kernel,
        -(-batch // _ROWS),
        norms,
        together,
        norms,
        factors,
        parts,
        batch,
        _numbers.bits(float(max_grad_norm)),
        _numbers.bits(float(scale)),
        AUTOMATIC=automatic,
        ROWS=_ROWS,
    )
    return factors, norms


def _contract(grads: Tensors, factors: torch.Tensor, outs: Tensors) -> None:
    for part, out in zip(grads, outs, strict=True):
        if part.is_contiguous():
            rows.add_rows(part, factors, out.numel(), out)
            increment_version(out)
            continue
        # Another order of entries: summed in that order, put right at last.
        order = [i - 1 for i in memory_order(part)]
        total = torch.zeros(out.numel(), dtype=out.dtype, device=out.device)
        rows.add_rows(part, factors, out.numel(), total)
        with torch.no_grad():
            out.permute(order).add_(total.view([out.shape[i] for i in order]))


KERNELS: tuple[tuple[str, Any, Any], ...] = (
    ("ghost.explicit_integer_sum", _contract, _never),
    ("ghost.explicit_norm", _explicit_norm, _never),
    ("ghost.clip_factors", _clip_factors, _never),
    ("ghost.contract", _contract, _never),
)
"""``(op, run, refuse)``."""
