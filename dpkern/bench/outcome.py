"""Compare what a call returns and writes with the op's reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from ..ops.testing import assert_close
from .case import Case

Tensors = dict[str, torch.Tensor]


def tensors_in(tree: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of an argument or a result, by a readable name."""
    if isinstance(tree, torch.Tensor):
        yield name, tree
    elif isinstance(tree, dict):
        for key, item in tree.items():
            yield from tensors_in(item, f"{name}.{key}")
    elif isinstance(tree, (list, tuple)):
        for i, item in enumerate(tree):
            yield from tensors_in(item, f"{name}[{i}]")
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for part in dataclasses.fields(tree):
            yield from tensors_in(getattr(tree, part.name), f"{name}.{part.name}")


def bits(tree: Any) -> list[Any]:
    """Return what an argument holds, NaN included."""
    if isinstance(tree, (bool, int, float, str)):
        return [tree]
    return [
        t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b""
        for _, t in tensors_in(tree, "")
    ]


def run(case: Case, backend: str | None, args: dict[str, Any]) -> Any:
    """Return the op's result for arguments by name."""
    return case.op(**args, backend=backend)


def changed(case: Case) -> set[str]:
    """Return the names of arguments that the op changes."""
    marked = {p.name for p in case.op.schema.signature.tensors if "written" in p.marks}
    return marked | case.facts.changes


def outcome(case: Case, args: dict[str, Any], result: Any) -> Tensors:
    """Return results and written arguments, by name."""
    found = dict(tensors_in(result, "result"))
    for name in changed(case):
        if args.get(name) is not None:
            found |= dict(tensors_in(args[name], name))
    return found


BELOW = 1e-8
"""Share by which the reference may lie above a true value: more than it does in float64."""
_REFERENCES: dict[tuple[Any, ...], Tensors] = {}
"""Outcomes of the references of one op, for the backends that are compared one after the other."""


def reference(case: Case) -> Tensors:
    """Return the outcome of the op's reference, in float64 unless rounding is part of the case."""
    key = case.op, case.name, case.kind, str(sorted(case.sizes.items()))
    if key not in _REFERENCES:
        if any(known[0] is not case.op for known in _REFERENCES):
            _REFERENCES.clear()
        args = case.arguments(wide=not case.is_rounded_alike)
        _REFERENCES[key] = outcome(case, args, run(case, "reference", args))
    return _REFERENCES[key]


def scale_of(want: torch.Tensor) -> float:
    """Return the largest magnitude of a tensor whose numbers are all below 1, or 1.

    ``assert_close`` allows the tolerance of 1 to small tensors: a bound of rounding errors of 1e-5
    could be anything.
    """
    largest = float(want.double().abs().max()) if want.numel() else 0.0
    return largest if 0 < largest < 1 else 1.0


def check_values(case: Case, args: dict[str, Any], result: Any) -> None:
    """Check for the reference's bits, or for its float64 within the op's bound.

    Raises:
        AssertionError: another value, with the call's name.
    """
    wanted, got = reference(case), outcome(case, args, result)
    if got.keys() != wanted.keys():
        raise AssertionError(f"{case}: {', '.join(got)} instead of {', '.join(wanted)}")
    for name, tensor in got.items():
        mine, want = tensor.detach().cpu(), wanted[name].detach()
        if not case.facts.bits:
            bound, from_above = case.facts.bounds[case.kind or torch.float64], case.facts.from_above
            near = want
            if name in from_above and case.facts.looser > 1:
                near = mine.double().clamp(want.double(), case.facts.looser * want.double())
            assert_close(f"{case}: {name}", mine, near, bound * scale_of(want))
            if name in from_above and bool((mine < want - BELOW * want.abs()).any()):
                raise AssertionError(f"{case}: {name} is below the true value")
        elif bits(mine) != bits(want):
            raise AssertionError(f"{case}: {name} has other bits than the reference")


def check_unchanged(case: Case, args: dict[str, Any], before: dict[str, Any]) -> None:
    """Check that a call wrote nothing besides what its op declares as written.

    Raises:
        AssertionError: an argument that changed, by its name.
    """
    for name in args.keys() - changed(case):
        pairs = zip(tensors_in(args[name], name), tensors_in(before[name], name), strict=True)
        for (part, now), (_, then) in pairs:
            if not torch.equal(_bytes(now), _bytes(then)):
                raise AssertionError(f"{case}: {part} was changed, and is not declared as written")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def check_close(case: Case, got: Tensors, tolerance: float) -> None:
    """Check another formulation by its values: its dtypes may be others, and it may return less.

    Raises:
        AssertionError: another value, with the call's name, or nothing in common.
    """
    wanted = reference(case)
    common = [name for name in got if name in wanted]
    if not common:
        raise AssertionError(f"{case}: none of {', '.join(wanted)}")
    for name in common:
        mine = got[name].detach().cpu()
        assert_close(f"{case}: {name}", mine, wanted[name].detach(), tolerance)


def failure(error: BaseException) -> dict[str, str]:
    """Return how a row without numbers names its error: lack of memory is no wrong result."""
    text = f"{type(error).__name__}: {error}"
    lacking = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError)
        and any(part in text for part in ("can't allocate memory", "out of memory"))
    )
    return {"no memory" if lacking else "wrong": text[:500]}
