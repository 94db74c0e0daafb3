"""Check calls of ops in C++, and run compiled kernels in the same call.

``csrc/bindings/look.h`` walks the description of a signature that this file makes. It sees tensors
through DLPack's C exchange API, which torch publishes for its own ``Tensor``, and decides the
common case only: a call that fails this check is checked again in Python, which raises the errors.
Without the API, or where it disagrees with torch about a tensor, Python checks every call.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import IntEnum
from functools import cache
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ...base.dtypes import DTYPES, sum_dtype
from ...base.errors import DPKernError
from ...base.memory import has_memory
from ...base.ranges import RANGES, has_range
from ...base.schema import BoundCall, Schema
from ...base.signature import (
    LEADING,
    ChoiceParameter,
    DeviceParameter,
    DtypeParameter,
    NumberParameter,
    ObjectParameter,
    Parameter,
    Signature,
    TensorParameter,
    kinds,
    passed,
)
from . import _bindings
from ._structs import BYTES

Direct = Callable[..., Any]

_CODES = {
    torch.float32: (2, 32),
    torch.float64: (2, 64),
    torch.float16: (2, 16),
    torch.bfloat16: (4, 16),
    torch.int64: (0, 64),
    torch.int32: (0, 32),
    torch.int16: (0, 16),
    torch.uint8: (1, 8),
}
"""DLPack's code and bits of the dtypes that ops know."""
_PLACES = {dtype: place for place, dtype in enumerate(_CODES)}
_LARGEST = 2**63 - 1
_ANY_SIZE = _NO_REST = -1
_ANY_REST = -2


class _Is(IntEnum):
    """Kinds of parameters, ``Is`` in C++."""

    OBJECT, TENSOR, CHOICE, INTEGER, FLOAT, BOOL, DTYPE, DEVICE = range(8)


class _Passed(IntEnum):
    """Ways of arguments that are no tensors into kernels, ``Passed`` in C++."""

    NOT, INTEGER, WORD, FLOAT, BOOL, INTEGERS, FLOATS, BYTES = range(8)


class _Returns(IntEnum):
    """Kinds of results, ``Returns`` in C++."""

    NOTHING, RESULTS, NUMBER, CHANGED = range(4)


_LAYOUTS = {"strided": 0, "contiguous": 1, "dense": 1, "transposable": 2}
"""``Layout`` in C++; Python checks the order of tensors that are dense but not contiguous."""


@cache
def connect(extension: Any) -> bool:
    """Connect the compiled module with torch's tensors; return whether it reads them correctly."""
    exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    connected = exchange is not None and extension.connect(
        {
            "exchange": exchange,
            "dtypes": [(*code, dtype, _PLACES[sum_dtype(dtype)]) for dtype, code in _CODES.items()],
            "tensor": torch.Tensor,
            "parameter": torch.nn.Parameter,
            "size": torch.Size,
            "bound": BoundCall,
            "cpu": torch.device("cpu"),
            "is_negated": torch.Tensor.is_neg,
            "has_memory": has_memory,
            "empty_strided": torch.empty_strided,
            "changed": increment_version,
        }
    )
    return connected and all(_is_seen(extension, dtype) for dtype in _CODES)


def _is_seen(extension: Any, dtype: torch.dtype) -> bool:
    whole = torch.zeros(2, 3, 5, dtype=dtype, device="cpu")
    return all(
        extension.viewed(part)
        == (part.data_ptr(), tuple(part.shape), part.stride(), *_CODES[dtype], 1, 1, 0)
        for part in (whole, whole[1, 1:].t(), torch.nn.Parameter(whole[0, 0, 2:], False))
    )


def binder(schema: Schema, extension: Any) -> Direct | None:
    """Return ``Schema.bind`` with its check in C++, or None where C++ cannot check the call."""
    described = _described(schema)
    return None if described is None else extension.binder(described, schema.bind)


