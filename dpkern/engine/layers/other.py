"""Run operations without a rule of their own, on parameters alone or on each sample by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..parameter import ANY, PRIVATE, Function, refuse, rule, tensors_in, without_torch_function
from . import expression, generic


@rule(ANY)
def other(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operation without a rule of its own."""
    if _writes_into_data(func, args):
        raise refuse(
            func,
            expression.slots_in((args, kwargs)),
            got="data that the parameter is written into",
            remedy="Make a new tensor instead, for example with torch.where(mask, parameter, x).",
        )
    with without_torch_function():
        result = func(*args, **kwargs)
    if not any(t.requires_grad for t in tensors_in(result)):
        return result
    if expression.is_of_parameters_alone(args, kwargs):
        return expression.of(func, args, kwargs, result)
    return generic.per_sample(func, args, kwargs, result)


def _writes_into_data(func: Function, args: Sequence[Any]) -> bool:
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    in_place = in_place or name in ("__setitem__", "__iadd__", "__isub__", "__imul__", "__ipow__")
    return in_place and isinstance(args[0], Tensor) and not isinstance(args[0], PRIVATE)
