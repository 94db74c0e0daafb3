"""Define the rules of ``y = x W^T + b``: F.linear, matmul and addmm."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops import direct, product
from ...ops.clip import sum_dtype
from ..parameter import (
    applied,
    arguments,
    differentiable_once,
    fresh,
    in_product,
    is_constant,
    is_private,
    plain,
    refuse,
    rule,
    source_of,
    without_torch_function,
)
from ..per_sample_gradients import ExplicitGradients, LinearGradients
from ..row_owners import by_sample
from ..uses import CapturedOp, GradientTarget
from .expression import check_size, is_constant_operand, slots_in, target_of, whole_target_of
from .other import other

Function = Callable[..., Any]


class _Linear(torch.autograd.Function):
    """Linear map ``x [k B, ..., d] -> [k B, ..., p]``."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, use: CapturedOp, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.use = use
        ctx.set_materialize_grads(False)
        ctx.dtype, x = x.dtype, in_product(x)
        ctx.save_for_backward(x, weight)
        return fresh(_product(x, weight.t(), bias))

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        use: CapturedOp = ctx.use
        if use.wants(g):
            assert g is not None
            _arrive(use, x, g)
        gx = None
        if g is not None and ctx.needs_input_grad[2] and use.passes_on:
            gx = _product(g, weight.to(g.dtype)).to(ctx.dtype)
        return None, None, gx, None, None