def caller(
    schema: Schema,
    extension: Any,
    threads: Callable[[], int],
    found: Direct | None = None,
    *,
    trusts: bool = False,
) -> Direct | None:
    """Return the op as one call, which returns ``NotImplemented`` if the check in C++ fails.

    Args:
        schema: schema of the op, or of the compiled function.
        extension: ``dpkern._C``.
        threads: returns the number of threads that may run.
        found: as in ``_native.kernel``.
        trusts: whether the tensors come from an op, which has checked that none is a negated view.
    """
    signature = schema.signature
    described = _compiled(schema, threads)
    results = [_result(result, signature) for result in signature.results or ()]
    if described is None or None in results:
        return None
    names = [parameter.name for parameter in signature.parameters]
    written = [p.name for p in signature.tensors if "written" in p.marks]
    if signature.number is not None:
        returns = _Returns.NUMBER
    elif signature.results is None:
        returns = _Returns.CHANGED
    else:
        returns = _Returns.RESULTS if results else _Returns.NOTHING
    if returns is _Returns.CHANGED and not written:
        return None
    made_into = signature.made_into
    described |= {
        "results": results,
        "out": names.index("out") if results and "out" in names else -1,
        "returns": returns,
        "changed": names.index(written[0]) if returns is _Returns.CHANGED else -1,
        "made_into": None if made_into is None else schema.function.__globals__[made_into],
        "found": found,
        "trusts": trusts,
    }
    return extension.caller(described)  # type: ignore[no-any-return]


def composed(
    schema: Schema,
    function: Schema,
    extension: Any,
    threads: Callable[[], int],
    *,
    prepare: Callable[..., tuple[Any, ...]],
    finish: Callable[..., Any],
) -> Direct | None:
    """Return an op as one call of a compiled function, in the manner of ``caller``.

    Args:
        schema: of the op.
        function: the function's. Its parameters take the op's arguments of their names, but for
            structs.
        extension: ``dpkern._C``.
        threads: how many may run.
        prepare: takes the op's arguments. It checks what neither look sees, and returns the
            function's other arguments in order, and behind them what ``finish`` needs. A tensor
            that the function fills may be None or a dtype: it is made. With ``NotImplemented`` or
            an error that is not dpkern's it leaves the call to Python.
        finish: ``finish(prepared, *filled, number)`` returns the op's result, from the tensors that
            the function has filled and the number that it returned.
    """
    described, compiled = _described(schema), _compiled(function, threads)
    if described is None or compiled is None:
        return None
    ours = [parameter.name for parameter in schema.signature.parameters]
    sizes = _names(schema.signature)
    return extension.composed(  # type: ignore[no-any-return]
        {
            "op": described | {"check": prepare},
            "function": compiled,
            "arguments": [
                ours.index(parameter.name)
                if parameter.name in ours and not isinstance(parameter, ObjectParameter)
                else -1
                for parameter in function.signature.parameters
            ],
            "sizes": [
                sizes.index(name) if name in sizes else -1 for name in _names(function.signature)
            ],
            "finish": finish,
            "refusal": DPKernError,
        }
    )


def _compiled(schema: Schema, threads: Callable[[], int]) -> dict[str, Any] | None:
    """Return a compiled function as C++ reads it."""
    signature, described = schema.signature, _described(schema)
    if described is None or signature.plan is not None:
        return None
    kernels = [signature.name]
    if kinds(signature):
        known = {getattr(torch, kind): f"{signature.name}_{kind}" for kind in kinds(signature)}
        kernels = [*(known.get(dtype, "") for dtype in _CODES), ""]
    return described | {
        "declaration": _bindings.declaration(signature),
        "kernels": kernels,
        "threads": threads,
    }


def _names(signature: Signature) -> list[str]:
    """Return the names of all sizes by place; those of a bound call come first."""
    dims = (dim for tensor in signature.tensors for dim in tensor.dims)
    return list(dict.fromkeys((*signature.sizes, *(dim for dim in dims if _is_name(dim)))))


def _is_name(dim: str) -> bool:
    return dim.lstrip("*").isidentifier() and dim != "_"


def _described(schema: Schema) -> dict[str, Any] | None:
    """Return the description of a signature that C++ reads, or None if it cannot check it."""
    signature, names = schema.signature, _names(schema.signature)
    single = {dim for tensor in signature.tensors if not tensor.many for dim in tensor.dims}
    if any(dim[0] == "*" and dim in single for dim in signature.lists):
        return None
    taken = {parameter.name for parameter in passed(signature)}
    parameters = []
    for parameter in signature.parameters:
        called = schema.call.parameters[parameter.name]
        made = {
            "name": parameter.name,
            "by_name": called.kind is called.KEYWORD_ONLY,
            "optional": getattr(parameter, "optional", False),
            "size": names.index(parameter.name) if parameter.name in names else -1,
            "passed": _passed(parameter) if parameter.name in taken else _Passed.NOT,
            **_look(parameter, names),
        }
        if called.default is not called.empty:
            made["standard"] = called.default
        if made["passed"] is _Passed.BYTES:
            made["pack"] = BYTES[getattr(parameter, "annotation", "")]
        parameters.append(made)
    sizes = signature.sizes
    return {
        "parameters": parameters,
        "sizes": len(names),
        "kinds_of_sizes": [(size[0] == "*") * (1 + (size in signature.lists)) for size in sizes],
        "check": schema.own_check,
        "trusts": False,
    }


