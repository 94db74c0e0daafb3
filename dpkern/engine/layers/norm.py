"""Define the rules of layer, RMS, group, instance norm, and of batch norm with fixed statistics."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...base.errors import UnsupportedModule
from ...ops import direct, ghost
from ..parameter import (
    applied,
    arguments,
    differentiable_once,
    fresh,
    is_constant,
    is_private,
    plain,
    rule,
    source_of,
)
from ..per_sample_gradients import ExplicitGradients, to_sum_dtype
from ..uses import CapturedOp, GradientTarget
from .expression import slots_in, whole_target_of
from .other import other

Function = Callable[..., Any]


def _deliver(use: CapturedOp, shape: Sequence[int], *gradients: Tensor) -> None:
    """Capture the per-sample gradients of scale and shift, which are given by row ``[k B, D]``."""
    for which, gradient in enumerate(gradients):
        each = use.per_batch(gradient)
        total = each[:, 0] if each.shape[1] == 1 else each.sum(1)
        use.arrive(which, ExplicitGradients(total.reshape(total.shape[0], *shape)))


def _positions(x: Tensor, shape: Sequence[int]) -> tuple[int, int, int]:
    """Return the numbers of rows of ``x``, of positions, and of entries normalised together."""
    outer = x.shape[1 : x.dim() - len(shape)]
    return int(x.shape[0]), math.prod(outer), math.prod(shape)


class _LayerNorm(torch.autograd.Function):
    """Layer norm, with mean and variance over the last dimensions."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        use: CapturedOp,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.use = use
        ctx.set_materialize_grads(False)
        shape = use.saved["shape"]
        out, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, use.saved["eps"])
        ctx.save_for_backward(x, mean, rstd, weight)
        return fresh(out)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:
        use: CapturedOp = ctx.use
        if g is None:
            return (None,) * 5
        shape = use.saved["shape"]
        saved: tuple[Any, Any, Any, Any] = ctx.saved_tensors
        dx, dweight, dbias = layer_norm_gradients(*saved, g, shape)
        if use.wants(g):
            _deliver(use, shape, dweight, dbias)
        return None, None, dx, None, None