def _product(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x w + bias`` over the last dimension of ``x``."""
    if torch.is_autocast_enabled(x.device.type) or not product.fits(x, w, bias):
        return F.linear(x, w.t(), bias)
    rows = math.prod(x.shape[:-1])
    return product.matmul(x.view(rows, x.shape[-1]), w, bias).view(*x.shape[:-1], w.shape[1])


def _arrive(use: CapturedOp, x: Tensor, g: Tensor) -> None:
    weight, bias = use.targets
    with without_torch_function():
        a = use.per_batch(x).flatten(1, -2) if x.dim() > 1 else x
        out = use.per_batch(g).flatten(1, -2)
        if weight is not None:
            pair = (out, a) if weight.transposed else (a, out)
            use.arrive(0, LinearGradients(*pair, rounds_operands(*pair)))
        if bias is not None:
            use.arrive(1, ExplicitGradients(_sum_positions(out)))


def rounds_operands(a: Tensor, g: Tensor) -> bool:
    """Whether exact sums of these gradients are made of operands rounded to integers."""
    return a.is_cpu and direct.rounds_operands(a.shape[1], a.shape[2], g.shape[2])


def _sum_positions(g: Tensor) -> Tensor:
    if g.shape[1] == 1:
        return g[:, 0]
    own = direct.sum_positions(g)
    return g.sum(1, dtype=sum_dtype(g.dtype)) if own is None else own


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, operation: str) -> Tensor:
    """Run ``F.linear`` with private weight or bias (or both)."""
    targets: list[GradientTarget | None] = [None, None]
    capture = None
    if is_private(weight):
        targets[0], capture = target_of(weight), source_of(weight).capture
    if is_private(bias):
        targets[1], capture = whole_target_of(bias), source_of(bias).capture
    assert capture is not None
    use = capture.use(operation, targets, x)
    result: Tensor = applied(_Linear, capture.anchor, use, x, plain(weight), plain(bias))
    return result


@rule(F.linear, leaf=True)
def _linear(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    x, weight, bias = arguments(("input", "weight", "bias"), args, kwargs)
    private = weight if is_private(weight) else bias
    if is_private(x) or not is_constant(weight, bias) or x.dim() < 2 or weight.dim() != 2:
        return other(func, args, kwargs)
    if is_constant_operand(x, private):
        return other(func, args, kwargs)
    return linear(x, weight, bias, operation="linear")


@rule(
    torch.matmul,
    torch.mm,
    torch.mv,
    Tensor.matmul,
    Tensor.mm,
    Tensor.mv,
    Tensor.__matmul__,
    Tensor.__rmatmul__,
)
def _matmul(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if len(args) != 2 or kwargs:
        return other(func, args, kwargs)
    x, w = (args[1], args[0]) if func is Tensor.__rmatmul__ else args
    constant = [is_constant_operand(t, w if t is x else x) for t in (x, w) if not is_private(t)]
    if any(constant):
        return other(func, args, kwargs)
    if not is_private(x) and w.dim() in (1, 2) and x.dim() >= 2:
        if w.dim() == 1:
            return _transposed(x, w[:, None]).squeeze(-1)
        return _transposed(x, w)
    if not is_private(w) and x.dim() == 2 and w.dim() >= 3:
        return linear(w.transpose(-1, -2), x, operation="matmul").transpose(-1, -2)
    return other(func, args, kwargs)


def _transposed(x: Tensor, w: Tensor) -> Tensor:
    """Return ``x W`` for a private ``w [d, p]``."""
    return linear(x, w.t(), operation="matmul")


@rule(F.bilinear, torch.bilinear)
def _bilinear(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Compute ``y_o = x1^T W_o x2``, which is linear in the outer product of the inputs."""
    x1, x2, weight, bias = arguments(("input1", "input2", "weight", "bias"), args, kwargs)
    if is_private(x1) or is_private(x2):
        return other(func, args, kwargs)
    products = (x1[..., :, None] * x2[..., None, :]).flatten(-2)
    return F.linear(products, weight.flatten(1), bias)


@rule(torch.addmm, Tensor.addmm)
def _addmm(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
    if len(args) == 3 and beta == alpha == 1 and "out" not in kwargs:
        bias, x, w = args
        if not is_private(x) and is_constant(w, bias) and bias.dim() == 1:
            return linear(x, w.t(), bias, operation="addmm")
    return other(func, args, kwargs)


class _Grouped(torch.autograd.Function):
    """Rows ``x [N, d]`` times the weight of their expert, ``weight [E, d, p]``."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, use: CapturedOp, x: Tensor, weight: Tensor, ends: Tensor
    ) -> Tensor:
        ctx.use = use
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, ends)
        with torch.autocast(x.device.type, enabled=False):  # which leaves grouped products alone
            made = [r @ w for r, w in zip(_split(x, ends), weight, strict=True)]
        return fresh(torch.cat(made))

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, ends = ctx.saved_tensors
        use: CapturedOp = ctx.use
        if g is None:
            return (None,) * 5
        if use.wants(g):
            use.arrive(0, ExplicitGradients(_of_experts(use, x, g, ends)))
        gx = torch.cat([r @ w.t() for r, w in zip(_split(g, ends), weight, strict=True)])
        return None, None, gx, None, None


def _split(rows: Tensor, ends: Tensor) -> tuple[Tensor, ...]:
    """Return the rows of each expert."""
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return torch.split(rows, sizes)


def _of_experts(use: CapturedOp, x: Tensor, g: Tensor, ends: Tensor) -> Tensor:
    """Return each sample's gradients of all experts' weights, ``[B, E, d, p]``."""
    samples = torch.arange(len(x), device=x.device) // max(1, len(x) // max(1, use.batch))
    owners = samples if use.owners is None else use.owners.to(x.device)
    wide = sum_dtype(x.dtype)
    parts = zip(
        _split(x.to(wide), ends), _split(g.to(wide), ends), _split(owners, ends), strict=True
    )
    each = [
        by_sample(a, of, use.batch, use.filled).transpose(1, 2)
        @ by_sample(b, of, use.batch, use.filled)
        for a, b, of in parts
    ]
    return torch.stack(each, dim=1)


@rule(*(f for f in (getattr(F, "grouped_mm", None), getattr(torch, "_grouped_mm", None)) if f))
def _grouped(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Compute the experts of a mixture, each on the rows that were sorted to it."""
    names = ("mat_a", "mat_b", "offs", "bias", "out_dtype")
    x, weight, ends, bias, dtype = arguments(names, args, kwargs)
    whole = not is_private(x) and x.dim() == 2 and weight.dim() == 3
    if not whole or ends is None or bias is not None or dtype is not None:
        return other(func, args, kwargs)
    if int(ends[-1]) != len(x):
        raise refuse(
            func,
            slots_in((args, kwargs)),
            got="rows that belong to no expert",
            remedy="Leave rows without an expert out.",
        )
    capture = source_of(weight).capture
    check_size(source_of(weight), (capture.batch or 0) * weight.numel())
    use = capture.use("grouped_mm", (whole_target_of(weight),), x)
    return applied(_Grouped, capture.anchor, use, x, plain(weight), ends)
