"""Write the source of ``Schema.bind``: every line is one look at an argument of a call.

A look that fails leaves the fast way, whose caller then looks again, argument by argument.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from .ranges import RANGES, has_range
from .signature import (
    GROUPS,
    LEADING,
    ChoiceParameter,
    DeviceParameter,
    DtypeParameter,
    NumberParameter,
    Parameter,
    Signature,
    TensorParameter,
    is_bound,
)


def bind_source(signature: Signature, call: inspect.Signature, *, checked: bool) -> Iterator[str]:
    """Write ``bind``, under the name of the op for errors of Python.

    Args:
        signature: of the op.
        call: the reference's signature as Python has it, for defaults and keywords.
        checked: whether the op has a check of its own, which runs behind the others.
    """
    parameters = signature.parameters
    names = [parameter.name for parameter in parameters]
    yield f"def {signature.name}({_call_source(call)}):"
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
    sizes = "(" + "".join(f"{_local(dim)}, " for dim in signature.sizes) + ")"
    device, kind = place.get("device", "_cpu"), place.get("kind", "None")
    plan = "None" if not checked else f"_own({', '.join(names)})"
    yield f"    return _Bound({args}, {sizes}, {kind}, {device}, {plan})"


def _call_source(call: inspect.Signature) -> str:
    """Return the parameters of ``bind``: those of the op, but for the backend."""
    parts, star = [], False
    for parameter in call.parameters.values():
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
        shapes = _local(spread)
        if "repeated" in parameter.marks:
            shapes = f"({shapes} * (len({name}) // len({shapes})))"
        yield f"if len({name}) != len({shapes}): {_LEAVE}"
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
        yield f"for _item, {each} in zip({name}, {shapes}):"
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
    yield f"if {name}.is_neg() or {name}._is_zerotensor() or not _has_memory({name}): {_LEAVE}"
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
    """Return the check of the common case of an argument that is no tensor; it may be empty."""
    name = parameter.name
    if isinstance(parameter, ChoiceParameter):
        kind = type(parameter.options[0]).__name__
        return f"{name}.__class__ is {kind} and {name} in _options_{name}"
    if isinstance(parameter, NumberParameter) and has_range(parameter):
        common = RANGES[parameter.rule].common(name)
        return f"{name} is None or ({common})" if parameter.optional else common
    return ""


__all__ = ["bind_source"]