def _passed(parameter: Parameter) -> _Passed:
    if isinstance(parameter, ObjectParameter):
        return _Passed.BYTES
    if not isinstance(parameter, NumberParameter):
        return _Passed.NOT
    if parameter.rule == "Word":
        return _Passed.WORD
    if parameter.many:
        return _Passed.INTEGERS if parameter.type == "int" else _Passed.FLOATS
    return {"int": _Passed.INTEGER, "float": _Passed.FLOAT, "bool": _Passed.BOOL}[parameter.type]


def _look(parameter: Parameter, names: list[str]) -> dict[str, Any]:
    """Return the constraints of one parameter."""
    if isinstance(parameter, TensorParameter):
        return _tensor(parameter, names)
    if isinstance(parameter, ChoiceParameter):
        return {"is": _Is.CHOICE, "options": parameter.options}
    if isinstance(parameter, DtypeParameter):
        return {"is": _Is.DTYPE, "dtypes": [_PLACES[dtype] for dtype in DTYPES[parameter.group]]}
    if isinstance(parameter, DeviceParameter):
        return {"is": _Is.DEVICE}
    if not isinstance(parameter, NumberParameter) or not has_range(parameter):
        return {"is": _Is.OBJECT}
    bounds = RANGES[parameter.rule]
    if bounds.type is bool:
        return {"is": _Is.BOOL}
    most = _LARGEST if bounds.most is None else bounds.most
    kind = _Is.INTEGER if bounds.type is int else _Is.FLOAT
    return {"is": kind, "least": bounds.least, "most": most, "above": bounds.open}


def _tensor(parameter: TensorParameter, names: list[str]) -> dict[str, Any]:
    fixed = [dim for dim in parameter.dims if dim[0] not in "*."]
    rest = parameter.dims[-1] if len(fixed) < len(parameter.dims) else None
    end = _NO_REST if rest is None else names.index(rest) if _is_name(rest) else _ANY_REST
    group = 1 if parameter.group in LEADING else 2 if parameter.group == "Sum" else 0
    return {
        "is": _Is.TENSOR,
        "written": "written" in parameter.marks,
        "filled": "filled" in parameter.marks,
        "group": group,
        "dtypes": [_PLACES[dtype] for dtype in DTYPES[parameter.group]],
        "dims": [names.index(dim) if _is_name(dim) else _ANY_SIZE for dim in fixed],
        "literals": [int(dim) if dim.isdecimal() else -1 for dim in fixed],
        "rest": end,
        "layout": _LAYOUTS[parameter.layout],
        "many": parameter.many,
        "repeated": "repeated" in parameter.marks,
        "one_dtype": parameter.group == "Summed",
        "alone": parameter.alone,
        "may_be_empty": "any_number" in parameter.marks,
    }


def _result(result: TensorParameter, signature: Signature) -> dict[str, Any] | None:
    """Return the description of a result, or None if only Python can compute its size."""
    sizes = list(signature.sizes)
    fixed = [dim for dim in result.dims if dim[0] != "*"]
    rest = result.dims[-1] if len(fixed) < len(result.dims) else None
    parts = [[part for part in dim.split("*") if not part.isdecimal()] for dim in fixed]
    needed = [*(part for dim in parts for part in dim), *([] if rest is None else [rest])]
    if any(name not in sizes or (name in signature.lists and name[0] == "*") for name in needed):
        return None
    numbers = [[int(part) for part in dim.split("*") if part.isdecimal()] for dim in fixed]
    group = 1 if result.group in LEADING else 2 if result.group == "Sum" else 0
    return {
        "group": group,
        "dtype": _PLACES[DTYPES[result.group][0]],
        "parts": [[sizes.index(part) for part in dim] for dim in parts],
        "literals": [math.prod(dim) for dim in numbers],
        "rest": _NO_REST if rest is None else sizes.index(rest),
    }


__all__ = ["Direct", "binder", "caller", "composed", "connect"]
