"""Clip explicit per-sample gradients by the compiled kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ...base.codes import Style
from ...base.dispatch import Kernel
from ...base.schema import BoundCall
from ...base.signature import Double, Gradient, Summed, any_number, filled
from .._clip_request import ClipBounds as ClipBound
from ..clip import ClipResult, Power
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
    nonfinite = clip_rows.direct(tensors, sums, norms, bounds, p=p, style=style, fresh=out is None)
    if nonfinite is NotImplemented:
        grads = _contiguous(tensors)
        nonfinite = clip_rows(grads, sums, norms, bounds, p=p, style=style, fresh=out is None)
    made: ClipResult = request.result(sums, norms, nonfinite)
    return made


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
