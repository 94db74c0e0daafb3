"""Clip and sum explicit per-sample gradients, in exact or float arithmetic.

Powers of every tensor's rows, then the factors of all rows, then the weighted sums. Integer sums
add every sample first and verify it afterwards: a sample whose exact integer norm exceeds M, which
only rounding at the bound can cause, is subtracted, scaled by 1 - 2^-16 and added again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from ... import clip
from . import rows
from .factor import clip_factor, round_down
from .launch import launch

_ROWS = 128  # in a program that makes factors
_SHRINK = 1 - 2.0**-16


@triton.jit
def _norm(power, P: tl.constexpr):
    return tl.sqrt(power) if P == 2 else power


@triton.jit(do_not_specialize=["tensors", "batch"])
def _factor_kernel(
    powers,
    bounds,
    norms,
    factors,
    tensors: tl.int64,
    batch: tl.int64,
    P: tl.constexpr,
    PER_LAYER: tl.constexpr,
    AUTOMATIC: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Compute norms ``[B, tensors]`` and factors ``[tensors, B]`` from powers ``[tensors, B]``.

    ``bounds`` holds C and 1 / u (1 for float sums) for each tensor.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < batch
    total = tl.zeros((ROWS,), tl.float64)
    for i in range(tensors):
        power = tl.load(powers + i * batch + row, mask=inside, other=0)
        tl.store(norms + row * tensors + i, _norm(power, P), mask=inside)
        total += power
    for i in range(tensors):
        power = tl.load(powers + i * batch + row, mask=inside, other=0)
        used = power if PER_LAYER else total
        factor = clip_factor(_norm(used, P), tl.load(bounds + 2 * i), AUTOMATIC)
        # The whole sample vanishes where any of it is not finite.
        factor = tl.where((total - total) == 0, factor, 0.0) * tl.load(bounds + 2 * i + 1)
        factor = round_down(factor, factors.dtype.element_ty)
        tl.store(factors + i * batch + row, factor, mask=inside)


@lru_cache(maxsize=32)
def _table(
    max_norms: tuple[float, ...], units: tuple[float, ...], device: torch.device
) -> torch.Tensor:
    pairs = [(bound, 1.0 / unit) for bound, unit in zip(max_norms, units, strict=True)]
    return torch.tensor(pairs, dtype=torch.float64, device=device)


def _powers(tensors: Sequence[torch.Tensor], p: int) -> torch.Tensor:
    """Return ``sum |x|^p`` of every tensor's rows, float64 ``[tensors, B]``."""
    batch = tensors[0].shape[0]
    powers = torch.empty(len(tensors), batch, dtype=torch.float64, device=tensors[0].device)
    for tensor, power in zip(tensors, powers, strict=True):
        rows.power_sums(tensor, batch, tensor.shape[1:].numel(), p, power)
    return powers


def _sample_norm(
    grads: clip.Gradients,
    *,
    p: int = 2,
    scale: clip.Gradients | None = None,
    center: clip.Gradients | None = None,
) -> torch.Tensor:
    tensors = [t.detach().contiguous() for t in clip.tensors_of(grads)]
    if center is not None:
        pairs = zip(tensors, clip.tensors_of(center), strict=True)
        tensors = [t.double() - c.detach().double() for t, c in pairs]
    if scale is not None:
        pairs = zip(tensors, clip.tensors_of(scale), strict=True)
        tensors = [t.double() / s.detach().double() for t, s in pairs]
    powers = _powers(tensors, p)
    norms = powers.sqrt() if p == 2 else powers
    return clip.combine_norms(norms.t(), p)


def _never(*_: Any, **__: Any) -> None:
    return None


def _clip_sum(
    grads: clip.Gradients,
    max_grad_norm: float | tuple[float, ...],
    *,
    p: int = 2,
    style: str = "flat",
    arithmetic: str = "float",
    unit: float | tuple[float, ...] | None = None,
    out: list[torch.Tensor] | None = None,
    plan: clip.ClipRequest,
) -> clip.ClipResult:
    request = plan
    sums = request.accumulators(out)
    held = [t.detach().contiguous() for t in request.tensors]
    device, batch = held[0].device, request.batch_size
    norms = torch.empty(batch, len(held), dtype=torch.float64, device=device)
    dtype = clip.sum_dtype(held[0].dtype)
    factors = torch.empty(len(held), batch, dtype=dtype, device=device)
    launch(
        _factor_kernel,
        -(-batch // _ROWS),
        norms,
        _powers(held, p),
        _table(request.max_norms, request.units, device),
        norms,
        factors,
        len(held),
        batch,
        P=p,
        PER_LAYER=style == "per_layer",
        AUTOMATIC=style == "automatic",
        ROWS=_ROWS,
    )
    if arithmetic == "exact":
        _add_integers(held, factors, sums, request)
    else:
        for tensor, factor, total in zip(held, factors, sums, strict=True):
            rows.add_rows(tensor, factor, total.numel(), total)
    return request.result(sums, clip.combine_norms(norms, p))


def _add_integers(
    tensors: Sequence[torch.Tensor],
    factors: torch.Tensor,
    sums: Sequence[torch.Tensor],
    request: clip.ClipRequest,
) -> None:
    """Add ``trunc(factor row)`` of all rows, whose norms keep every bound."""
    p, per_layer = request.p, request.style == "per_layer"
    most = torch.tensor([m**p for m in request.unit_bounds], device=factors.device)[:, None]
    while True:
        power = torch.zeros(factors.shape, dtype=torch.int64, device=factors.device)
        for tensor, factor, total, own in zip(tensors, factors, sums, power, strict=True):
            rows.add_rows(tensor, factor, total.numel(), total, p=p, power=own)
        over = ((power if per_layer else power.sum(0)) > most).any(0)
        if not bool(over.any()):
            return
        again = torch.where(over, factors, 0.0)
        for tensor, factor, total in zip(tensors, again, sums, strict=True):
            rows.add_rows(tensor, factor, total.numel(), total, sign=-1)
        factors = again * _SHRINK


KERNELS: tuple[tuple[str, Any, Any], ...] = (
    ("clip.sample_norm", _sample_norm, _never),
    ("clip.clip_sum", _clip_sum, _never),
)
"""``(op, run, refuse)``."""
