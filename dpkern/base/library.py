"""Make ops PyTorch operators, ``torch.ops.dpkern.<name>``, from their signatures.

Each op becomes an operator with a fake implementation, so that ``torch.compile``, FakeTensor and
profilers see it. What PyTorch has no type for travels as text and tensors (``base.text``). An op
that may write its results into ``out`` has a second overload, ``<name>.out``; an operator does not
return what it has written. No operator has a derivative.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter as Called
from typing import Any, Union, get_args, get_origin

import torch

from . import text
from .schema import BoundCall, Schema
from .signature import (
    ChoiceParameter,
    DeviceParameter,
    DtypeParameter,
    NumberParameter,
    Parameter,
    TensorParameter,
)

_library: Any = torch.library.Library("dpkern", "FRAGMENT")  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Results:
    """The results of an operator.

    Attributes:
        types: ``Tensor`` or ``Tensor[]`` each.
        of: them, from what the op returns.
        empty: new ones, not filled, for a call that was looked at (``Schema.declared``).
        behind_out: how many of them, the first ones, ``out`` holds if it is given.
    """

    types: tuple[str, ...]
    of: Callable[[Any], tuple[Any, ...]]
    empty: Callable[[BoundCall], tuple[Any, ...]]
    behind_out: int


@dataclass(frozen=True)
class Carrier:
    """The one or two PyTorch arguments that carry one parameter of an op.

    Attributes:
        name: of the parameter.
        types: of the arguments, ``!`` for what the op writes.
        flat: the arguments, from the parameter's value.
        read: the value, from the arguments.
        optional: whether it may be None.
    """

    name: str
    types: tuple[str, ...]
    flat: Callable[[Any], tuple[Any, ...]]
    read: Callable[..., Any]
    optional: bool = False

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of the arguments."""
        beside = "tensors" if "[]" in self.types[-1] else "tensor"
        return (self.name, f"{self.name}_{beside}")[: len(self.types)]


def _same(value: Any) -> Any:
    return value


def _one(value: Any) -> tuple[Any, ...]:
    return (value,)


def _listed(value: Any) -> tuple[Any, ...]:
    return ([value] if isinstance(value, torch.Tensor) else list(value),)


def _carrier(parameter: Parameter, schema: Schema) -> Carrier:
    """Return the carrier of a parameter."""
    name = parameter.name
    if isinstance(parameter, TensorParameter):
        kind = "Tensor!" if "written" in parameter.marks else "Tensor"
        if parameter.many:
            return Carrier(name, (f"{kind}[]",), _listed, tuple, parameter.optional)
        return Carrier(name, (kind,), _one, _same, parameter.optional)
    if isinstance(parameter, ChoiceParameter):
        return Carrier(name, (type(parameter.options[0]).__name__,), _one, _same)
    if isinstance(parameter, NumberParameter) and parameter.rule == "Word":
        return Carrier(name, ("str",), lambda number: (str(number),), int)  # beyond int64
    if isinstance(parameter, NumberParameter) and parameter.rule == "Scale":
        types = ("float?", "Tensor?")
        return Carrier(name, types, _flat_scale, _read_scale, parameter.optional)
    if isinstance(parameter, NumberParameter) and parameter.many:
        return Carrier(name, (f"{parameter.type}[]",), _listed, tuple, parameter.optional)
    if isinstance(parameter, NumberParameter):
        return Carrier(name, (parameter.type,), _one, _same, parameter.optional)
    if isinstance(parameter, DtypeParameter):
        return Carrier(name, ("ScalarType",), _one, _same)
    if isinstance(parameter, DeviceParameter):
        return Carrier(name, ("Device",), _one, _same)
    hint = eval(schema.function.__annotations__[name], schema.function.__globals__)
    return _object_carrier(name, hint)


def _object_carrier(name: str, hint: Any) -> Carrier:
    """Return the carrier of any other parameter, by the types that it may have."""
    options = [*_options(hint)]
    optional = type(None) in options
    options = [kind for kind in options if kind is not type(None)]
    kinds = {kind for option in options for kind in text.members(option)}
    lists = any(get_origin(option) is not None for option in options)
    if kinds == {torch.Tensor} or all(issubclass(kind, tuple) for kind in kinds):
        into = tuple if kinds == {torch.Tensor} else next(iter(kinds))._make
        types = ("Tensor![]" if name == "out" else "Tensor[]",)
        return Carrier(name, types, _listed, into, optional)
    if kinds <= {int, float}:
        (kind,) = kinds
        if not lists:
            return Carrier(name, (kind.__name__,), _one, _same, optional)
        return Carrier(name, (f"{kind.__name__}[1]",), _flat_numbers, _read_numbers, optional)
    return _text_carrier(name, kinds, optional)


