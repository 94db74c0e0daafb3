"""Ghost ops of convolutions in one to three dimensions."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import increment_version

from ...ghost.conv import Geometry
from . import direct, weighted
from .operands import Operands, too_large


def _refuse(x: torch.Tensor, g: torch.Tensor, *_: Any, **__: Any) -> str | None:
    return too_large(x, g, g[:, :1].numel())


def _refuse_norm(x: torch.Tensor, g: torch.Tensor, **_: Any) -> str | None:
    return _refuse(x, g) or direct.too_long(x, g[:1, :1].numel())


def _operands(
    x: torch.Tensor,
    g: torch.Tensor,
    *,
    kernel_size: Any,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    **_: Any,
) -> tuple[Operands, Geometry]:
    geometry = Geometry.of(x, g, kernel_size, stride, padding, dilation, groups)
    return Operands.convolution(x, g, geometry), geometry


def _norm(x: torch.Tensor, g: torch.Tensor, **arguments: Any) -> torch.Tensor:
    """Run the direct way, whatever route is asked for."""
    operands, geometry = _operands(x, g, **arguments)
    highs = x.new_zeros(geometry.batch, geometry.groups, dtype=torch.float64)
    if operands.empty:
        return highs.sum(1)
    return direct.norms(operands, None, highs).sum(1) * (1 + 1e-12)


def _gradient(
    x: torch.Tensor, g: torch.Tensor, **arguments: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    operands, geometry = _operands(x, g, **arguments)
    grads = x.new_empty(geometry.batch, *geometry.weight_shape, dtype=operands.sums)
    if operands.empty:
        return grads.zero_(), grads.new_zeros(geometry.batch, dtype=torch.float64)
    return grads, direct.gradients(operands, grads)


def _sum(
    x: torch.Tensor, g: torch.Tensor, factors: torch.Tensor, out: torch.Tensor, **arguments: Any
) -> None:
    operands, _ = _operands(x, g, **arguments)
    if not operands.empty:
        weighted.weighted_sum(operands, factors, out)
    increment_version(out)


KERNELS: tuple[tuple[str, Any, Any], ...] = (
    ("ghost.conv_norm", _norm, _refuse_norm),
    ("ghost.conv_gradient", _gradient, _refuse),
    ("ghost.conv_sum", _sum, _refuse),
)
"""``(op, run, refuse)``."""
