"""What follows from an op's signature: checks, sizes, results, and the call of a compiled kernel.

``Schema.bind`` is written as source and compiled once per op, as ``dataclasses`` does: one look at
each argument in the common case. Whatever fails that look goes through ``check``, argument by
argument, which raises the error that names it, or lets the call pass after all (a tensor subclass).
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple, get_args, get_origin

import torch

from . import validate
from .errors import InvalidInput
from .place import check_place
from .signature import (
    GROUPS,
    LEADING,
    ChoiceParameter,
    DeviceParameter,
    DtypeParameter,
    NumberParameter,
    ObjectParameter,
    Parameter,
    Signature,
    TensorParameter,
    is_bound,
    read,
)

DTYPES = {name: tuple(getattr(torch, kind) for kind in kinds) for name, kinds in GROUPS.items()}
"""``GROUPS`` as torch's dtypes."""
FLOATS = DTYPES["Float"]
TENSORS = (torch.Tensor, torch.nn.Parameter)
_MAX = sys.float_info.max


class Bound(NamedTuple):
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


@dataclass(frozen=True)
class Range:
    """Numbers that an op takes: the check that names them, and the common case in Python."""

    check: Callable[..., Any]
    common: str


RANGES: dict[str, Range] = {
    "Index": Range(validate.integer, "{x}.__class__ is int and {x} >= 0"),
    "Position": Range(
        lambda **value: validate.integer(0, 2**62, **value),
        "{x}.__class__ is int and 0 <= {x} <= 4611686018427387904",
    ),
    "Count": Range(
        lambda **value: validate.integer(0, 2**40, **value),
        "{x}.__class__ is int and 0 <= {x} <= 1099511627776",
    ),
    "Positive": Range(validate.positive, "{x}.__class__ is float and 0 < {x} <= _MAX"),
    "NonNegative": Range(validate.non_negative, "{x}.__class__ is float and 0 <= {x} <= _MAX"),
    "bool": Range(partial(validate.choice, (False, True)), "{x}.__class__ is bool"),
}
"""Ranges by the names that signatures give them; others (``int``, ``float``) are left to the op."""


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of gradients, factors and sums of operands of this dtype."""
    return dtype if dtype in FLOATS else torch.float32


def memory_order(tensor: torch.Tensor) -> list[int]:
    """The dimensions behind dim 0 from the outermost in memory to the innermost."""
    if tensor.is_contiguous():
        return list(range(1, tensor.dim()))
    strides = tensor.stride()
    return sorted(range(1, tensor.dim()), key=lambda i: (-strides[i], i))


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no gaps in memory, with its first dimension outermost."""
    return tensor.is_contiguous() or (
        tensor.dim() > 0 and tensor.permute(0, *memory_order(tensor)).is_contiguous()
    )


