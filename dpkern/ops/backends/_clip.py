"""Clipping of explicit per-sample gradients by the compiled kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ...base.codes import Style
from ...base.dispatch import Kernel
from ...base.schema import Bound
from ...base.signature import Double, Gradient, Summed, any_number, filled
from .._clip_request import ClipBounds as ClipBound
from ..clip import ClipResult, Power
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
    """Norm of each sample, and the sums of the clipped samples if there are sums.

    Args:
        fresh: sums begin at zero, whatever they hold.

    Returns:
        How many samples are not finite; they add nothing to the sums.
    """


def _sample_norm(bound: Bound) -> Tensor:
    grads, p, *_ = bound.args
    norms = torch.empty(bound.sizes[0], dtype=torch.float64)
    clip_rows.run(
        (_contiguous(grads), (), norms, None, p, "flat", False),
        bound.sizes,
        bound.kind,
        bound.device,
    )
    return norms


def _clip_sum(bound: Bound) -> ClipResult:
    request, out = bound.plan, bound.args[-1]
    batch, shapes = bound.sizes
    if out is None:
        dtype = request.sum_dtype
        sums = tuple([torch.empty(shape, dtype=dtype) for shape in shapes])
    else:
        sums = request.with_room(out)
        increment_version(sums)
    norms = torch.empty(batch, dtype=torch.float64)
    grads = _contiguous(request.tensors)
    nonfinite = clip_rows.run(
        (grads, sums, norms, request.bounds, request.p, request.style, out is None),
        bound.sizes,
        bound.kind,
        bound.device,
    )
    made: ClipResult = request.result(sums, norms, nonfinite)
    return made


def _contiguous(grads: Sequence[Tensor]) -> list[Tensor]:
    return [grad if grad.is_contiguous() else grad.contiguous() for grad in grads]


def _refuse(bound: Bound) -> str | None:
    if bound.device != CPU and bound.device.type != "cpu":
        return f"runs on the CPU, got a tensor on {bound.device}"
    return None


def _refuse_sample_norm(bound: Bound) -> str | None:
    _, _, scale, center = bound.args
    if scale is not None or center is not None:
        return "has no per-coordinate scale or centre"
    return _refuse(bound)


KERNELS = {
    "clip.sample_norm": Kernel(_sample_norm, _refuse_sample_norm),
    "clip.clip_sum": Kernel(_clip_sum, _refuse),
}
"""By the names of their ops."""
