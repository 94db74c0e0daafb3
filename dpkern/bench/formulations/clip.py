"""Norms and clipped sums of gradients with torch alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ._formulation import Arguments, Formulation

BLOCK = 1 << 17
"""Numbers of a block whose buffers stay in a core's cache."""


def _rows(args: Arguments) -> list[torch.Tensor]:
    grads = args["grads"]
    each = [grads] if isinstance(grads, torch.Tensor) else grads
    return [g.flatten(1) for g in each]


def _norm_of_all(args: Arguments) -> Callable[[], Any]:
    rows = _rows(args)
    if len(rows) == 1:
        return lambda: torch.linalg.vector_norm(rows[0], dim=1)
    norms = torch.empty(len(rows), len(rows[0]))

    def call() -> Any:
        for part, made in zip(rows, norms, strict=True):
            torch.linalg.vector_norm(part, dim=1, out=made)
        return torch.linalg.vector_norm(norms, dim=0)

    return call


def _sum_of_squares(args: Arguments) -> Callable[[], Any]:
    rows = _rows(args)
    return lambda: sum(torch.einsum("bi,bi->b", part, part) for part in rows).sqrt()  # type: ignore[union-attr]


def _clipped(norms: Callable[[], torch.Tensor], args: Arguments) -> Callable[[], Any]:
    rows, bound, outs = _rows(args), args["max_grad_norm"], [o.flatten() for o in args["out"]]

    def call() -> None:
        factors = (bound / norms()).clamp_(max=1.0)
        for part, out in zip(rows, outs, strict=True):
            out.addmv_(part.t(), factors)

    return call


def _truncated(norms: Callable[[], torch.Tensor], args: Arguments) -> Callable[[], Any]:
    rows, bound, unit = _rows(args), args["max_grad_norm"], args["unit"]
    outs = [o.flatten() for o in args["out"]]

    def call() -> None:
        factors = (bound / norms()).clamp_(max=1.0).div_(unit)
        for part, out in zip(rows, outs, strict=True):
            out.add_((part * factors[:, None]).to(torch.int32).sum(0))

    return call


def _truncated_by_blocks(rows_of_block: int | None, args: Arguments) -> Callable[[], Any]:
    """Return the sum of blocks of samples, in buffers that stay in a core's cache."""
    norms, rows = _norm_of_all(args), _rows(args)
    bound, unit = args["max_grad_norm"], args["unit"]
    outs = [o.flatten() for o in args["out"]]
    each = rows_of_block or max(1, BLOCK // sum(part.shape[1] for part in rows))
    blocks = [
        (slice(first, first + each), part[first : first + each], out, scaled, whole)
        for part, out in zip(rows, outs, strict=True)
        for scaled in [part.new_empty(each, part.shape[1])]
        for whole in [torch.empty(scaled.shape, dtype=torch.int32)]
        for first in range(0, len(part), each)
    ]

    def call() -> None:
        factors = (bound / norms()).clamp_(max=1.0).div_(unit)[:, None]
        for some, part, out, scaled, whole in blocks:
            count = len(part)
            torch.mul(part, factors[some], out=scaled[:count])
            whole[:count].copy_(scaled[:count])
            out.add_(whole[0] if each == 1 else whole[:count].sum(0, dtype=torch.int32))

    return call


def _is_flat(args: Arguments) -> bool:
    return bool(args["style"] == "flat" and args["p"] == 2 and args["out"] is not None)


def _is_float(args: Arguments) -> bool:
    return _is_flat(args) and bool(args["arithmetic"] == "float")


def _is_exact(args: Arguments) -> bool:
    return _is_flat(args) and bool(args["arithmetic"] == "exact")


FORMULATIONS = {
    "clip.sample_norm": (
        Formulation("vector_norm", _norm_of_all, lambda args: args["p"] == 2),
        Formulation("einsum", _sum_of_squares, lambda args: args["p"] == 2),
    ),
    "clip.clip_sum": (
        Formulation("vector_norm, addmv", lambda a: _clipped(_norm_of_all(a), a), _is_float),
        Formulation("einsum, addmv", lambda a: _clipped(_sum_of_squares(a), a), _is_float),
        Formulation(
            "vector_norm, int32",
            lambda a: _truncated(_norm_of_all(a), a),
            _is_exact,
            compiles=True,
        ),
        Formulation("einsum, int32", lambda a: _truncated(_sum_of_squares(a), a), _is_exact),
        Formulation("int32, block by block", partial(_truncated_by_blocks, None), _is_exact),
        Formulation("int32, row by row", partial(_truncated_by_blocks, 1), _is_exact),
    ),
}
