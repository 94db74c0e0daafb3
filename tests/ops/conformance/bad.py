"""Calls that an op's signature refuses, made from a valid one: one argument is wrong at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from dpkern.base.signature import (
    GROUPS,
    LEADING,
    ChoiceParameter,
    DeviceParameter,
    DtypeParameter,
    NumberParameter,
    ObjectParameter,
    TensorParameter,
    is_bound,
)
from dpkern.bench.case import Case

Bad = tuple[str, str, Any]
"""What is wrong, the name that the error must give, and the argument."""

NUMBERS: dict[str, tuple[Any, ...]] = {
    "Index": (-1, 1.0, True, "1"),
    "Position": (-1, 2**62 + 1, 1.0, True, None),
    "Count": (-1, 2**40 + 1, 1.0, True, None),
    "Positive": (0, -1.0, math.nan, math.inf, 10**400, True, "1", None),
    "NonNegative": (-1.0, math.nan, math.inf, True, "1", None),
    "int": (0.5, "1", None),
    "float": (-1.0, math.nan, True, "1", None),
    "bool": ("yes", None, 2),
    "Word": (-1, 2**64, 0.5, True, "1", None),
    "Scale": (0.0, -1.0, math.nan, math.inf, "1", object(), [1.0], torch.zeros(97)),
}


def bad_arguments(case: Case) -> Iterator[tuple[str, Bad]]:
    """Parameters and what each of them refuses."""
    known: set[str] = set()
    kind = False
    for parameter in case.op.schema.signature.parameters:
        name = parameter.name
        if isinstance(parameter, TensorParameter):
            value = case.arguments()[name]
            if value is not None:
                yield from ((name, bad) for bad in _tensors(parameter, value, known, kind))
            if not parameter.optional:
                known |= {dim for dim in parameter.dims if is_bound(dim)}
                kind = kind or parameter.group in LEADING
            continue
        kind = kind or isinstance(parameter, DtypeParameter)
        if isinstance(parameter, NumberParameter) and parameter.rule == "Count":
            known.add(name)
        for wrong in _values(parameter):
            yield name, (f"{name} is {wrong!r:.30}", name, wrong)


def _values(parameter: Any) -> tuple[Any, ...]:
    if isinstance(parameter, ChoiceParameter):
        return ("nonsense", None, 2.0, [parameter.options[0]], parameter.options)
    if isinstance(parameter, NumberParameter):
        return NUMBERS[parameter.rule]
    if isinstance(parameter, DtypeParameter):
        return (torch.int32, torch.complex64, "float32", None)
    if isinstance(parameter, DeviceParameter):
        return ("meta", "nowhere", None, 3)
    assert isinstance(parameter, ObjectParameter)
    return ("nonsense", object(), torch.zeros(97), [object()])


def _tensors(parameter: TensorParameter, value: Any, known: set[str], kind: bool) -> Iterator[Bad]:
    name = parameter.name
    if not parameter.many:
        yield from _tensor(parameter, name, value, known, kind)
        return
    tensors = list(value) if isinstance(value, (list, tuple)) else [value]
    if not parameter.alone:
        yield "a tensor, no list", name, tensors[0]
    yield "a generator", name, iter(tensors)
    yield "None", name, None
    if "any_number" not in parameter.marks:
        yield "an empty list", name, []
    if any(dim[0] == "*" and dim in known for dim in parameter.dims):
        yield "one too few", name, tensors[1:]
        yield "one too many", name, [*tensors, tensors[-1]]
    # The first tensor of a list binds what the others must have.
    bound = known | {dim for dim in parameter.dims if is_bound(dim) and dim[0] != "*"}
    for i, tensor in enumerate(tensors):
        if i not in (0, len(tensors) - 1) or (parameter.alone and len(tensors) == 1):
            continue
        after = (known, kind) if i == 0 else (bound, kind or parameter.group in LEADING)
        for what, where, wrong in _tensor(parameter, f"{name}[{i}]", tensor, *after):
            yield what, where, [*tensors[:i], wrong, *tensors[i + 1 :]]


def _tensor(
    parameter: TensorParameter, name: str, tensor: torch.Tensor, known: set[str], kind: bool
) -> Iterator[Bad]:
    tensor = tensor.detach()
    if not parameter.optional:
        yield "None", name, None
    yield "a list", name, [1.0]
    yield "an array", name, tensor.float().numpy() if tensor.dtype.itemsize == 2 else tensor.numpy()
    yield "a meta tensor", name, tensor.to("meta")
    yield "a sparse tensor", name, torch.ones(tensor.shape).to(tensor.dtype).to_sparse()
    yield "a complex tensor", name, torch.zeros(tensor.shape, dtype=torch.complex64)
    yield "a tensor of bools", name, torch.zeros(tensor.shape, dtype=torch.bool)
    group = GROUPS[parameter.group]
    if (parameter.group in LEADING and kind) or parameter.group == "Sum":
        for other in (torch.float64, torch.float32):
            if tensor.dtype is not other:
                yield f"a tensor of {other}", name, tensor.to(other)
    if "float16" not in group:
        yield "a tensor of 16 bits", name, tensor.to(torch.float16)
    yield from _shapes(parameter, name, tensor, known)
    if parameter.layout == "contiguous" and tensor.numel() > 1:
        yield "a tensor with gaps", name, torch.stack((tensor, tensor), -1)[..., 0]
    if parameter.layout in ("dense", "transposable") and tensor.numel() > 1:
        yield "a tensor with gaps", name, torch.stack((tensor, tensor), -1)[..., 0]
    if parameter.layout == "dense" and tensor.dim() > 1 and min(tensor.shape) > 1:
        turned = tensor.transpose(0, 1).contiguous().transpose(0, 1)
        yield "a tensor whose samples are not outermost", name, turned


def _shapes(
    parameter: TensorParameter, name: str, tensor: torch.Tensor, known: set[str]
) -> Iterator[Bad]:
    fixed = [dim for dim in parameter.dims if dim[0] not in "*."]
    rest = [dim for dim in parameter.dims if dim[0] in "*."]
    settled = not rest or rest[0] in known
    if settled:
        yield "one dimension more", name, torch.stack((tensor, tensor))
    if fixed:
        yield "too few dimensions", name, tensor.new_zeros((2,) * (len(fixed) - 1))
    if rest and settled and tensor.dim() > len(fixed):
        yield f"another {rest[0]}", name, torch.cat((tensor, tensor), -1)
    for axis, dim in enumerate(fixed):
        if dim in known or dim.isdecimal():
            yield f"another {dim}", name, torch.cat((tensor, tensor), axis)
