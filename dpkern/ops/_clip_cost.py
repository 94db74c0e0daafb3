"""What clipping costs, for samples that are finite and lie beyond their bound."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._dispatch import Cost
from ._clip_request import Gradients, Request, sum_dtype, tensors_of


def power_flops(entries: int, p: int) -> int:
    """``sum |x|^p`` in float64; an absolute value is no floating-point operation."""
    return max(entries - 1, 0) + (entries if p == 2 else 0)


def _norm_flops(tensors: Sequence[torch.Tensor], p: int) -> int:
    """The norm of one sample, by way of those of its tensors."""
    powers = sum(power_flops(t.shape[1:].numel(), p) for t in tensors)
    return powers + len(tensors) - 1 + (2 * len(tensors) + 1 if p == 2 else 0)


def sample_norm(
    grads: Gradients,
    *,
    p: int = 2,
    scale: Gradients | None = None,
    center: Gradients | None = None,
    **_: Any,
) -> Cost:
    """``clip.sample_norm``."""
    tensors = tensors_of(grads)
    batch, entries = tensors[0].shape[0], sum(t.numel() for t in tensors)
    read = entries * tensors[0].element_size()
    flops = batch * _norm_flops(tensors, p)
    for extra in (scale, center):
        if extra is not None:
            read += sum(t.numel() * t.element_size() for t in tensors_of(extra))
            flops += entries
    return Cost(bytes_read=read, bytes_written=8 * batch, flops=flops)


def clip_sum(
    grads: Gradients,
    max_grad_norm: float | Sequence[float],
    *,
    p: int = 2,
    style: str = "flat",
    arithmetic: str = "float",
    unit: float | Sequence[float] | None = None,
    out: Sequence[torch.Tensor] | None = None,
    **_: Any,
) -> Cost:
    """``clip.clip_sum``; sums that it makes itself are only written."""
    tensors = tensors_of(grads)
    batch, entries = tensors[0].shape[0], sum(t.numel() for t in tensors)
    exact = arithmetic == "exact"
    if out is not None:
        sums = sum(o.numel() * o.element_size() for o in out) if batch else 0
    else:
        dtype = sum_dtype(tensors[0].dtype)
        if exact:
            dtype = Request.of(grads, max_grad_norm, p, style, arithmetic, unit).exact_dtype
        sums = sum(t.shape[1:].numel() for t in tensors) * dtype.itemsize
    # Of each sample and tensor: root, aim, quotient, and the sum of automatic clipping.
    each = int(p == 2) + 2 + int(style == "automatic") + int(exact)
    factors = len(tensors) * each + len(tensors) - 1
    return Cost(
        bytes_read=entries * tensors[0].element_size() + (sums if out is not None else 0),
        bytes_written=8 * batch + sums,
        flops=batch * (_norm_flops(tensors, p) + factors) + entries * (1 if exact else 2),
    )


__all__ = ["clip_sum", "power_flops", "sample_norm"]
