"""Run operations without a rule of their own, on parameters alone or on each sample by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..parameter import (
    ANY,
    Function,
    PrivateParameter,
    is_private,
    refuse,
    rule,
    source_of,
    tensors_in,
    without_torch_function,
)
from . import expression, generic


@rule(ANY)
def other(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operation without a rule of its own."""
    if _writes(func) and args and isinstance(args[0], Tensor):
        return _written(func, args, kwargs)
    with without_torch_function():
        result = func(*args, **kwargs)
    if not any(t.requires_grad for t in tensors_in(result)):
        return result
    if expression.is_of_parameters_alone(args, kwargs):
        return expression.of(func, args, kwargs, result)
    return generic.per_sample(func, args, kwargs, result)


def _writes(func: Function) -> bool:
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in ("__setitem__", "__iadd__", "__isub__", "__imul__", "__ipow__")


def _written(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Write parameters into a constant, which becomes an expression, or change an expression.

    Raises:
        UnsupportedModule: samples are among the operands, or a use has seen the tensor before.
    """
    into = args[0]
    slots = expression.slots_in((args, kwargs))
    if not is_private(into) and not _is_constant(into, args, kwargs):
        raise refuse(
            func,
            slots,
            got="data that the parameter is written into",
            remedy="Make a new tensor instead, for example with torch.where(mask, parameter, x).",
        )
    if _has_samples(args, kwargs):
        raise refuse(
            func,
            slots,
            got="data that are written into a tensor of parameters",
            remedy="Make a new tensor instead, for example with torch.where(mask, x, parameter).",
        )
    place = into.untyped_storage().data_ptr()
    for known in slots[0].capture.expressions:
        if not isinstance(known, expression.Expression) or not known.uses:
            continue
        if known.tensor.untyped_storage().data_ptr() == place:
            raise refuse(
                func,
                slots,
                got="a change in place of a tensor of parameters that was used before",
                remedy="Make a new tensor instead.",
            )
    with without_torch_function():
        func(*args, **kwargs)
        if type(into) is PrivateParameter:
            return into  # torch lets nothing write here: it was ``requires_grad_`` or the like
        same = into.view_as(into)  # no longer changed by what is written into it
    if not into.requires_grad:
        return into
    made = expression.of(func, (args, kwargs), {}, same)
    source = source_of(made)
    assert isinstance(source, expression.Expression)
    source.for_samples = None  # it cannot be written again
    into.__class__ = type(made)
    into._private = source_of(made)
    return into


def _is_constant(into: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a tensor that is written into holds neither samples nor state of the module."""
    private = [t for t in tensors_in((args, kwargs)) if is_private(t)]
    capture = source_of(private[0]).capture
    if into.requires_grad or into._is_view() or capture.passes.given(into):
        return False
    if expression.is_buffer(into, private[0]):
        return False
    return not bool(into.any()) or not expression.looks_like_samples(into, private, capture.batch)


def _has_samples(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether samples are among what is written into the first argument."""
    private = [t for t in tensors_in((args, kwargs)) if is_private(t)]
    batch = source_of(private[0]).capture.batch
    written = [t for t in tensors_in((args[1:], kwargs)) if not is_private(t)]
    return any(expression.looks_like_samples(t, private, batch) for t in written)
