"""Define the rules of elementwise scale and shift, and of copies of a parameter per sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..parameter import (
    arguments,
    is_private,
    plain,
    refuse,
    rule,
    source_of,
    without_torch_function,
)
from .expression import Expression, is_buffer, looks_like_samples, of, slots_in, with_samples
from .generic import expand
from .other import other

Function = Callable[..., Any]

_BINARY = [
    *(torch.add, torch.sub, torch.mul, torch.div, torch.true_divide, torch.maximum, torch.minimum),
    *(Tensor.add, Tensor.sub, Tensor.mul, Tensor.div, Tensor.true_divide, torch.rsub),
    *(Tensor.__add__, Tensor.__sub__, Tensor.__mul__, Tensor.__truediv__, Tensor.__rtruediv__),
    *(Tensor.__radd__, Tensor.__rsub__, Tensor.__rmul__, Tensor.pow, torch.pow, Tensor.__pow__),
    *(Tensor.__iadd__, Tensor.__imul__, Tensor.__isub__, Tensor.__itruediv__),
    *(Tensor.add_, Tensor.mul_, Tensor.sub_, Tensor.div_),
]


@rule(*_BINARY)
def _binary(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if len(args) != 2 or "out" in kwargs or not all(isinstance(a, Tensor) for a in args):
        return other(func, args, kwargs)
    private = [a for a in args if is_private(a)]
    if len(private) == 2:
        return other(func, args, kwargs)
    (x,) = (a for a in args if not is_private(a))
    (w,) = private
    capture = source_of(w).capture
    with without_torch_function():
        shape, dims = tuple(w.shape), w.dim()
    rows = int(x.shape[0]) if x.dim() else 0
    broadcast = x.dim() > dims or (x.dim() == dims and shape[:1] == (1,))
    if not _is_data(x, w, capture.batch):
        result = other(func, args, kwargs)
        many = rows > 1 and capture.batch is not None and rows % max(1, capture.batch) == 0
        if broadcast and many and is_private(result) and result is not w:
            source = source_of(result)
            assert isinstance(source, Expression)
            # Constants for every window of every sample, perhaps.
            source.for_samples = lambda: _on_copies(func, args, kwargs, w, rows)
        return result
    batch = capture.require_batch("elementwise", ())
    if broadcast and capture.are_gathered(x):
        return _on_copies(func, args, kwargs, w, rows, x)
    fits = x.dim() > 0 and broadcast and (rows % batch == 0 if batch else rows == 0)
    if not fits:
        apart = with_samples((tuple(args), kwargs))
        if apart is not None:
            return func(*apart[0], **apart[1])
        raise refuse(
            func,
            slots_in(args),
            got=f"data of shape {list(x.shape)} and a parameter of shape {list(shape)}",
            remedy="Keep the batch first. A term that belongs to no sample (a penalty on the "
            "weights) goes into engine.public() or weight_decay.",
        )
    return _on_copies(func, args, kwargs, w, rows)


def _on_copies(
    func: Function,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    w: Tensor,
    rows: int,
    gathered: Tensor | None = None,
) -> Any:
    """Run the operation on a copy of ``w`` for each row of the other operand."""
    dims = next(a.dim() for a in args if a is not w)
    name = getattr(func, "__name__", "elementwise").strip("_")
    copies = _copies(w, rows, dims, name, gathered)
    return func(*(copies if a is w else a for a in args), **kwargs)


def _copies(
    w: Tensor, rows: int, dims: int, operation: str, gathered: Tensor | None = None
) -> Tensor:
    """Return ``[rows, ...]`` of ``dims`` dimensions, of a ``w`` that is broadcast over the rows."""
    with without_torch_function():
        shape = tuple(w.shape)
    copies = expand(w, rows, operation, gathered)
    if dims > len(shape):
        return copies.reshape(rows, *(1,) * (dims - len(shape) - 1), *shape)
    return copies.reshape(rows, *shape[1:])


def _is_data(x: Tensor, w: Tensor, batch: int | None) -> bool:
    if looks_like_samples(x, (w,), batch):
        return True
    # Inputs that need no gradient, several rows per sample.
    with without_torch_function():
        dims = w.dim()
    rows = bool(x.dim() > dims and batch and x.shape[0] % batch == 0)
    return rows and not is_buffer(x, w)


@rule(Tensor.expand, Tensor.expand_as, torch.broadcast_to, Tensor.broadcast_to)
def _expand(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Expand ``w`` to a copy per sample, if the first dimension of the result is the batch."""
    w = args[0]
    if not is_private(w):
        return func(*plain(tuple(args)), **plain(kwargs))  # only the shape of the other is used
    with without_torch_function():
        result = func(*plain(tuple(args)), **plain(kwargs))
        shape = tuple(w.shape)
    added = result.dim() > len(shape)
    grown = result.dim() == len(shape) and len(shape) > 0 and shape[0] == 1
    batch = source_of(w).capture.batch
    if batch is None or not (added or grown):
        return other(func, args, kwargs)
    rows = int(result.shape[0])
    if rows == 0 or batch == 0 or rows % batch:
        return other(func, args, kwargs)
    copies = expand(w, rows, "expand")
    if added:
        copies = copies.reshape(rows, *(1,) * (result.dim() - len(shape) - 1), *shape)
    else:
        copies = copies.reshape(rows, *shape[1:])
    return copies.expand(result.shape)


