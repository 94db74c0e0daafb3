"""Ghost ops of linear layers."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import increment_version

from . import direct, gram, weighted
from .operands import Operands, too_large


def _refuse(a: torch.Tensor, g: torch.Tensor, *_: Any, **__: Any) -> str | None:
    return too_large(a, g, a.shape[0] * a.shape[1])


def _refuse_norm(a: torch.Tensor, g: torch.Tensor, **_: Any) -> str | None:
    return _refuse(a, g) or direct.too_long(a, a.shape[1])


def _norm(a: torch.Tensor, g: torch.Tensor, *, route: str = "auto") -> torch.Tensor:
    operands = Operands.linear(a, g)
    highs = a.new_zeros(a.shape[0], 1, dtype=torch.float64)
    if operands.empty:
        return highs[:, 0]
    if operands.positions == 1:
        return gram.rank_one(operands, highs)[:, 0]
    possible = operands.positions <= gram.MOST and a.dtype is not torch.float64
    wanted = route == "gram" or (route == "auto" and gram.cheaper(operands))
    done = gram.gram(operands, highs) if possible and wanted else None
    return direct.norms(operands, done, highs)[:, 0]


def _gradient(a: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    operands = Operands.linear(a, g)
    grads = a.new_zeros(a.shape[0], g.shape[2], a.shape[2], dtype=operands.sums)
    if operands.empty:
        return grads, grads.new_zeros(a.shape[0], dtype=torch.float64)
    return grads, direct.gradients(operands, grads)


def _sum(
    a: torch.Tensor,
    g: torch.Tensor,
    factors: torch.Tensor,
    out: torch.Tensor,
) -> None:
    operands = Operands.linear(a, g)
    if not operands.empty:
        weighted.weighted_sum(operands, factors, out)
    increment_version(out)


KERNELS: tuple[tuple[str, Any, Any], ...] = (
    ("ghost.linear_norm", _norm, _refuse_norm),
    ("ghost.linear_gradient", _gradient, _refuse),
    ("ghost.linear_sum", _sum, _refuse),
)
"""``(op, run, refuse)``."""
