"""Clip explicit per-sample gradients by the compiled kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ...base.codes import Style
from ...base.kernel import Kernel
from ...base.schema import BoundCall
from ...base.signature import Double, Gradient, Summed, any_number, filled
from .. import clip
from .._clip_request import ClipBounds as ClipBound
from ..clip import ClipRequest, ClipResult, Power
from . import _native
from ._native import CPU, compiled


@compiled
def clip_rows(  # type: ignore[empty-body]
    grads: Sequence[Gradient[Tensor, "B *P"]],
    sums: Sequence[Summed[Tensor, "*P", filled, any_number]],
    norms: Double[Tensor, "B", filled],
    bounds: Sequence[ClipBound] | None,
    *,
    p: Power,
    style: Style,
    fresh: bool,
) -> int:
    """Return the norm of each sample, and sum the clipped samples if there are sums.

    Args:
        fresh: sums begin at zero, whatever they hold.

    Returns:
        How many samples are not finite; they add nothing to the sums.
    """


def _sample_norm(bound: BoundCall) -> Tensor:
    grads, p, *_ = bound.args
    norms = _native.empty((bound.sizes[0],), torch.float64)
    # No sums, where a list of them would have one for each tensor.
    clip_rows.run(
        (_contiguous(grads), (), norms, None, p, "flat", False),
        bound.sizes,
        bound.kind,
        bound.device,
    )
    return norms


def _clip_sum(bound: BoundCall) -> ClipResult:
    request, out = bound.plan, bound.args[-1]
    batch, shapes = bound.sizes
    if out is None:
        dtype = request.sum_dtype
        sums = tuple([_native.empty(shape, dtype) for shape in shapes])
    else:
        sums = request.with_room(out)
        increment_version(sums)
    norms = _native.empty((batch,), torch.float64)
    tensors, bounds, p, style, _ = request
    grads = _contiguous(tensors)
    nonfinite = clip_rows(grads, sums, norms, bounds, p=p, style=style, fresh=out is None)
    made: ClipResult = request.result(sums, norms, nonfinite)
    return made


def prepare(
    grads: Sequence[Tensor],
    max_grad_norm: float | Sequence[float],
    p: int,
    style: str,
    arithmetic: str,
    unit: float | Sequence[float] | None,
    out: Sequence[Tensor] | None,
) -> Any:
    """Return the arguments of ``clip_rows`` that are not those of ``clip_sum``."""
    bounds = clip.bounds_of(len(grads), max_grad_norm, unit, p, style, arithmetic)
    if arithmetic == "exact":
        if out is None:
            return bounds.exact_dtype(len(grads[0])), None, bounds, True
        clip.check_out(grads, arithmetic, out)
        ClipRequest(tuple(grads), bounds, p, style, arithmetic).with_room(out)
    elif out is not None and out[0].dtype is not clip.sum_dtype(grads[0].dtype):
        return NotImplemented
    return out, None, bounds, out is None


def finish(
    prepared: tuple[Any, ...], sums: tuple[Tensor, ...], norms: Tensor, nonfinite: int
) -> ClipResult:
    """Return the result of ``clip_sum``."""
    bounds: ClipBound = prepared[2]
    return bounds.result(sums, norms, nonfinite)


def _contiguous(grads: Sequence[Tensor]) -> list[Tensor]:
    return [grad if grad.is_contiguous() else grad.contiguous() for grad in grads]


def _refuse(bound: BoundCall) -> str | None:
    if bound.device != CPU and bound.device.type != "cpu":
        return f"runs on the CPU, got a tensor on {bound.device}"
    return None


def _refuse_sample_norm(bound: BoundCall) -> str | None:
    _, _, scale, center = bound.args
    if scale is not None or center is not None:
        return "has no per-coordinate scale or centre"
    return _refuse(bound)


KERNELS = {
    "clip.sample_norm": Kernel(_sample_norm, _refuse_sample_norm),
    "clip.clip_sum": Kernel(_clip_sum, _refuse),
}
"""Kernels by the names of their ops."""