@rule(Tensor.repeat)
def _repeat(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Repeat ``w`` along new first dimensions, or along a first dimension of size 1."""
    w, *sizes = args
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list, torch.Size)):
        sizes = list(sizes[0])
    with without_torch_function():
        shape = tuple(w.shape)
    front = len(sizes) - len(shape)
    if not kwargs and front == 0 and shape and sizes[0] == source_of(w).capture.batch:
        return _repeated_first(w, shape, sizes)
    if kwargs or front < 0 or (front == 0 and (not shape or shape[0] != 1)):
        return other(func, args, kwargs)
    spread = w.expand(*sizes[: max(1, front)], *shape[0 if front else 1 :])
    if is_private(spread):
        return other(func, args, kwargs)
    return spread.repeat(*(1,) * max(1, front), *sizes[max(1, front) :])


def _repeated_first(w: Tensor, shape: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Repeat ``w`` along its first dimension as often as there are samples.

    Only its use tells whether that means them: rows of heads by sample, say.
    """
    with without_torch_function():
        result = w.repeat(*sizes)
    repeated: Tensor = of(Tensor.repeat, (w,), {}, result)
    source = source_of(repeated)
    assert isinstance(source, Expression)

    def for_samples() -> Tensor:
        copies = expand(w, sizes[0], "repeat")
        return copies.repeat(1, 1, *sizes[1:]).flatten(0, 1) if shape else copies

    source.for_samples = for_samples
    return repeated


@rule(F.scaled_dot_product_attention)
def _attention(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Give each sample its copy of a trained bias, which is added to the scores."""
    names = ("query", "key", "value", "attn_mask")
    query, key, value, bias = arguments(names, args, kwargs)
    if not is_private(bias) or any(is_private(t) for t in (query, key, value)):
        return other(func, args, kwargs)
    apart = with_samples((bias,))
    rows = int(query.shape[0])
    with without_torch_function():
        shape = tuple(bias.shape)
    if apart is not None and shape[0] == rows:
        (bias,) = apart
    elif len(shape) < query.dim() or shape[0] == 1:
        bias = _copies(bias, rows, query.dim(), "scaled_dot_product_attention")
    else:
        return other(func, args, kwargs)
    return func(query, key, value, bias, *args[4:], **_without(kwargs, names))


def _without(kwargs: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name not in names}


@rule(torch.tile, Tensor.tile)
def _tile(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    w, *sizes = args
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list, torch.Size)):
        sizes = list(sizes[0])
    if kwargs:
        return other(func, args, kwargs)
    with without_torch_function():
        missing = w.dim() - len(sizes)
    return w.repeat(*(1,) * missing, *sizes)


@rule(F.prelu, torch.prelu, Tensor.prelu)
def _prelu(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    x, weight = arguments(("input", "weight"), args, kwargs)
    if is_private(x):
        return other(func, args, kwargs)
    with without_torch_function():
        single = weight.numel() == 1
    shape = (1,) * x.dim() if single else (1, -1, *(1,) * (x.dim() - 2))
    return torch.where(x > 0, x, weight.reshape(shape) * x)


@rule(Tensor.backward)
def _backward(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    raise refuse(
        func,
        slots_in((args, kwargs)),
        got="a loss made of parameters alone",
        remedy="Run passes that touch no private data under engine.public().",
    )
