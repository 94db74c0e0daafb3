"""Materialized gradients of linear layers on devices: the library's batched product.

The library's products run several times as fast as ours. How they round does not matter for a
clipping bound: the norms are those of the numbers that were stored, read once more in float64, and
the sums are made of the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from . import _launch_explicit
from ._start import Device, Rows, refuse_first

SIXTEEN = (torch.bfloat16, torch.float16)
_ALIGNED = 16
"""Bytes at whose multiples the rows of a library's operands begin, for its fast products."""
_SQUARES = 1 + 1e-12
"""It covers the rounding of a float64 sum of squares: fewer than 4000 additions in a chain."""


def aligned_rows(x: torch.Tensor) -> torch.Tensor:
    """Return ``x [B, T, n]`` with rows that begin at multiples of 16 bytes, copied where not so.

    A vocabulary of 50257 is such a width: the library would read it number by number.
    """
    each = _ALIGNED // x.element_size()
    width = x.shape[2]
    if width % each == 0 or width < each:
        return x
    room = x.new_empty(*x.shape[:2], -(-width // each) * each)
    whole = room[:, :, :width]
    whole.copy_(x)
    return whole


def batched_product(g: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """Return ``sum_t g[b, t] outer a[b, t]``, float32 of 16-bit operands, else in their dtype."""
    if g.dtype not in SIXTEEN:
        return torch.bmm(g.transpose(1, 2), a)
    if not g.is_cuda:  # emulated: a CPU's library gives the operands' dtype only
        return torch.bmm(g.float().transpose(1, 2), a.float())
    return torch.bmm(g.transpose(1, 2), a, out_dtype=torch.float32)


@torch.no_grad()
def linear_gradient(
    on: Device, a: torch.Tensor, g: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    kind = a.device.type
    # Inside of a block that casts, the library would round float32 operands to 16 bits.
    casts = torch.is_autocast_enabled(kind)
    with torch.autocast(kind, enabled=False) if casts else nullcontext():
        grads = batched_product(aligned_rows(g.detach()), aligned_rows(a.detach()))
    return grads, _launch_explicit.explicit_norm(on, [grads]).mul_(_SQUARES)


@torch.no_grad()
def rounded_gradient(
    on: Device, a: torch.Tensor, g: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the library's product, whose float32 sums are rounded to 16 bits at last."""
    kind = a.device.type
    casts = torch.is_autocast_enabled(kind)
    with torch.autocast(kind, enabled=False) if casts else nullcontext():
        left, right = aligned_rows(g.detach()).transpose(1, 2), aligned_rows(a.detach())
        if g.is_cuda or g.dtype not in SIXTEEN:
            grads = torch.bmm(left, right)
        else:  # emulated
            grads = torch.bmm(left.float(), right.float()).to(g.dtype)
    return grads, _launch_explicit.explicit_norm(on, [grads]).mul_(_SQUARES)


def _refuse_rounded(
    on: Device, first: torch.Tensor | Sequence[torch.Tensor], *_: Any, **__: Any
) -> str | None:
    given = [first] if isinstance(first, torch.Tensor) else first
    if any(one.dtype is torch.float16 for one in given):
        return "has no float16 gradients"
    return refuse_first(on, first)


def _refuse(on: Device, a: torch.Tensor, g: torch.Tensor, **_: Any) -> str | None:
    if a.dtype in SIXTEEN and not hasattr(torch.ops.aten.bmm, "dtype"):
        return "needs a torch whose products of 16-bit operands are float32 (2.8)"
    return refuse_first(on, a)


KERNELS: Rows = (
    ("ghost.linear_gradient", linear_gradient, _refuse),
    ("ghost.rounded_gradient", rounded_gradient, _refuse_rounded),
    ("ghost.rounded_sum", _launch_explicit.contract, _refuse_rounded),
)
"""``(op, run, refuse)``."""