def is_matrix(tensor: torch.Tensor) -> bool:
    """Whether a matrix is contiguous, or the transpose of a contiguous one."""
    return tensor.is_contiguous() or tensor.t().is_contiguous()


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
        self.call = inspect.signature(function)

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
    def bind(self) -> Callable[..., Bound]:
        """The call's checked arguments and sizes: ``bind(*args, **kwargs)``."""
        namespace: dict[str, Any] = {
            "_own": self.own_check,
            "_slow": self.check,
            "_sum_dtype": sum_dtype,
            "_is_dense": is_dense,
            "_place": check_place,
            "_Bound": Bound,
            "_TENSORS": TENSORS,
            "_LISTS": (list, tuple),
            "_MAX": _MAX,
            "_strided": torch.strided,
            "_cpu": torch.device("cpu"),
            **{f"_{name}": dtypes for name, dtypes in DTYPES.items()},
        }
        for parameter in self.signature.parameters:
            namespace[f"_default_{parameter.name}"] = self.call.parameters[parameter.name].default
            if isinstance(parameter, ChoiceParameter):
                namespace[f"_options_{parameter.name}"] = parameter.options
        exec(compile(self.source, f"<bind {self.signature.name}>", "exec"), namespace)
        return namespace["bind"]  # type: ignore[no-any-return]

    @cached_property
    def source(self) -> str:
        """``bind`` as text."""
        return "\n".join(_bind_source(self))

    def check(self, *args: Any) -> Bound:
        """Look at every argument in turn: the call bound, or the error that names what is wrong.

        Raises:
            InvalidInput: the first argument that does not fit.
        """
        bound = self.declared(*args)
        plan = None if self.own_check is None else self.own_check(*bound.args)
        return bound._replace(plan=plan)

    def declared(self, *args: Any) -> Bound:
        """``check`` without the op's own: it looks at no entry of a tensor."""
        look = _Look()
        args = tuple(
            (value,) if _alone(parameter) and isinstance(value, torch.Tensor) else value
            for parameter, value in zip(self.signature.parameters, args, strict=True)
        )
        for parameter, value in zip(self.signature.parameters, args, strict=True):
            look.at(parameter, value)
        sizes = tuple(look.sizes[name] for name in self.signature.sizes)
        return Bound(args, sizes, look.kind, look.device or torch.device("cpu"))

    def results(self, bound: Bound, more: Mapping[str, Any] = {}) -> tuple[torch.Tensor, ...]:
        """New tensors for the results of a checked call, not filled.

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


class _Look:
    """One argument after the other: what is bound so far, and what is wrong with the next."""

    def __init__(self) -> None:
        self.sizes: dict[str, Any] = {}
        self.lists: dict[str, str] = {}
        self.kind: torch.dtype | None = None
        self.device: torch.device | None = None

    def at(self, parameter: Parameter, value: Any) -> None:
        if isinstance(parameter, TensorParameter):
            if value is not None or not parameter.optional:
                self._tensors(parameter, value)
        elif isinstance(parameter, DeviceParameter):
            self.device = check_place(value)
        elif isinstance(parameter, DtypeParameter):
            self.kind = validate.choice(DTYPES[parameter.group], **{parameter.name: value})
        elif isinstance(parameter, ChoiceParameter):
            validate.choice(parameter.options, **{parameter.name: value})
        elif isinstance(parameter, NumberParameter) and _has_range(parameter):
            if value is not None or not parameter.optional:
                RANGES[parameter.rule].check(**{parameter.name: value})
            if parameter.rule == "Count":
                self.sizes[parameter.name] = value

    def _tensors(self, parameter: TensorParameter, value: Any) -> None:
        if not parameter.many:
            self._tensor(parameter, parameter.name, value, None)
            return
        if not isinstance(value, (list, tuple)) or (
            not value and "any_number" not in parameter.marks
        ):
            raise _no_list(parameter, value)
        spread = next((dim for dim in parameter.dims if dim.startswith("*")), None)
        known = None if spread is None else self.sizes.get(spread)
        if known is not None and len(known) != len(value):
            raise InvalidInput(
                parameter.name,
                expected=f"{len(known)} tensors, one for each of {self.lists[str(spread)]}",
                got=str(len(value)),
                remedy="Give every gradient its own sum.",
            )
        shapes = []
        for i, item in enumerate(value):
            each = None if known is None else known[i]
            shapes.append(self._tensor(parameter, f"{parameter.name}[{i}]", item, each))
        if spread is not None:
            self.sizes.setdefault(spread, shapes)
            self.lists.setdefault(spread, parameter.name)

    def _tensor(
        self, parameter: TensorParameter, name: str, value: Any, spread: Any
    ) -> torch.Size | None:
        """Check one tensor; returns what ``*S`` stands for in it."""
        tensor = validate.tensor_at(
            name,
            value,
            shape=self._wanted(parameter, value, spread),
            dtypes=self._dtypes(parameter.group),
            device=self.device,
            contiguous=parameter.layout == "contiguous",
        )
        if parameter.layout == "dense" and not is_dense(tensor):
            raise _not_dense(name, tensor)
        if parameter.layout == "transposable" and not is_matrix(tensor):
            raise InvalidInput(
                name,
                expected="a contiguous matrix or the transpose of one",
                got=f"strides {tensor.stride()}",
                remedy="Call .contiguous() first.",
            )
        self.device = tensor.device
        if parameter.group in LEADING and self.kind is None:
            self.kind = tensor.dtype
        return self._bind(parameter, name, tensor)

    def _wanted(
        self, parameter: TensorParameter, value: Any, spread: Any
    ) -> tuple[int | None, ...] | None:
        """The shape in the message; None leaves the check to ``_bind``."""
        wanted: list[int | None] = []
        for dim in parameter.dims:
            if dim == "...":
                return None
            known = spread if dim.startswith("*") and parameter.many else self.sizes.get(dim)
            if dim.startswith("*"):
                if known is None:
                    return None
                wanted.extend(known)
            else:
                wanted.append(int(dim) if dim.isdecimal() else known)
        return tuple(wanted)

    def _dtypes(self, group: str) -> tuple[torch.dtype, ...]:
        if self.kind is None or group not in (*LEADING, "Sum"):
            return DTYPES[group]
        return (sum_dtype(self.kind) if group == "Sum" else self.kind,)

    def _bind(
        self, parameter: TensorParameter, name: str, tensor: torch.Tensor
    ) -> torch.Size | None:
        dims, shape = parameter.dims, tensor.shape
        fixed = [dim for dim in dims if dim != "..." and not dim.startswith("*")]
        rest = len(dims) > len(fixed)
        fits = len(shape) >= len(fixed) if rest else len(shape) == len(fixed)
        if fits:
            for dim, size in zip(fixed, shape, strict=False):
                if is_bound(dim):
                    fits = fits and self.sizes.setdefault(dim, size) == size
                elif dim != "_":
                    fits = fits and size == int(dim)
        if not fits:
            raise _not_shaped(name, dims, self.sizes, tensor)
        if dims and dims[-1].startswith("*"):
            shape = shape[len(fixed) :]
            if not parameter.many:
                self.sizes.setdefault(dims[-1], shape)
            return shape
        return None


def _has_range(parameter: NumberParameter) -> bool:
    return parameter.rule in RANGES and not parameter.many


def _no_list(parameter: TensorParameter, value: Any) -> InvalidInput:
    is_list = isinstance(value, (list, tuple))
    if parameter.alone:
        return InvalidInput(
            parameter.name,
            expected="a tensor [B, ...] or a non-empty list of them",
            got="an empty list" if is_list else type(value).__name__,
            remedy="Pass per-sample gradients, the batch first.",
        )
    some = "any_number" not in parameter.marks
    return InvalidInput(
        parameter.name,
        expected="a list of at least one tensor" if some else "a list of tensors",
        got="none" if is_list else type(value).__name__,
        remedy="Wrap a single tensor in a list.",
    )


def _not_shaped(
    name: str, dims: Sequence[str], sizes: dict[str, Any], tensor: torch.Tensor
) -> InvalidInput:
    known = ", ".join("..." if d[0] in "*." else str(sizes.get(d, d)) for d in dims)
    return InvalidInput(
        name, expected=f"shape [{known}]", got=str(list(tensor.shape)), remedy="Reshape the tensor."
    )


def _not_dense(name: str, tensor: torch.Tensor) -> InvalidInput:
    return InvalidInput(
        name,
        expected="[B, ...] without gaps, the samples outermost, one B for all",
        got=f"shape {list(tensor.shape)} with strides {tensor.stride()}",
        remedy="Call .contiguous() first.",
    )


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


# The source of ``bind``: every line is one look, and a look that fails leaves the fast path.


def _bind_source(schema: Schema) -> Iterator[str]:
    parameters = schema.signature.parameters
    names = [parameter.name for parameter in parameters]
    yield f"def bind({_call_source(schema)}):"
    yield "    try:"
    yield "        pass"  # there may be nothing to look at
    known: set[str] = set()
    place: dict[str, str] = {}
    for parameter in parameters:
        if isinstance(parameter, TensorParameter):
            if parameter.optional:  # what it binds is its own
                yield f"        if {parameter.name} is not None:"
                lines = _tensor_source(parameter, {*known}, {**place})
                yield from (f"            {line}" for line in lines)
            else:
                lines = _tensor_source(parameter, known, place)
                yield from (f"        {line}" for line in lines)
        elif isinstance(parameter, DeviceParameter):
            place["device"] = "_device"
            name = parameter.name
            yield f"        _device = _cpu if {name} == 'cpu' else _place({name})"
        elif isinstance(parameter, DtypeParameter):
            place["kind"] = parameter.name
            yield f"        if {parameter.name} not in _{parameter.group}: {_LEAVE}"
        else:
            common = _value_source(parameter)
            if common:
                yield f"        if not ({common}): {_LEAVE}"
            if isinstance(parameter, NumberParameter) and parameter.rule == "Count":
                known.add(parameter.name)
                yield f"        {_local(parameter.name)} = {parameter.name}"
    yield "    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):"
    yield f"        return _slow({', '.join(names)})"
    args = "(" + "".join(f"{name}, " for name in names) + ")"
    sizes = "(" + "".join(f"{_local(dim)}, " for dim in schema.signature.sizes) + ")"
    device, kind = place.get("device", "_cpu"), place.get("kind", "None")
    plan = "None" if schema.own_check is None else f"_own({', '.join(names)})"
    yield f"    return _Bound({args}, {sizes}, {kind}, {device}, {plan})"


def _call_source(schema: Schema) -> str:
    """The parameters of ``bind``: those of the op, but for the backend."""
    parts, star = [], False
    for parameter in schema.call.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            parts.append("*")
            star = True
        default = "" if parameter.default is parameter.empty else f"=_default_{parameter.name}"
        parts.append(parameter.name + default)
    return ", ".join(parts)


def _local(dim: str) -> str:
    return f"_s_{dim.lstrip('*')}"


_LEAVE = "raise TypeError"


def _tensor_source(
    parameter: TensorParameter, known: set[str], place: dict[str, str]
) -> Iterator[str]:
    if not parameter.many:
        yield from _one_source(parameter, parameter.name, known, place, spread=None)
        return
    name = parameter.name
    spread = next((dim for dim in parameter.dims if dim.startswith("*")), None)
    if parameter.alone:
        yield f"if {name}.__class__ in _TENSORS: {name} = ({name},)"
    empty = "" if "any_number" in parameter.marks else f" or not {name}"
    yield f"if {name}.__class__ not in _LISTS{empty}: {_LEAVE}"
    if spread is not None and spread not in known:
        yield f"{_local(spread)} = []"
        note = f"{_local(spread)}.append(_shape[{len(parameter.dims) - 1}:])"
    elif spread is not None:
        yield f"if len({name}) != len({_local(spread)}): {_LEAVE}"
        note = None
    else:
        note = None
    # The first binds what the others must have.
    inner: list[str] = []
    fresh = place.get("device") is None or any(
        is_bound(dim) and dim != spread and dim not in known for dim in parameter.dims
    )
    if fresh or (parameter.group in LEADING and "kind" not in place):
        binder = TensorParameter(
            name,
            parameter.group,
            tuple(dim if dim != spread else "..." for dim in parameter.dims),
            ("strided",),
        )
        yield from _one_source(binder, f"{name}[0]", known, place, spread=None)
    each = "_rest" if spread is not None and spread in known else None
    if spread is not None and each:
        yield f"for _item, {each} in zip({name}, {_local(spread)}):"
    else:
        yield f"for _item in {name}:"
    inner.extend(_one_source(parameter, "_item", known, place, spread=each))
    if note:
        inner.append("_shape = _item.shape")
        inner.append(note)
    yield from (f"    {line}" for line in inner)
    if spread is not None:
        known.add(spread)


def _one_source(
    parameter: TensorParameter,
    name: str,
    known: set[str],
    place: dict[str, str],
    *,
    spread: str | None,
) -> Iterator[str]:
    yield f"if {name}.__class__ not in _TENSORS or {name}.layout is not _strided: {_LEAVE}"
    group = parameter.group
    if group in LEADING and "kind" not in place:
        place["kind"] = "_kind"
        yield f"_kind = {name}.dtype"
        yield f"if _kind not in _{group}: {_LEAVE}"
    elif group in LEADING:
        yield f"if {name}.dtype is not {place['kind']}: {_LEAVE}"
    elif group == "Sum" and "kind" in place:
        if "sums" not in place:
            place["sums"] = "_sums"
            yield f"_sums = _sum_dtype({place['kind']})"
        yield f"if {name}.dtype is not _sums: {_LEAVE}"
    elif len(GROUPS[group]) == 1:
        yield f"if {name}.dtype is not _{group}[0]: {_LEAVE}"
    else:
        yield f"if {name}.dtype not in _{group}: {_LEAVE}"
    if "device" not in place:
        place["device"] = "_device"
        yield f"_device = {name}.device"
        yield f"if {name}.is_meta: {_LEAVE}"
    else:
        yield f"if {name}.device != _device: {_LEAVE}"
    yield from _shape_source(parameter, name, known, spread)
    if parameter.layout == "contiguous":
        yield f"if not {name}.is_contiguous(): {_LEAVE}"
    elif parameter.layout == "transposable":
        yield f"if not ({name}.is_contiguous() or {name}.t().is_contiguous()): {_LEAVE}"
    elif parameter.layout == "dense":
        yield f"if not ({name}.is_contiguous() or _is_dense({name})): {_LEAVE}"


def _shape_source(
    parameter: TensorParameter, name: str, known: set[str], spread: str | None
) -> Iterator[str]:
    dims = parameter.dims
    fixed = [dim for dim in dims if dim[0] not in "*."]
    open_end = dims[-1] if len(fixed) < len(dims) else None
    if open_end is None and all(is_bound(dim) and dim in known for dim in fixed):
        yield f"if {name}.shape != ({''.join(_local(dim) + ', ' for dim in fixed)}): {_LEAVE}"
        return
    if open_end is not None and not fixed and spread is None and open_end not in known:
        if is_bound(open_end) and not parameter.many:
            yield f"{_local(open_end)} = {name}.shape"
            known.add(open_end)
        return
    if open_end is not None and (spread is not None or (open_end in known and not parameter.many)):
        head = "".join(_local(dim) + ", " for dim in fixed)
        yield f"if {name}.shape != ({head}*{spread or _local(open_end)},): {_LEAVE}"
        return
    targets, tests = [], []
    for i, dim in enumerate(fixed):
        if is_bound(dim) and dim not in known:
            known.add(dim)
            targets.append(_local(dim))
        elif is_bound(dim):
            targets.append(f"_d{i}")
            tests.append(f"_d{i} != {_local(dim)}")
        else:
            targets.append(f"_d{i}")
            if dim != "_":
                tests.append(f"_d{i} != {dim}")
    if open_end is not None:
        targets.append("*_rest_of_it")
    yield f"{', '.join(targets)}{',' if len(targets) == 1 else ''} = {name}.shape"
    if open_end is not None and is_bound(open_end) and not parameter.many:
        yield f"{_local(open_end)} = {name}.shape[{len(fixed)}:]"
        known.add(open_end)
    if tests:
        yield f"if {' or '.join(tests)}: {_LEAVE}"


def _value_source(parameter: Parameter) -> str:
    """The common case of an argument that is no tensor; empty: nothing to look at."""
    name = parameter.name
    if isinstance(parameter, ChoiceParameter):
        kind = type(parameter.options[0]).__name__
        return f"{name}.__class__ is {kind} and {name} in _options_{name}"
    if isinstance(parameter, NumberParameter) and _has_range(parameter):
        common = RANGES[parameter.rule].common.format(x=name)
        return f"{name} is None or ({common})" if parameter.optional else common
    return ""


__all__ = [
    "DTYPES",
    "FLOATS",
    "Bound",
    "ObjectParameter",
    "Schema",
    "is_dense",
    "memory_order",
    "sum_dtype",
]
