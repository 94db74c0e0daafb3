"""The compiled kernels' way in: a checked call's tensors travel as addresses, options as codes.

``_bindings`` writes the other side of these calls from the same signatures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch.autograd.graph import increment_version

from .._dispatch import OPS, Kernel
from ..base.schema import DTYPES, Bound, Schema, sum_dtype
from ..base.signature import (
    LEADING,
    ChoiceParameter,
    ObjectParameter,
    TensorParameter,
    kinds,
    passed,
)
from ._structs import BYTES

P = ParamSpec("P")
R = TypeVar("R")
Makers = Mapping[str, Callable[[Bound], torch.Tensor]]


def kernel(
    name: str, extension: Any, threads: Callable[[], int], results: Makers | None = None
) -> Kernel:
    """The compiled kernel of an op.

    Args:
        name: of the op, ``stem.function``.
        extension: ``dpkern._C``.
        threads: how many may run.
        results: makes results, by their names, that lie in memory as the kernel wants it.
    """
    schema = OPS[name].schema
    kernels = _kernels(schema, extension)

    def refuse(bound: Bound) -> str | None:
        if bound.device.type != "cpu":
            return f"runs on the CPU, got a tensor on {bound.device}"
        if bound.kind not in kernels:
            return f"has float32 and float64 operands, got {str(bound.kind).removeprefix('torch.')}"
        return None

    return Kernel(caller(schema, kernels, threads, results or {}), refuse)


class Compiled(Generic[P, R]):
    """A compiled kernel that Python code calls piece by piece; its signature is its declaration."""

    def __init__(self, function: Callable[P, R]) -> None:
        self._schema = Schema(function, None)
        self._connection: tuple[Any, Callable[[], int]] | None = None
        self.__doc__ = function.__doc__
        _ALL.append(self)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._run(self._schema.bind(*args, **kwargs))  # type: ignore[no-any-return]

    def connect(self, extension: Any, threads: Callable[[], int]) -> None:
        """Take the kernel from ``dpkern._C``."""
        self._connection = extension, threads

    @cached_property
    def _run(self) -> Callable[[Bound], Any]:
        assert self._connection is not None, "the compiled module is loaded"
        extension, threads = self._connection
        return caller(self._schema, _kernels(self._schema, extension), threads, {})


_ALL: list[Compiled[..., Any]] = []


def compiled(function: Callable[P, R]) -> Compiled[P, R]:
    """Declare a compiled kernel ``csrc/cpu`` that is no op; the function has no body."""
    return Compiled(function)


def connect(extension: Any, threads: Callable[[], int]) -> None:
    """Connect every ``compiled`` function with its kernel."""
    for function in _ALL:
        function.connect(extension, threads)


def _kernels(schema: Schema, extension: Any) -> dict[torch.dtype | None, Callable[..., Any]]:
    """The compiled kernel by the dtype of a call."""
    name, found = schema.signature.name, kinds(schema.signature)
    if not found:
        return {None: getattr(extension, name)}
    return {getattr(torch, kind): getattr(extension, f"{name}_{kind}") for kind in found}


def caller(
    schema: Schema,
    kernels: Mapping[torch.dtype | None, Callable[..., Any]],
    threads: Callable[[], int],
    results: Makers,
) -> Callable[[Bound], Any]:
    """A function of a checked call that allocates results, runs its kernel and returns them.

    Args:
        schema: of the op.
        kernels: the compiled kernel by the call's dtype.
        threads: how many may run.
        results: makes some of the results.
    """
    namespace: dict[str, Any] = {
        "_kernels": kernels,
        "_threads": threads,
        "_empty": torch.empty,
        "_prod": math.prod,
        "_sum_dtype": sum_dtype,
        "_changed": increment_version,
        **{f"_{name}": dtypes[0] for name, dtypes in DTYPES.items()},
        **{f"_bytes_{name}": pack for name, pack in BYTES.items()},
        **{f"_make_{name}": make for name, make in results.items()},
    }
    for parameter in schema.signature.parameters:
        if isinstance(parameter, ChoiceParameter):
            codes = {option: code for code, option in enumerate(parameter.options)}
            namespace[f"_codes_{parameter.name}"] = codes
    text = "\n".join(_source(schema, results))
    exec(compile(text, f"<call {schema.signature.name}>", "exec"), namespace)  # noqa: S102
    return namespace["run"]  # type: ignore[no-any-return]


def _source(schema: Schema, makers: Makers) -> Iterator[str]:
    signature = schema.signature
    names = "".join(f"{parameter.name}, " for parameter in signature.parameters)
    sizes = "".join(f"_s_{size.lstrip('*')}, " for size in signature.sizes)
    yield "def run(bound):"
    yield f"    ({names}), ({sizes}), kind, device, plan = bound"
    results = signature.results or ()
    for result in results:
        made = f"_make_{result.name}(bound)" if result.name in makers else _empty(result)
        yield f"    {result.name} = {made}"
    values = [_value(parameter) for parameter in passed(signature)]
    values += [f"{result.name}.data_ptr()" for result in results]
    for size in signature.sizes:
        local = f"_s_{size.lstrip('*')}"
        if size[0] == "*":
            local = f"[_prod(_s) for _s in {local}]" if size in signature.lists else f"_prod({local})"
        values.append(local)
    answer = "_answer = " if signature.number else ""
    yield f"    {answer}_kernels[kind]({', '.join(values)}, _threads())"
    for tensor in signature.tensors:
        if "written" in tensor.marks:
            yield f"    _changed({tensor.name})"
    if signature.number:
        yield "    return _answer"
    elif len(results) == 1:
        yield f"    return {results[0].name}"
    elif results:
        yield f"    return {', '.join(result.name for result in results)}"


def _empty(result: TensorParameter) -> str:
    shape = "".join(
        f"*_s_{dim[1:]}, " if dim[0] == "*" else f"_s_{dim}, " if dim.isidentifier() else f"{dim}, "
        for dim in result.dims
    )
    return f"_empty(({shape}), dtype={_dtype(result)}, device=device)"


def _dtype(result: TensorParameter) -> str:
    if result.group == "Sum":
        return "_sum_dtype(kind)"
    return "kind" if result.group in LEADING else f"_{result.group}"


def _value(parameter: Any) -> str:
    name: str = parameter.name
    if isinstance(parameter, ChoiceParameter):
        return f"_codes_{name}[{name}]"
    if isinstance(parameter, TensorParameter):
        if parameter.many:
            return f"[_t.data_ptr() for _t in {name}]"
        if parameter.layout == "transposable":
            return f"{name}.data_ptr(), not {name}.is_contiguous()"
        return f"0 if {name} is None else {name}.data_ptr()" if parameter.optional else f"{name}.data_ptr()"
    if isinstance(parameter, ObjectParameter):
        return f"_bytes_{parameter.annotation}({name})"
    return name


__all__ = ["Compiled", "caller", "compiled", "connect", "kernel"]
