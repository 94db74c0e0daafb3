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

from ...base.dispatch import OPS
from ...base.dtypes import DTYPES, sum_dtype
from ...base.kernel import Kernel
from ...base.schema import BoundCall, Schema
from ...base.signature import (
    LEADING,
    ChoiceParameter,
    DeviceParameter,
    ObjectParameter,
    TensorParameter,
    kinds,
    passed,
)
from . import _direct
from ._structs import BYTES

P = ParamSpec("P")
R = TypeVar("R")
Makers = Mapping[str, Callable[[BoundCall], torch.Tensor]]
Found = Callable[..., None]
"""Looks at what a kernel has counted, and at the op's arguments and results."""


def kernel(
    name: str,
    extension: Any,
    threads: Callable[[], int],
    results: Makers | None = None,
    found: Found | None = None,
) -> Kernel:
    """Return the compiled kernel of an op.

    Args:
        name: of the op, ``stem.function``.
        extension: ``dpkern._C``.
        threads: how many may run.
        results: makes results, by their names, that lie in memory as the kernel wants it.
        found: receives what a kernel that counts has counted, the call and its results.
    """
    schema = OPS[name].schema
    kernels = _kernels(schema, extension)
    run = caller(schema, kernels, threads, results or {}, found)
    direct = None
    if not results and _direct.connect(extension):
        direct = _direct.caller(schema, extension, threads, found)
    return Kernel(run, refusal(schema, kernels), direct)


def refusal(schema: Schema, kernels: Mapping[Any, Any]) -> Callable[[BoundCall], str | None]:
    """Return why a compiled kernel cannot run a checked call, or None."""
    placed = any(isinstance(p, DeviceParameter) for p in schema.signature.parameters)
    names = [parameter.name for parameter in schema.signature.parameters]
    out = names.index("out") if placed and "out" in names else None

    def refuse(bound: BoundCall) -> str | None:
        if bound.device != CPU and bound.device.type != "cpu":
            # What is made out of nothing is made here and moved.
            moved = placed and (out is None or bound.args[out] is None)
            if not moved:
                return f"runs on the CPU, got a tensor on {bound.device}"
        if bound.kind not in kernels:
            return f"has float32 and float64 operands, got {str(bound.kind).removeprefix('torch.')}"
        return None

    return refuse


CPU = torch.device("cpu")


def _empty_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=CPU)


empty = _empty_tensor
"""Return a new tensor on the CPU, contiguous and not filled: in C++ where that is connected."""


def _never(*args: Any, **kwargs: Any) -> Any:
    return NotImplemented


class CompiledFunction(Generic[P, R]):
    """A compiled kernel that Python code calls piece by piece; its signature is its declaration."""

    def __init__(self, function: Callable[P, R]) -> None:
        self._schema = Schema(function, None)
        self._connection: tuple[Any, Callable[[], int]] | None = None
        self.direct: Callable[..., Any] = _never
        """The call in C++, which answers ``NotImplemented`` where one look is not enough."""
        self.__doc__ = function.__doc__
        _ALL.append(self)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        made = self.direct(*args, **kwargs)
        if made is not NotImplemented:
            return made  # type: ignore[no-any-return]
        return self._run(self._schema.bind(*args, **kwargs))  # type: ignore[no-any-return]

    def connect(self, extension: Any, threads: Callable[[], int]) -> None:
        """Take the kernel from ``dpkern._C``."""
        self._connection = extension, threads
        if _direct.connect(extension):
            found = _direct.caller(self._schema, extension, threads, trusts=True)
            self.direct = _never if found is None else found

    def run(
        self,
        args: tuple[Any, ...],
        sizes: tuple[Any, ...],
        kind: torch.dtype | None,
        device: torch.device,
    ) -> R:
        """Call with what an op has checked: all arguments and sizes in the signature's order."""
        return self._run((args, sizes, kind, device, None))  # type: ignore[no-any-return]

    def carrying_out(
        self, op: Schema, prepare: Callable[..., Any], finish: Callable[..., Any]
    ) -> Callable[..., Any] | None:
        """Return an op as one call of this connected function (``_direct.composed``)."""
        assert self._connection is not None
        extension, threads = self._connection
        return _direct.composed(
            op, self._schema, extension, threads, prepare=prepare, finish=finish
        )

    @cached_property
    def _run(self) -> Callable[[Any], Any]:
        assert self._connection is not None, "the compiled module is loaded"
        extension, threads = self._connection
        return caller(self._schema, _kernels(self._schema, extension), threads, {})


_ALL: list[CompiledFunction[..., Any]] = []


def compiled(function: Callable[P, R]) -> CompiledFunction[P, R]:
    """Declare a compiled kernel ``csrc/cpu`` that is no op; the function has no body."""
    return CompiledFunction(function)


def connect(extension: Any, threads: Callable[[], int]) -> None:
    """Connect every ``compiled`` function with its kernel."""
    global empty
    if _direct.connect(extension):
        empty = extension.empty
    for function in _ALL:
        function.connect(extension, threads)


def _kernels(schema: Schema, extension: Any) -> dict[torch.dtype | None, Callable[..., Any]]:
    """Return the compiled kernel by the dtype of a call."""
    name, found = schema.signature.name, kinds(schema.signature)
    if not found:
        return {None: getattr(extension, name)}
    return {getattr(torch, kind): getattr(extension, f"{name}_{kind}") for kind in found}


