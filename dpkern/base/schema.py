"""Derive from an op's signature checked calls, their sizes, and room for results.

``Schema.bind`` is written as source and compiled once per op, as ``dataclasses`` does: one look at
each argument in the common case. Whatever fails that look goes through ``check``, argument by
argument, which raises the error that names it, or lets the call pass after all (a tensor subclass).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args, get_origin

import torch

from .bind_source import bind_source
from .dtypes import DTYPES, sum_dtype
from .look import Look
from .memory import has_memory, is_dense
from .place import check_place
from .signature import (
    LEADING,
    ChoiceParameter,
    Parameter,
    Signature,
    TensorParameter,
)
from .signature_reader import read


class BoundCall(NamedTuple):
    """A checked call.

    Attributes:
        args: every argument, in the signature's order.
        sizes: by the signature's ``sizes``; an int, or a shape for ``*S``, or a list of shapes.
        kind: the call's dtype, None if its tensors have fixed ones.
        device: where the first tensor is; the CPU without one.
        plan: what the op's own check returned for kernels.
    """

    args: tuple[Any, ...]
    sizes: tuple[Any, ...]
    kind: torch.dtype | None
    device: torch.device
    plan: Any = None


class Schema:
    """An op's signature at work.

    Args:
        function: the op's reference, whose annotations are the declaration.
        check: looks at what the signature cannot say, with the signature's arguments; raises
            ``InvalidInput``, and may return a plan for kernels.
        plan: the type of this plan, where compiled kernels receive it.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        check: Callable[..., Any] | None,
        plan: type | None = None,
    ) -> None:
        self.function = function
        self.own_check = check
        self.plan = plan

    @cached_property
    def call(self) -> inspect.Signature:
        """The parameters as Python sees them."""
        return inspect.signature(self.function)

    @cached_property
    def signature(self) -> Signature:
        """The declaration, read."""
        names = self.function.__globals__

        def choices(name: str) -> tuple[Any, ...] | None:
            found = names.get(name)
            return get_args(found) if get_origin(found) is Literal else None

        plan = None if self.plan is None else self.plan.__name__
        return read(self.function.__name__, self.function.__annotations__, choices, plan)

    @cached_property
    def bind(self) -> Callable[..., BoundCall]:
        """The call's checked arguments and sizes: ``bind(*args, **kwargs)``."""
        namespace: dict[str, Any] = {
            "_own": self.own_check,
            "_slow": self.check,
            "_sum_dtype": sum_dtype,
            "_is_dense": is_dense,
            "_has_memory": has_memory,
            "_place": check_place,
            "_Bound": BoundCall,
            "_TENSORS": (torch.Tensor, torch.nn.Parameter),
            "_LISTS": (list, tuple),
            "_strided": torch.strided,
            "_cpu": torch.device("cpu"),
            **{f"_{name}": dtypes for name, dtypes in DTYPES.items()},
        }
        for parameter in self.signature.parameters:
            namespace[f"_default_{parameter.name}"] = self.call.parameters[parameter.name].default
            if isinstance(parameter, ChoiceParameter):
                namespace[f"_options_{parameter.name}"] = parameter.options
        exec(compile(self.source, f"<bind {self.signature.name}>", "exec"), namespace)
        return namespace[self.signature.name]  # type: ignore[no-any-return]

    def look_by(self, made: Callable[[Schema], Callable[..., BoundCall] | None]) -> None:
        """Let another function take the first look of ``bind``, if ``made`` returns one."""
        found = made(self)
        if found is not None:
            self.__dict__["bind"] = found

    @cached_property
    def source(self) -> str:
        """``bind`` as text."""
        return "\n".join(bind_source(self.signature, self.call, checked=self.own_check is not None))

    def check(self, *args: Any) -> BoundCall:
        """Look at every argument in turn, and return the bound call or raise what is wrong.

        Raises:
            InvalidInput: the first argument that does not fit.
        """
        bound = self.declared(*args, fake=False)
        plan = None if self.own_check is None else self.own_check(*bound.args)
        return bound._replace(plan=plan)

    def declared(self, *args: Any, fake: bool = True) -> BoundCall:
        """Run ``check`` without the op's own: it looks at no entry of a tensor.

        A fake tensor may lack memory.
        """
        look = Look(fake=fake)
        args = tuple(
            (value,) if _alone(parameter) and isinstance(value, torch.Tensor) else value
            for parameter, value in zip(self.signature.parameters, args, strict=True)
        )
        for parameter, value in zip(self.signature.parameters, args, strict=True):
            look.at(parameter, value)
        sizes = tuple(look.sizes[name] for name in self.signature.sizes)
        return BoundCall(args, sizes, look.kind, look.device or torch.device("cpu"))

    def results(self, bound: BoundCall, more: Mapping[str, Any] = {}) -> tuple[torch.Tensor, ...]:
        """Return new tensors for the results of a checked call, not filled.

        ``more``: sizes that no argument has, by name.
        """
        sizes = dict(zip(self.signature.sizes, bound.sizes, strict=True))
        sizes.update(more)
        return tuple(
            torch.empty(
                _shape(result, sizes), dtype=_dtype(result, bound.kind), device=bound.device
            )
            for result in self.signature.results or ()
        )


def _alone(parameter: Parameter) -> bool:
    return isinstance(parameter, TensorParameter) and parameter.alone


def _shape(tensor: TensorParameter, sizes: dict[str, Any]) -> tuple[int, ...]:
    shape: list[int] = []
    for dim in tensor.dims:
        if dim.startswith("*"):
            shape.extend(sizes[dim])
        else:
            parts = (sizes[part] if part in sizes else int(part) for part in dim.split("*"))
            shape.append(math.prod(parts))
    return tuple(shape)


def _dtype(tensor: TensorParameter, kind: torch.dtype | None) -> torch.dtype:
    if tensor.group == "Sum" and kind is not None:
        return sum_dtype(kind)
    return kind if tensor.group in LEADING and kind is not None else DTYPES[tensor.group][0]


__all__ = ["BoundCall", "Schema"]
