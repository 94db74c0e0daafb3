"""Norms and clipped sums of gradients with torch alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ._formulation import Arguments, Formulation


def _rows(args: Arguments) -> list[torch.Tensor]:
    grads = args["grads"]
    each = [grads] if isinstance(grads, torch.Tensor) else grads
    return [g.flatten(1) for g in each]


def _norm_of_all(args: Arguments) -> Callable[[], Any]:
    rows = _rows(args)
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
        Formulation("vector_norm, int32", lambda a: _truncated(_norm_of_all(a), a), _is_exact),
        Formulation("einsum, int32", lambda a: _truncated(_sum_of_squares(a), a), _is_exact),
    ),
}
