"""Ghost ops of linear layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ...ghost._bounds import of_sums
from ...ghost.linear import LONGEST, MOST
from . import direct, gram, gram_samples, integers, rows, vectors, weighted
from .launch import capability
from .operands import Operands, too_large
from .sum_errors import linear_sum_error


def _refuse(a: torch.Tensor, g: torch.Tensor, *_: Any, **__: Any) -> str | None:
    return too_large(a, g, a.shape[0] * a.shape[1])


def _refuse_norm(a: torch.Tensor, g: torch.Tensor, **_: Any) -> str | None:
    return _refuse(a, g) or direct.too_long(a, a.shape[1])


def _refuse_norms(a: Sequence[torch.Tensor], g: Sequence[torch.Tensor]) -> str | None:
    return next(filter(None, map(_refuse_norm, a, g)), None)


def _never(*_: Any, **__: Any) -> None:
    return None


def _norm(a: torch.Tensor, g: torch.Tensor, *, route: str = "auto") -> torch.Tensor:
    operands = Operands.linear(a, g)
    highs = a.new_zeros(a.shape[0], 1, dtype=torch.float64)
    if operands.empty:
        return highs[:, 0]
    if operands.positions == 1:
        return gram.rank_one(operands, highs)[:, 0]
    wanted = route == "gram" or (route == "auto" and gram.cheaper(operands))
    done = gram.gram(operands, highs) if wanted and gram.possible(operands) else None
    return direct.norms(operands, done, highs)[:, 0]


def _norms(a: Sequence[torch.Tensor], g: Sequence[torch.Tensor]) -> torch.Tensor:
    layers = [Operands.linear(*pair) for pair in zip(a, g, strict=True)]
    if any(one.empty or not gram_samples.here(one) or not gram.cheaper(one) for one in layers):
        found = [_norm(*pair) for pair in zip(a, g, strict=True)]
    else:
        highs = a[0].new_zeros(len(layers), layers[0].batch, 1, dtype=torch.float64)
        done = gram_samples.grams(layers, highs)
        rest = zip(layers, done, highs, strict=True)
        found = [direct.norms(*each)[:, 0] for each in rest]
    return torch.stack(found).sum(0) * (1 + 1e-12)


def _gradient(a: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _stored(Operands.linear(a, g), of_sums(a.dtype))


def _rounded_gradient(a: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _stored(Operands.linear(a, g), a.dtype)


def _stored(operands: Operands, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return gradients of this type, and their squares."""
    shape = operands.batch, operands.rows, operands.columns
    grads = operands.a.new_zeros(shape, dtype=dtype)
    if operands.empty:
        return grads, grads.new_zeros(operands.batch, dtype=torch.float64)
    return grads, direct.gradients(operands, grads)


def _rounded_sum(
    grads: Sequence[torch.Tensor], factors: torch.Tensor, outs: Sequence[torch.Tensor]
) -> None:
    for part, out in zip(grads, outs, strict=True):
        rows.add_rows(part, factors, out.numel(), out)
        increment_version(out)


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


def _refuse_integers(
    a: torch.Tensor, g: torch.Tensor, *_: Any, rounding: str = "truncate", **__: Any
) -> str | None:
    if rounding == "operands":
        return "has no products of rounded operands"
    if rounding == "factors" and a.is_cuda and capability(a) < 8:
        return "has products of bytes from compute capability 8.0 on"
    return integers.refuse_long(a, g, a.shape[1])


def _refuse_error(a: torch.Tensor, g: torch.Tensor) -> str | None:
    return integers.refuse_long(a, g, a.shape[1])


def _integer_sum(
    a: torch.Tensor,
    g: torch.Tensor,
    factors: torch.Tensor,
    out: torch.Tensor,
    *,
    rounding: str = "truncate",
) -> None:
    if rounding == "factors":
        vectors.add_products(a, g, factors, out, MOST, LONGEST)
    elif a.shape[1] == 1:
        integers.add_single(a, g, factors, out)
    else:
        integers.add_terms(Operands.linear(a, g), factors, out)
    increment_version(out)


KERNELS: tuple[tuple[str, Any, Any], ...] = (
    ("ghost.linear_norm", _norm, _refuse_norm),
    ("ghost.linear_norms", _norms, _refuse_norms),
    ("ghost.linear_gradient", _gradient, _refuse),
    ("ghost.linear_sum", _sum, _refuse),
    ("ghost.linear_integer_sum", _integer_sum, _refuse_integers),
    ("ghost.linear_sum_error", linear_sum_error, _refuse_error),
    ("ghost.rounded_gradient", _rounded_gradient, _refuse),
    ("ghost.rounded_sum", _rounded_sum, _never),
)
"""``(op, run, refuse)``."""