def caller(
    schema: Schema,
    kernels: Mapping[torch.dtype | None, Callable[..., Any]],
    threads: Callable[[], int],
    results: Makers,
    found: Found | None = None,
) -> Callable[[BoundCall], Any]:
    """Return a function of a checked call that allocates results, runs its kernel and returns them.

    Args:
        schema: of the op.
        kernels: the compiled kernel by the call's dtype.
        threads: how many may run.
        results: makes some of the results.
        found: as of ``kernel``.
    """
    namespace: dict[str, Any] = {
        "_kernels": kernels,
        "_only": kernels.get(None),
        "_threads": threads,
        "_found": found,
        "_empty": torch.empty,
        "_cpu": CPU,
        "_places": {kind: place for place, kind in enumerate(DTYPES["Summed"])},
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
    if schema.signature.made_into is not None:
        namespace["_made"] = schema.function.__globals__[schema.signature.made_into]
    text = "\n".join(_source(schema, results, found))
    exec(compile(text, f"<call {schema.signature.name}>", "exec"), namespace)
    return namespace["run"]  # type: ignore[no-any-return]


def _source(schema: Schema, makers: Makers, found: Found | None) -> Iterator[str]:
    signature = schema.signature
    names = "".join(f"{parameter.name}, " for parameter in signature.parameters)
    sizes = "".join(f"_s_{size.lstrip('*')}, " for size in signature.sizes)
    yield "def run(bound):"
    plan = "_" if signature.plan is None else "plan"
    yield f"    ({names}), ({sizes}), kind, device, {plan} = bound"
    results = signature.results or ()
    room = bool(results) and any(parameter.name == "out" for parameter in signature.parameters)
    made = ", ".join(result.name for result in results)
    whole = f"_made({made})" if signature.made_into else made
    indent = "    "
    if room:
        yield "    if out is not None:"
        yield f"        {made} = out"
        yield "        _changed(out)"
        yield "    else:"
        indent = "        "
    placed = any(isinstance(parameter, DeviceParameter) for parameter in signature.parameters)
    for result in results:
        new = _empty(result, "_cpu" if placed else "device")
        if result.name in makers:
            new = f"_make_{result.name}(bound)"
        yield f"{indent}{result.name} = {new}"
    counts = {parameter.name for parameter in signature.parameters}
    values = [_value(parameter) for parameter in passed(signature)]
    values += [f"{result.name}.data_ptr()" for result in results]
    for size in signature.sizes:
        if size not in counts:
            values.append(_number(size, in_list=size in signature.lists))
    called = "_kernels[kind]" if kinds(signature) else "_only"
    answer = "_answer = " if signature.number or found is not None else ""
    yield f"    {answer}{called}({', '.join(values)}, _threads())"
    for tensor in signature.tensors:
        if "written" in tensor.marks and not (room and tensor.name == "out"):
            yield f"    _changed({tensor.name})"
    if found is not None:
        yield f"    if _answer: _found(_answer, bound, ({made},))"
    if signature.number:
        yield "    return _answer"
    elif placed:
        yield f"    return {made} if device == _cpu else {made}.to(device)"
    elif results:
        yield f"    return {whole}"
    elif signature.results is None:  # the tensor that it changed
        changed = next(tensor.name for tensor in signature.tensors if "written" in tensor.marks)
        yield f"    return {changed}"


def _number(size: str, *, in_list: bool) -> str:
    local = f"_s_{size.lstrip('*')}"
    if size[0] != "*":
        return local
    return f"[_prod(_s) for _s in {local}]" if in_list else f"_prod({local})"


def _empty(result: TensorParameter, device: str) -> str:
    shape = "".join(f"{_extent(dim)}, " for dim in result.dims)
    return f"_empty(({shape}), dtype={_dtype(result)}, device={device})"


def _extent(dim: str) -> str:
    if dim.startswith("*"):
        return f"*_s_{dim[1:]}"
    return "*".join(part if part.isdigit() else f"_s_{part}" for part in dim.split("*"))


def _dtype(result: TensorParameter) -> str:
    if result.group == "Sum":
        return "_sum_dtype(kind)"
    return "kind" if result.group in LEADING else f"_{result.group}"


def _value(parameter: Any) -> str:
    name: str = parameter.name
    if isinstance(parameter, ChoiceParameter):
        return f"_codes_{name}[{name}]"
    if isinstance(parameter, TensorParameter):
        kind = f", _places[{name}[0].dtype] if {name} else 2" if parameter.group == "Summed" else ""
        if parameter.many:
            return f"[_t.data_ptr() for _t in {name}]{kind}"
        if parameter.layout == "transposable":
            return f"{name}.data_ptr(), not {name}.is_contiguous()"
        address = f"{name}.data_ptr()"
        return f"0 if {name} is None else {address}" if parameter.optional else address
    if isinstance(parameter, ObjectParameter):
        made = f"_bytes_{parameter.annotation}({name})"
        return f"b'' if {name} is None else {made}" if parameter.optional else made
    return name


__all__ = ["CompiledFunction", "caller", "compiled", "connect", "kernel", "refusal"]
