"""What every backend's kernel keeps to, whatever the op computes: ``conform`` asserts it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from dpkern.base.dtypes import DTYPES, sum_dtype
from dpkern.base.errors import BackendError
from dpkern.base.memory import is_dense
from dpkern.base.signature import LEADING, TensorParameter
from dpkern.bench.case import Case
from dpkern.bench.outcome import bits, changed, check_values, run, tensors_in


def conform(case: Case, backend: str) -> bool:
    """Assert all of it for one call; False if the backend refuses the call.

    Raises:
        AssertionError: with the call's name.
    """
    args = case.arguments()
    before = {name: bits(value) for name, value in args.items()}
    versions = _written_versions(case, args)
    try:
        result = run(case, backend, args)
    except BackendError:
        return False
    _check_declared(case, args, result)
    for name, value in args.items():
        if name not in changed(case):
            assert bits(value) == before[name], f"{case}: {name} is changed"
    for name, version in _written_versions(case, args).items():
        assert version > versions[name], f"{case}: autograd does not see that {name} is written"
    check_values(case, args, result)
    return True


def _written_versions(case: Case, args: dict[str, Any]) -> dict[str, int]:
    """Version counters of what the op writes, where there is something to write."""
    found: dict[str, int] = {}
    if not all(
        t.numel() for p in case.op.schema.signature.tensors for _, t in tensors_in(args[p.name], "")
    ):
        return found
    for parameter in case.op.schema.signature.tensors:
        if "written" in parameter.marks and args[parameter.name] is not None:
            for name, tensor in tensors_in(args[parameter.name], parameter.name):
                if tensor.numel():
                    found[name] = tensor._version
    return found


def _check_declared(case: Case, args: dict[str, Any], result: Any) -> None:
    """Results are of the declared dtypes and shapes, new, and without history."""
    given = {t.untyped_storage().data_ptr(): name for name, t in tensors_in(args, "") if t.numel()}
    for name, tensor in tensors_in(result, "result"):
        assert not tensor.requires_grad, f"{case}: {name} needs a gradient"
        owner = given.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None
        kept = owner is None or owner.lstrip(".").split("[")[0].split(".")[0] in changed(case)
        assert kept, f"{case}: {name} shares memory with {owner}"
    declared = case.op.schema.signature.results
    if declared is None:
        return
    parts = () if result is None else result if isinstance(result, tuple) else (result,)
    assert len(parts) == len(declared), f"{case}: {len(parts)} results"
    bound = case.op.schema.bind(**args)
    sizes = dict(zip(case.op.schema.signature.sizes, bound.sizes, strict=True))
    for tensor, wanted in zip(parts, declared, strict=True):
        where = f"{case}: {wanted.name}"
        assert tensor.dtype is _dtype(wanted, bound.kind), f"{where} is {tensor.dtype}"
        assert tensor.device == bound.device, f"{where} is on {tensor.device}"
        assert is_dense(tensor) or not tensor.numel(), f"{where} has strides {tensor.stride()}"
        dims = _dims(wanted, sizes, tensor.dim())
        fits = len(dims) == tensor.dim() and all(
            dim in (None, size) for size, dim in zip(tensor.shape, dims, strict=True)
        )
        assert fits, f"{where} has shape {list(tensor.shape)}"


def _dtype(wanted: TensorParameter, kind: torch.dtype | None) -> torch.dtype:
    if wanted.group in LEADING or wanted.group == "Sum":
        assert kind is not None
        return sum_dtype(kind) if wanted.group == "Sum" else kind
    return DTYPES[wanted.group][0]


def _dims(wanted: TensorParameter, sizes: dict[str, Any], count: int) -> list[int | None]:
    """The declared shape; None where the arguments do not bind a size."""
    dims: list[int | None] = []
    for dim in wanted.dims:
        if dim[0] in "*.":
            known = sizes.get(dim)
            left = count - len(dims) - (len(wanted.dims) - 1 - wanted.dims.index(dim))
            dims.extend([None] * left if known is None else known)
        else:
            parts = [sizes.get(part, part) for part in dim.split("*")]
            known = all(isinstance(part, int) or part.isdecimal() for part in parts)
            dims.append(math.prod(map(int, parts)) if known else None)
    return dims


POISON = (math.nan, math.inf, -math.inf)
SAMPLE = 1


def check_samples(case: Case, backend: str, poisons: Sequence[float] = POISON) -> None:
    """NaN or infinity in one sample stays there, and makes its own norm unusable.

    Raises:
        AssertionError: it does not.
    """
    op, size = case.op, case.facts.samples
    try:
        plain = run(case, backend, case.arguments())
    except BackendError:
        return
    results = op.schema.signature.results or ()
    for parameter in op.schema.signature.tensors:
        if size not in parameter.dims or parameter.name == "factors":
            continue
        for i, poison in enumerate(poisons):
            args = case.arguments()
            value = args[parameter.name]
            if value is None:
                continue
            tensors = value if isinstance(value, (list, tuple)) else [value]
            tensor = tensors[i % len(tensors)].detach()
            if not tensor.is_floating_point():
                continue
            own = tensor.select(parameter.dims.index(size), SAMPLE)
            own[(-1,) * own.dim()] = poison
            if "factors" in args:
                _check_dropped(case, backend, args, f"{parameter.name} {poison}")
                continue
            got = run(case, backend, args)
            parts = got if isinstance(got, tuple) else (got,)
            others = plain if isinstance(plain, tuple) else (plain,)
            for tensor, other, wanted in zip(parts, others, results, strict=True):
                if size not in wanted.dims:
                    continue
                axis = wanted.dims.index(size)
                where = f"{case}: {poison} in {parameter.name} reaches {wanted.name}"
                for sample in range(tensor.shape[axis]):
                    mine, theirs = tensor.select(axis, sample), other.select(axis, sample)
                    if sample != SAMPLE:
                        assert torch.equal(mine, theirs), f"{where} of another sample"
                    elif wanted.name in ("squares", "norms", "loss"):
                        seen = not bool(torch.isfinite(mine).any())
                        hidden = parameter.name in case.facts.blind
                        assert seen or hidden, f"{where} of its own sample by no means"


def _check_dropped(case: Case, backend: str, args: dict[str, Any], poison: str) -> None:
    """A sample of factor 0 contributes nothing, whatever it holds."""
    clean = case.arguments()
    for given in (args, clean):
        given["factors"].detach()[SAMPLE] = 0
    run(case, backend, args)
    run(case, backend, clean)
    for name in changed(case):
        assert bits(args[name]) == bits(clean[name]), f"{case}: {poison} of factor 0 in {name}"
