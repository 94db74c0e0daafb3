"""Local response normalisation with a hand-written backward pass.

Equal to ``nn.normalise.bounded_response_norm`` and its gradients up to rounding, for inputs that
are at least 0, and several times as fast: with ``a_k = q + alpha sum_m (h^m)^2`` and the maps m
around k,

    out_k = min(1, h_k a_k^-beta)
    dh_k  = g_k a_k^-beta - 2 alpha beta h_k sum_m g_m h_m a_m^(-beta - 1),

where g is 0 for outputs that are cut at 1.

Source: AdLM (22).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..nn.normalise import BoundedResponseNorm


class _Bounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, layer: BoundedResponseNorm) -> Tensor:
        a = _around(h * h, layer.size // 2).mul_(layer.alpha).add_(layer.q)
        power = _negative_power(a, layer.beta)
        unbounded = h * power
        ctx.save_for_backward(h, a, power, unbounded)
        ctx.layer = layer
        return unbounded.clamp_max(1.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        h, a, power, unbounded = ctx.saved_tensors
        live = gradient.masked_fill(unbounded >= 1, 0)
        others = _around((unbounded * live).div_(a), ctx.layer.size // 2)
        factor = -2 * ctx.layer.alpha * ctx.layer.beta
        return live.mul_(power).addcmul_(others, h, value=factor), None


def bounded_response_norm(h: Tensor, layer: BoundedResponseNorm) -> Tensor:
    """Return ``layer(h)`` for ``h >= 0``, ``[B, maps, ...]``, floating."""
    made: Tensor = _Bounded.apply(h, layer)  # type: ignore[no-untyped-call]
    return made


def _around(values: Tensor, half: int) -> Tensor:
    """Return sums over ``half`` maps to either side of each, as one product."""
    maps = torch.arange(values.shape[1], device=values.device)
    near = ((maps[:, None] - maps).abs() <= half).to(values)
    return (near @ values.flatten(2)).view(values.shape)


def _negative_power(a: Tensor, beta: float) -> Tensor:
    """Return ``a^-beta`` for positive ``a``; roots are several times as fast as powers."""
    if beta != 0.75:
        return a.pow(-beta)
    root = a.rsqrt()
    return root.sqrt().mul_(root)
