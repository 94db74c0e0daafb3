"""The ops in ``torch.ops.dpkern``: their results there, where these are more than tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..base.dispatch import OPS, Op
from ..base.library import Operator, Results
from ..base.schema import BoundCall, Schema
from ._clip_request import ClipRequest
from .spectral.bins import kept_bins


def _named(schema: Schema, bound: BoundCall) -> dict[str, Any]:
    return dict(zip((p.name for p in schema.signature.parameters), bound.args, strict=True))


def _convolution(args: dict[str, Any]) -> dict[str, Any]:
    x, kernel = args["x"], args["kernel_size"]
    axes = (kernel,) * (x.dim() - 2) if isinstance(kernel, int) else kernel
    return {"c": x.shape[1] // args["groups"], "*K": axes}


_SIZES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "ghost.conv_gradient": _convolution,
    "spectral.conv_bins": lambda args: {"K": len(kept_bins(args["band"]))},
    "spectral.whitened_bins": lambda args: {"K": len(kept_bins(args["band"]))},
    "spectral.filtered": lambda args: {"*R": args["rows"]},
}
"""Sizes of results that no tensor has."""


def _declared(op: Op[..., Any]) -> Results:
    """Return the results of an op whose signature says which tensors it makes."""
    schema, sizes = op.schema, _SIZES.get(op.name)

    def empty(bound: BoundCall) -> tuple[Any, ...]:
        return schema.results(bound, sizes(_named(schema, bound)) if sizes else {})

    def of(made: Any) -> tuple[Any, ...]:
        parts = (made,) if isinstance(made, torch.Tensor) else made or ()
        return tuple(part.contiguous() for part in parts)  # as the fakes are

    count = len(schema.signature.results or ())
    return Results(("Tensor",) * count, of, empty, count)


def _counted(bound: BoundCall) -> torch.Tensor:
    return torch.empty((), dtype=torch.int64, device=bound.device)


def _tensor_of(count: int | torch.Tensor) -> torch.Tensor:
    return count if isinstance(count, torch.Tensor) else torch.tensor(count, device="cpu")


def _clipped(op: Op[..., Any]) -> Results:
    """Return the sums, norms and the number of dropped samples of a ``ClipResult``."""

    def of(made: Any) -> tuple[Any, ...]:
        dropped = _tensor_of(made.nonfinite)
        return list(made.sums), made.norms, dropped

    def empty(bound: BoundCall) -> tuple[Any, ...]:
        args = _named(op.schema, bound)
        args.pop("out")
        request = ClipRequest.of(**args)
        dtype = request.sum_dtype
        sums = [torch.empty(t.shape[1:], dtype=dtype, device=t.device) for t in request.tensors]
        norms = torch.empty(len(request.tensors[0]), dtype=torch.float64, device=bound.device)
        return sums, norms, _counted(bound)

    return Results(("Tensor[]", "Tensor", "Tensor"), of, empty, 1)


def _unclipped(op: Op[..., Any]) -> Results:
    """Return the number of sums that were not finite."""

    def of(made: Any) -> tuple[Any, ...]:
        return (_tensor_of(made),)

    return Results(("Tensor",), of, lambda bound: (_counted(bound),), 0)


def _nothing(op: Op[..., Any]) -> Results:
    """Return the results of an op that returns the tensor that it has written."""
    return Results((), lambda made: (), lambda bound: (), 0)


_OTHERS: dict[str, Callable[[Op[..., Any]], Results]] = {
    "ClipResult": _clipped,
    "Count": _unclipped,
    "Tensor": _nothing,
}
"""Results that are no tensors, by the return type of the op."""


def _results(op: Op[..., Any]) -> Results:
    if op.schema.signature.results is not None:
        return _declared(op)
    return _OTHERS[op.schema.function.__annotations__["return"]](op)


def _operators(op: Op[..., Any]) -> list[Operator]:
    """Return the op's overloads."""
    results, out = _results(op), op.schema.call.parameters.get("out")
    made = [Operator(op.operator, op.schema, op, results)]
    if out is not None and out.default is None:
        made.append(Operator(op.operator, op.schema, op, results, into_out=True))
    return made


OPERATORS = {made.name: made for op in OPS.values() for made in _operators(op)}
"""Overloads by name: ``linear_norm``, ``clip_sum``, ``clip_sum.out``."""
for _operator in OPERATORS.values():
    _operator.define()

__all__ = ["OPERATORS"]
