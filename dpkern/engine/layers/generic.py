"""Run operations without a rule once per sample, each on its own copy of the parameter.

The parameter is expanded to ``[B, *shape]`` (a view, no copy) and the operation runs under
``torch.vmap``, every sample as a batch of one. Autograd's gradient of the expanded parameter is
then the per-sample gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...ops.clip import sum_dtype
from ..parameter import applied, differentiable_once, is_private, refuse, source_of, tensors_in
from ..per_sample_gradients import ExplicitGradients
from ..uses import CapturedOp
from .expression import (
    check_size,
    looks_like_samples,
    slots_in,
    values,
    whole_target_of,
    with_samples,
)


class _Expand(torch.autograd.Function):
    """Map ``w [*shape] -> [rows, *shape]``, which captures its gradient's rows per sample."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, use: CapturedOp, w: Tensor, rows: int) -> Tensor:
        ctx.use = use
        ctx.set_materialize_grads(False)
        return w.expand(rows, *w.shape)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, g: Tensor | None) -> tuple[None, ...]:
        use: CapturedOp = ctx.use
        if use.wants(g):
            assert g is not None
            each = use.per_batch(g)
            grads = each[:, 0] if each.shape[1] == 1 else each.sum(1, dtype=sum_dtype(g.dtype))
            use.arrive(0, ExplicitGradients(grads))
        return None, None, None, None


def expand(private: Tensor, rows: int, operation: str, gathered: Tensor | None = None) -> Tensor:
    """Expand a parameter to ``[rows, *shape]``, whose gradient is captured per sample.

    Args:
        private: the parameter.
        rows: a multiple of the number of samples, in their order.
        operation: what the copies are for.
        gathered: ``[rows, ...]``, an operand whose rows were gathered from samples, as these are.
    """
    target = whole_target_of(private)
    w = values(private)
    capture = source_of(private).capture
    operand = w.new_empty(()).expand(rows) if gathered is None else gathered
    use = capture.use(operation, (target,), operand)
    result: Tensor = applied(_Expand, capture.anchor, use, w, rows)
    return result


def per_sample(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], result: Any
) -> Any:
    """Run ``func`` once per sample; ``result`` is the result of the ordinary call.

    Raises:
        UnsupportedModule: arguments or results without a batch dimension.
    """
    apart = with_samples((tuple(args), kwargs))
    if apart is not None:
        return func(*apart[0], **apart[1])
    slots = slots_in((args, kwargs))
    operation = getattr(func, "__name__", str(func))
    remedy = (
        "Write it with operations on inputs whose first dimension is the batch; terms that belong "
        "to no sample (a penalty on the weights) go into engine.public() or weight_decay."
    )
    shapes = [tuple(t.shape) for t in tensors_in(result)]
    if not isinstance(result, Tensor):
        raise refuse(func, slots, got=f"results {shapes}", remedy=remedy)
    batch = slots[0].capture.require_batch(operation, [whole_target_of(t) for t in _privates(args)])
    flat: list[Tensor] = []
    skeleton = _flatten((list(args), kwargs), flat)
    private = [t for t in flat if is_private(t)]
    operands: list[Tensor] = []
    dims: list[int | None] = []
    for tensor in flat:
        if is_private(tensor):
            check_size(source_of(tensor), batch * tensor.numel())
            operands.append(expand(tensor, batch, operation))
            dims.append(0)
        elif looks_like_samples(tensor, private, batch):
            if tensor.dim() == 0 or tensor.shape[0] != batch:
                raise refuse(func, slots, got=f"data of shape {list(tensor.shape)}", remedy=remedy)
            operands.append(tensor[:, None])
            dims.append(0)
        else:
            operands.append(tensor)
            dims.append(None)
    if result.dim() == 0 or result.shape[0] != batch:
        raise refuse(func, slots, got=f"a result of shape {list(result.shape)}", remedy=remedy)
    if batch == 0:
        return result.detach() + 0 * slots[0].capture.anchor

    def one(*tensors: Tensor) -> Tensor:
        positional, named = _rebuild(skeleton, list(tensors))
        out: Tensor = func(*positional, **named)
        return out

    try:
        each: Tensor = torch.vmap(one, in_dims=tuple(dims), randomness="different")(*operands)
    except (RuntimeError, ValueError, IndexError) as error:
        raise refuse(func, slots, got=f"for one sample alone: {error}", remedy=remedy) from error
    if tuple(each.shape) != (batch, 1, *result.shape[1:]):
        raise refuse(func, slots, got=f"a result of shape {list(each.shape)}", remedy=remedy)
    return each[:, 0]


def _privates(tree: Any) -> list[Tensor]:
    return [t for t in tensors_in(tree) if is_private(t)]


def _flatten(tree: Any, flat: list[Tensor]) -> Any:
    """Replace every tensor by its place in ``flat``."""
    if isinstance(tree, Tensor):
        flat.append(tree)
        return _Place(len(flat) - 1)
    if isinstance(tree, (tuple, list)):
        items = [_flatten(item, flat) for item in tree]
        return tuple(items) if isinstance(tree, tuple) else items
    if isinstance(tree, dict):
        return {key: _flatten(value, flat) for key, value in tree.items()}
    return tree


def _rebuild(tree: Any, flat: list[Tensor]) -> Any:
    if isinstance(tree, _Place):
        return flat[tree.index]
    if isinstance(tree, (tuple, list)):
        items = [_rebuild(item, flat) for item in tree]
        return tuple(items) if isinstance(tree, tuple) else items
    if isinstance(tree, dict):
        return {key: _rebuild(value, flat) for key, value in tree.items()}
    return tree


class _Place:
    def __init__(self, index: int) -> None:
        self.index = index