def layer_norm_gradients(
    x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, g: Tensor, shape: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the input's gradient, and those of scale and shift by row ``[k B, D]``."""
    rows, positions, size = _positions(x, shape)
    flat = to_sum_dtype(g).view(rows, positions, size), to_sum_dtype(x).view(rows, positions, size)
    scale = None if weight is None else to_sum_dtype(weight).view(size)
    statistics = to_sum_dtype(mean).view(rows, positions), to_sum_dtype(rstd).view(rows, positions)
    dx, dweight, dbias = ghost.layer_norm_backward(*flat, *statistics, scale)
    return dx.view(x.shape).to(x.dtype), dweight, dbias


class _RmsNorm(torch.autograd.Function):
    """RMS norm, with the root mean square over the last dimensions."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, use: CapturedOp, x: Tensor, weight: Tensor) -> Tensor:
        ctx.use = use
        ctx.set_materialize_grads(False)
        shape, eps = use.saved["shape"], use.saved["eps"]
        out = fresh(F.rms_norm(x, shape, weight, eps))
        with torch.autocast(x.device.type, enabled=False):
            ctx.save_for_backward(x, rms_norm_statistics(x, shape, eps), weight)
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:
        use: CapturedOp = ctx.use
        if g is None:
            return (None,) * 4
        shape = use.saved["shape"]
        saved: tuple[Any, Any, Any] = ctx.saved_tensors
        dx, dweight = rms_norm_gradients(*saved, g, shape)
        if use.wants(g):
            _deliver(use, shape, dweight)
        return None, None, dx, None


def rms_norm_statistics(x: Tensor, shape: Sequence[int], eps: float | None) -> Tensor:
    """One over the root mean square of what is normalised together."""
    square = to_sum_dtype(x).square().flatten(x.dim() - len(shape)).mean(-1)
    smallest = torch.finfo(x.dtype).eps if eps is None else eps
    return (square + smallest).rsqrt()


def rms_norm_gradients(
    x: Tensor, rstd: Tensor, weight: Tensor, g: Tensor, shape: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return the input's gradient, and that of the scale by row ``[k B, D]``."""
    rows, positions, size = _positions(x, shape)
    flat = to_sum_dtype(g).view(rows, positions, size), to_sum_dtype(x).view(rows, positions, size)
    statistics = rstd.view(rows, positions)
    dx, dweight = ghost.rms_norm_backward(*flat, statistics, to_sum_dtype(weight).view(size))
    return dx.view(x.shape).to(x.dtype), dweight


class _GroupNorm(torch.autograd.Function):
    """Group norm, with mean and variance over groups of channels; one channel for instance norm."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        use: CapturedOp,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.use = use
        ctx.set_materialize_grads(False)
        x = direct.contiguous(x)
        rows, channels = x.shape[:2]
        size, groups = math.prod(x.shape[2:]), use.saved["groups"]
        out, mean, rstd = torch.native_group_norm(
            x, weight, bias, rows, channels, size, groups, use.saved["eps"]
        )
        ctx.save_for_backward(x, mean, rstd, weight)
        return fresh(out)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:
        use: CapturedOp = ctx.use
        if g is None:
            return (None,) * 5
        saved: tuple[Any, Any, Any, Any] = ctx.saved_tensors
        x = saved[0]
        dx, dweight, dbias = group_norm_gradients(*saved, g)
        if use.wants(g):
            _deliver(use, x.shape[1:2], dweight, dbias)
        return None, None, dx, None, None


def group_norm_gradients(
    x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, g: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the input's gradient, and those of scale and shift by row ``[k B, C]``."""
    sizes = (*x.shape[:2], math.prod(x.shape[2:]))
    flat = to_sum_dtype(g).view(sizes), to_sum_dtype(x).view(sizes)
    scale = None if weight is None else to_sum_dtype(weight)
    dx, dweight, dbias = ghost.group_norm_backward(
        *flat, to_sum_dtype(mean), to_sum_dtype(rstd), scale
    )
    return dx.view(x.shape).to(x.dtype), dweight, dbias


def _use(
    operation: str, x: Tensor, parameters: Sequence[Tensor | None], **saved: Any
) -> tuple[Tensor, CapturedOp, list[Any]]:
    targets: list[GradientTarget | None] = []
    capture = None
    for tensor in parameters:
        targets.append(whole_target_of(tensor) if is_private(tensor) else None)
        capture = source_of(tensor).capture if is_private(tensor) else capture
    assert capture is not None
    use = capture.use(operation, targets, x, **saved)
    return capture.anchor, use, [plain(tensor) for tensor in parameters]


@rule(F.layer_norm, torch.layer_norm, leaf=True)
def _layer_norm(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    names = ("input", "normalized_shape", "weight", "bias", "eps")
    x, shape, weight, bias, eps = arguments(names, args, kwargs)
    shape = tuple(shape)
    if is_private(x) or not is_constant(weight, bias) or len(shape) >= x.dim():
        return other(func, args, kwargs)
    eps = 1e-5 if eps is None else eps
    anchor, use, plain_ones = _use("layer_norm", x, (weight, bias), shape=shape, eps=eps)
    return applied(_LayerNorm, anchor, use, x, *plain_ones)


@rule(F.rms_norm, torch.rms_norm, leaf=True)
def _rms_norm(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    names = ("input", "normalized_shape", "weight", "eps")
    x, shape, weight, eps = arguments(names, args, kwargs)
    shape = tuple(shape)
    if is_private(x) or weight is None or len(shape) >= x.dim():
        return other(func, args, kwargs)
    anchor, use, plain_ones = _use("rms_norm", x, (weight,), shape=shape, eps=eps)
    return applied(_RmsNorm, anchor, use, x, *plain_ones)


@rule(F.group_norm, torch.group_norm, leaf=True)
def _group_norm(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    names = ("input", "num_groups", "weight", "bias", "eps")
    x, groups, weight, bias, eps = arguments(names, args, kwargs)
    if is_private(x) or not is_constant(weight, bias) or x.dim() < 2:
        return other(func, args, kwargs)
    eps = 1e-5 if eps is None else eps
    anchor, use, plain_ones = _use("group_norm", x, (weight, bias), groups=groups, eps=eps)
    return applied(_GroupNorm, anchor, use, x, *plain_ones)


@rule(F.instance_norm, leaf=True)
def _instance_norm(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    names = ["input", "running_mean", "running_var", "weight", "bias", "use_input_stats"]
    names += ["momentum", "eps"]
    x, mean, _, weight, bias, from_input, _, eps = arguments(names, args, kwargs)
    if is_private(x) or not is_constant(weight, bias):
        return other(func, args, kwargs)
    if mean is not None:
        raise _refused(func, args, kwargs, "running statistics, which absorb data")
    del from_input  # without running statistics the input's own are the only ones
    eps = 1e-5 if eps is None else eps
    channels = int(x.shape[1])
    anchor, use, plain_ones = _use("instance_norm", x, (weight, bias), groups=channels, eps=eps)
    return applied(_GroupNorm, anchor, use, x, *plain_ones)


@rule(F.batch_norm, torch.batch_norm)
def _batch_norm(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Scale and shift each channel, as a batch norm with fixed statistics does."""
    middle = ["running_mean", "running_var", "weight", "bias"]
    if func is torch.batch_norm:
        middle = ["weight", "bias", "running_mean", "running_var"]
    names = ["input", *middle, "training", "momentum", "eps"]
    given = dict(zip(names, arguments(names, args, kwargs), strict=True))
    if is_private(given["input"]):
        return other(func, args, kwargs)  # weights are standardised, not samples
    if given["training"] or given["running_mean"] is None:
        raise _refused(func, args, kwargs, "statistics of the batch, which mix its samples")
    x, weight, bias = given["input"], given["weight"], given["bias"]
    eps = 1e-5 if given["eps"] is None else given["eps"]
    per_channel = (1, -1, *(1,) * (x.dim() - 2))
    rstd = (given["running_var"] + eps).rsqrt().reshape(per_channel)
    out = (x - given["running_mean"].reshape(per_channel)) * rstd
    if weight is not None:
        out = out * weight.reshape(per_channel)
    return out if bias is None else out + bias.reshape(per_channel)


def _refused(
    func: Function, args: Sequence[Any], kwargs: dict[str, Any], got: str
) -> UnsupportedModule:
    names = ", ".join(slot.name for slot in slots_in((args, kwargs)))
    return UnsupportedModule(
        f"{names} in {func.__name__}",
        expected="a normalisation within each sample",
        got=got,
        remedy="Use GroupNorm: dpkern.fix(model) makes the replacement.",
    )
