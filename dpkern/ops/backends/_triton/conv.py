"""Ghost ops of convolutions in one to three dimensions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ...ghost.conv import Geometry, tf32_convolutions
from . import direct, integers, rows, sum_errors, weighted
from .operands import Operands, too_large


def _refuse(x: torch.Tensor, g: torch.Tensor, *_: Any, **__: Any) -> str | None:
    return too_large(x, g, g[:, :1].numel())


def _refuse_norm(x: torch.Tensor, g: torch.Tensor, **_: Any) -> str | None:
    return _refuse(x, g) or direct.too_long(x, g[:1, :1].numel())


def _refuse_integers(x: torch.Tensor, g: torch.Tensor, *_: Any, **__: Any) -> str | None:
    return integers.refuse_long(x, g, g[:1, :1].numel())


def _geometry(
    x: torch.Tensor,
    g: torch.Tensor,
    *,
    kernel_size: Any,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    **_: Any,
) -> Geometry:
    return Geometry.of(x, g, kernel_size, stride, padding, dilation, groups)


def _operands(x: torch.Tensor, g: torch.Tensor, **arguments: Any) -> tuple[Operands, Geometry]:
    geometry = _geometry(x, g, **arguments)
    return Operands.convolution(x, g, geometry), geometry


def _norm(x: torch.Tensor, g: torch.Tensor, **arguments: Any) -> torch.Tensor:
    """Run the direct way, whatever route is asked for."""
    operands, geometry = _operands(x, g, **arguments)
    highs = x.new_zeros(geometry.batch, geometry.groups, dtype=torch.float64)
    if operands.empty:
        return highs.new_zeros(geometry.batch)
    return rows.added(direct.norms(operands, None, highs)) * (1 + 1e-12)


def _gradient(
    x: torch.Tensor, g: torch.Tensor, **arguments: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    operands, geometry = _operands(x, g, **arguments)
    rows, channels, *kernel = geometry.weight_shape
    shape = (rows, *kernel, channels) if operands.last else geometry.weight_shape
    grads = x.new_empty(geometry.batch, *shape, dtype=operands.sums)
    if operands.empty:
        squares = grads.zero_().new_zeros(geometry.batch, dtype=torch.float64)
    else:
        squares = direct.gradients(operands, grads, tf32=tf32_convolutions())
    return grads.movedim(-1, 2) if operands.last else grads, squares


def _sum(
    x: torch.Tensor, g: torch.Tensor, factors: torch.Tensor, out: torch.Tensor, **arguments: Any
) -> None:
    _added(weighted.weighted_sum, x, g, factors, out, **arguments)


def _integer_sum(
    x: torch.Tensor, g: torch.Tensor, factors: torch.Tensor, out: torch.Tensor, **arguments: Any
) -> None:
    _added(integers.add_terms, x, g, factors, out, **arguments)


def _added(
    add: Callable[[Operands, torch.Tensor, torch.Tensor], None],
    x: torch.Tensor,
    g: torch.Tensor,
    factors: torch.Tensor,
    out: torch.Tensor,
    **arguments: Any,
) -> None:
    """Let ``add`` add a sum of gradients to ``out``, whose columns may lie in another order."""
    operands, geometry = _operands(x, g, **arguments)
    if not operands.empty and operands.last:
        outs, channels, *kernel = geometry.weight_shape
        total = torch.zeros(outs, *kernel, channels, dtype=out.dtype, device=out.device)
        add(operands, factors, total)
        with torch.no_grad():
            out.add_(total.movedim(-1, 1))
        return
    if not operands.empty:
        add(operands, factors, out)
    increment_version(out)


def _sum_error(x: torch.Tensor, g: torch.Tensor, **arguments: Any) -> torch.Tensor:
    return sum_errors.conv_sum_error(x, g, _geometry(x, g, **arguments))


KERNELS: tuple[tuple[str, Any, Any], ...] = (
    ("ghost.conv_norm", _norm, _refuse_norm),
    ("ghost.conv_gradient", _gradient, _refuse),
    ("ghost.conv_sum", _sum, _refuse),
    ("ghost.conv_integer_sum", _integer_sum, _refuse_integers),
    ("ghost.conv_sum_error", _sum_error, _refuse_integers),
)
"""``(op, run, refuse)``."""
