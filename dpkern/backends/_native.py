"""The compiled kernels' way in: a checked call's tensors travel as addresses, options as codes.

``csrc/bindings/generate.py`` writes the other side of these calls from the same signatures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.graph import increment_version

from .._dispatch import OPS, Kernel
from ..base.schema import DTYPES, FLOATS, Bound, Schema, sum_dtype
from ..base.signature import LEADING, ChoiceParameter, TensorParameter, passed


def kernel(name: str, extension: Any, threads: Callable[[], int]) -> Kernel:
    """The compiled kernel of an op.

    Args:
        name: of the op, ``stem.function``.
        extension: ``dpkern._C``.
        threads: how many may run.
    """
    schema = OPS[name].schema
    function = schema.signature.name
    kinds = {kind: f"{function}_{str(kind).removeprefix('torch.')}" for kind in FLOATS}
    kernels = {kind: getattr(extension, called) for kind, called in kinds.items()}

    def refuse(bound: Bound) -> str | None:
        if bound.device.type != "cpu":
            return f"runs on the CPU, got a tensor on {bound.device}"
        if bound.kind not in kernels:
            return f"has float32 and float64 operands, got {str(bound.kind).removeprefix('torch.')}"
        return None

    return Kernel(caller(schema, kernels, threads), refuse)


def caller(
    schema: Schema, kernels: dict[torch.dtype, Callable[..., Any]], threads: Callable[[], int]
) -> Callable[[Bound], Any]:
    """A function of a checked call that allocates results, runs its kernel and returns them.

    Args:
        schema: of the op.
        kernels: the compiled kernel by the call's dtype.
        threads: how many may run.
    """
    namespace: dict[str, Any] = {
        "_kernels": kernels,
        "_threads": threads,
        "_empty": torch.empty,
        "_sum_dtype": sum_dtype,
        "_changed": increment_version,
        **{f"_{name}": dtypes[0] for name, dtypes in DTYPES.items()},
    }
    for parameter in schema.signature.parameters:
        if isinstance(parameter, ChoiceParameter):
            codes = {option: code for code, option in enumerate(parameter.options)}
            namespace[f"_codes_{parameter.name}"] = codes
    text = "\n".join(_source(schema))
    exec(compile(text, f"<call {schema.signature.name}>", "exec"), namespace)  # noqa: S102
    return namespace["run"]  # type: ignore[no-any-return]


def _source(schema: Schema) -> Iterator[str]:
    signature = schema.signature
    names = "".join(f"{parameter.name}, " for parameter in signature.parameters)
    sizes = "".join(f"_s_{size.lstrip('*')}, " for size in signature.sizes)
    yield "def run(bound):"
    yield f"    ({names}), ({sizes}), kind, device, plan = bound"
    results = signature.results or ()
    for result in results:
        shape = "".join(
            f"*_s_{dim[1:]}, " if dim.startswith("*") else f"_s_{dim}, " if dim.isidentifier() else f"{dim}, "
            for dim in result.dims
        )
        yield f"    {result.name} = _empty(({shape}), dtype={_dtype(result)}, device=device)"
    values = [_value(parameter) for parameter in passed(signature)]
    values += [f"{result.name}.data_ptr()" for result in results]
    lists = {dim for tensor in signature.tensors if tensor.many for dim in tensor.dims}
    for size in signature.sizes:
        local = f"_s_{size.lstrip('*')}"
        values.append(f"[_s.numel() for _s in {local}]" if size in lists and size[0] == "*" else local)
    yield f"    _kernels[kind]({', '.join(values)}, _threads())"
    for tensor in signature.tensors:
        if "written" in tensor.marks:
            yield f"    _changed({tensor.name})"
    if len(results) == 1:
        yield f"    return {results[0].name}"
    elif results:
        yield f"    return {', '.join(result.name for result in results)}"


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
    return name


__all__ = ["caller", "kernel"]
