"""Define the rule of block-circulant products, ``nn.functional.circulant_product``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...nn.functional import circulant_product
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
from ..per_sample_gradients import CirculantGradients
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
    def forward(ctx: Any, anchor: Tensor, use: CapturedOp, x: Tensor, weight: Tensor) -> Tensor:
        ctx.use = use
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        return fresh(circulant_product(x, weight, use.saved["convention"]))

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        use: CapturedOp = ctx.use
        convention = use.saved["convention"]
        if use.wants(g):
            assert g is not None
            _arrive(use, x, g, convention)
        gx = None
        if g is not None and ctx.needs_input_grad[2] and use.passes_on:
            # A circulant block's transpose has the same numbers in the other convention.
            turned = weight.to(g.dtype).transpose(0, 1)
            gx = circulant_product(g, turned, _OTHER[convention]).to(x.dtype)
        return None, None, gx, None


def _arrive(use: CapturedOp, x: Tensor, g: Tensor, convention: str) -> None:
    with without_torch_function():
        pair = (use.per_batch(t).flatten(1, -3) for t in (x, g))
        if convention == "column":
            # Read backwards, a convolution is a correlation: same gradient, row convention.
            pair = (t.flip(-1).roll(1, -1) for t in pair)
        use.arrive(0, CirculantGradients(*pair))


@rule(circulant_product, leaf=True)
def _product(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    x, weight, convention = arguments(("x", "weight", "convention"), args, kwargs)
    if is_private(x) or not is_constant(weight) or x.dim() < 3 or weight.dim() != 3:
        return other(func, args, kwargs)
    capture = source_of(weight).capture
    targets = [whole_target_of(weight)]
    use = capture.use("circulant", targets, x, convention=convention or "row")
    result: Tensor = applied(_Circulant, capture.anchor, use, x, plain(weight))
    return result
