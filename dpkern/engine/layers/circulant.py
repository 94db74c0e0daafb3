"""Define the rule of block-circulant products, ``nn.functional.circulant_product``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...nn.functional import circulant_product
from ...ops.clip import sum_dtype
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
    without_torch_function,
)
from ..per_sample_gradients import CirculantGradients, ExplicitGradients
from ..uses import CapturedOp
from .expression import whole_target_of
from .other import other

Function = Callable[..., Any]

_OTHER = {"row": "column", "column": "row"}


class _Circulant(torch.autograd.Function):
    """Block-circulant map ``x [k B, ..., q, d] -> [k B, ..., p, d]``.

    ``use.saved`` holds the convention.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, use: CapturedOp, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.use = use
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        return fresh(circulant_product(x, weight, use.saved["convention"], bias))

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        use: CapturedOp = ctx.use
        if use.wants(g):
            assert g is not None
            arrive(use, x, g)
        gx = None
        if g is not None and ctx.needs_input_grad[2] and use.passes_on:
            gx = input_gradient(g, weight, use.saved["convention"]).to(x.dtype)
        return None, None, gx, None, None


def input_gradient(g: Tensor, weight: Tensor, convention: str) -> Tensor:
    """Return the gradient by the input, of the dtype of ``g``."""
    # A circulant block's transpose has the same numbers in the other convention.
    turned = weight.to(g.dtype).transpose(0, 1)
    return circulant_product(g, turned, _OTHER[convention])


def gradients_of(x: Tensor, g: Tensor, convention: str) -> CirculantGradients:
    """Return per-sample gradients from operands ``[B, T, blocks, d]``."""
    if convention == "column":
        # Read backwards, a convolution is a correlation: same gradient, row convention.
        x, g = (t.flip(-1).roll(1, -1) for t in (x, g))
    return CirculantGradients(x, g)


def arrive(use: CapturedOp, x: Tensor, g: Tensor) -> None:
    """Pass the gradients of weight and bias to their targets."""
    with without_torch_function():
        x, g = (use.per_batch(t).flatten(1, -3) for t in (x, g))
        if use.targets[0] is not None:
            use.arrive(0, gradients_of(x, g, use.saved["convention"]))
        if use.targets[1] is not None:
            each = g.flatten(2)
            rows = each[:, 0] if each.shape[1] == 1 else each.sum(1, dtype=sum_dtype(g.dtype))
            use.arrive(1, ExplicitGradients(rows))


@rule(circulant_product, leaf=True)
def _product(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    names = ("x", "weight", "convention", "bias")
    x, weight, convention, bias = arguments(names, args, kwargs)
    convention = convention or "row"
    if bias is not None and not is_private(weight):
        product = func(x, weight, convention)  # the sum has a rule of its own
        return (product.flatten(-2) + bias).view(product.shape)
    if is_private(x) or not is_constant(weight, bias) or x.dim() < 3 or weight.dim() != 3:
        return other(func, args, kwargs)
    capture = source_of(weight).capture
    targets = [whole_target_of(t) if is_private(t) else None for t in (weight, bias)]
    use = capture.use("circulant", targets, x, convention=convention)
    result: Tensor = applied(_Circulant, capture.anchor, use, x, plain(weight), plain(bias))
    return result