def _text_carrier(name: str, kinds: set[Any], optional: bool) -> Carrier:
    classes: dict[str, type] = {}
    for kind in kinds:
        classes.update(text.classes_of(kind))

    def read(written: str, tensors: Sequence[torch.Tensor] | None = None) -> Any:
        return text.read(name, written, tensors or (), classes)

    if not text.holds_tensors(classes):
        return Carrier(name, ("str",), lambda value: text.flat(value)[:1], read, optional)
    frozen = all(kind.__dataclass_params__.frozen for kind in kinds)
    return Carrier(name, ("str", "Tensor[]?" if frozen else "Tensor![]"), text.flat, read, optional)


def _flat_scale(value: float | torch.Tensor) -> tuple[Any, ...]:
    return (None, value) if isinstance(value, torch.Tensor) else (value, None)


def _read_scale(number: float | None, tensor: torch.Tensor | None = None) -> Any:
    return number if tensor is None else tensor


def _flat_numbers(value: Any) -> tuple[Any, ...]:
    return (list(value) if isinstance(value, (list, tuple)) else [value],)


def _read_numbers(numbers: Sequence[Any]) -> Any:
    return numbers[0] if len(numbers) == 1 else tuple(numbers)


def _options(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


class Operator:
    """An op's overload in ``torch.ops.dpkern``.

    Args:
        name: of the operator.
        schema: of the op.
        call: the op.
        results: what it returns.
        into_out: whether results go into a given ``out``.
    """

    def __init__(
        self,
        name: str,
        schema: Schema,
        call: Callable[..., Any],
        results: Results,
        *,
        into_out: bool = False,
    ) -> None:
        self.name = f"{name}.out" if into_out else name
        self.schema = schema
        self.call = call
        self.results = results
        self.into_out = into_out
        self.skipped = results.behind_out if into_out else 0
        self.carriers = [
            _carrier(parameter, schema)
            for parameter in schema.signature.parameters
            if not self._is_left_out(parameter)
        ]
        places = (p.name for p in schema.signature.parameters if isinstance(p, DeviceParameter))
        self.device = next(places, None)
        self.arguments = [name for carrier in self.carriers for name in carrier.arguments]

    def _is_left_out(self, parameter: Parameter) -> bool:
        """Whether the overload has no such parameter: results have no other device than ``out``."""
        if self.into_out:
            return isinstance(parameter, DeviceParameter)
        return parameter.name == "out" and self.schema.call.parameters["out"].default is None

    @property
    def text(self) -> str:
        """The schema in PyTorch's language."""
        parts, star = [], False
        letters = iter("abcdefgh")
        for carrier in self.carriers:
            called = self.schema.call.parameters[carrier.name]
            if called.kind is Called.KEYWORD_ONLY and not star:
                parts.append("*")
                star = True
            for name, kind in zip(carrier.arguments, carrier.types, strict=True):
                required = carrier.name == "out" and self.into_out
                optional = carrier.optional and not required
                kind = kind.replace("!", f"({next(letters)}!)") if "!" in kind else kind
                kind = f"{kind}?" if optional and not kind.endswith("?") else kind
                default = "" if required else _default(kind, called.default)
                parts.append(f"{kind} {name}{default}")
        returned = ", ".join(self.results.types[self.skipped :])
        return f"{self.name}({', '.join(parts)}) -> ({returned})"

    def define(self) -> None:
        """Define the operator in PyTorch."""
        _library.define(self.text, tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(self.name, self._run, "CompositeExplicitAutograd")
        _library.impl(self.name, torch.library.fallthrough_kernel, "Autograd")
        torch.library.register_fake(f"dpkern::{self.name}", self._fake, lib=_library)

    def flat(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the operator's arguments, from those of the op."""
        given = self.schema.call.bind(*args, **kwargs).arguments
        flat: dict[str, Any] = {}
        for carrier in self.carriers:
            if carrier.name in given:
                value, names = given[carrier.name], carrier.arguments
                values = (None,) * len(names) if value is None else carrier.flat(value)
                flat.update(zip(names, values, strict=True))
        return flat

    def _read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the op's arguments, from those of the operator."""
        given = dict(zip(self.arguments, args, strict=False), **kwargs)
        found = {}
        for carrier in self.carriers:
            values = [given.get(name) for name in carrier.arguments]
            if any(value is not None for value in values):
                found[carrier.name] = carrier.read(*values)
            elif carrier.optional:
                found[carrier.name] = None
        if self.into_out and self.device is not None:
            found[self.device] = found["out"].device
        return found

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        made = self.results.of(self.call(**self._read(args, kwargs)))
        return _returned(made[self.skipped :])

    def _fake(self, *args: Any, **kwargs: Any) -> Any:
        call = self.schema.call.bind(**self._read(args, kwargs))
        call.apply_defaults()
        bound = self.schema.declared(*call.arguments.values())
        return _returned(self.results.empty(bound)[self.skipped :])


def _returned(made: tuple[Any, ...]) -> Any:
    return None if not made else made[0] if len(made) == 1 else made


def _default(kind: str, value: Any) -> str:
    if kind.endswith("?"):
        return "" if value is Called.empty else "=None"
    if value is Called.empty:
        return ""
    if isinstance(value, str):
        return f'="{value}"'
    return f"={value}"


__all__ = ["Operator", "Results"]
