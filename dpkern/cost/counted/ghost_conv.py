"""Convolutions, counted, by the route that the CPU's kernels take (``ops.ghost.conv.norm_route``).

Zeros of the padding are multiplied like other inputs, as in the kernels; inputs that no output
sees are not read. A loose Gram bound stays loose here; the kernels do such samples again.
"""

from __future__ import annotations

from typing import Any

import torch

from ...ops.ghost import conv
from ...ops.ghost._conv_geometry import Geometry
from ._layers import run
from ._tally import Kernel, Tally


def _geometry(
    x: torch.Tensor,
    g: torch.Tensor,
    *,
    kernel_size: Any,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Geometry:
    return Geometry.of(x, g, kernel_size, stride, padding, dilation, groups)


def _sizes(geometry: Geometry) -> list[int]:
    """Every size with three dimensions; those in front are missing."""
    fields = (
        *((geometry.input, 1), (geometry.output, 1), (geometry.kernel, 1)),
        *((geometry.stride, 1), (geometry.padding, 0), (geometry.dilation, 1)),
    )
    sizes = [geometry.batch, geometry.in_channels, geometry.out_channels, geometry.groups]
    for numbers, missing in fields:
        sizes += [missing] * (3 - len(numbers)) + list(numbers)
    return sizes


def _conv_norm(
    x: torch.Tensor, g: torch.Tensor, *, route: str = "auto", **arguments: Any
) -> tuple[torch.Tensor, Tally]:
    geometry = _geometry(x, g, **arguments)
    squares = torch.empty(len(x), dtype=torch.float64)
    gram = conv.norm_route(geometry, route) == "gram"
    return squares, run("conv_norm", x.dtype, _sizes(geometry), gram, x, g, squares)


def _conv_gradient(
    x: torch.Tensor, g: torch.Tensor, **arguments: Any
) -> tuple[tuple[torch.Tensor, torch.Tensor], Tally]:
    geometry = _geometry(x, g, **arguments)
    grads = torch.empty(len(x), *geometry.weight_shape, dtype=x.dtype)
    squares = torch.empty(len(x), dtype=torch.float64)
    return (grads, squares), run("conv_gradient", x.dtype, _sizes(geometry), x, g, grads, squares)


def _conv_sum(
    x: torch.Tensor, g: torch.Tensor, factors: torch.Tensor, out: torch.Tensor, **arguments: Any
) -> tuple[None, Tally]:
    geometry = _geometry(x, g, **arguments)
    return None, run("conv_sum", x.dtype, _sizes(geometry), x, g, factors, out)


KERNELS: dict[str, Kernel] = {
    "ghost.conv_norm": _conv_norm,
    "ghost.conv_gradient": _conv_gradient,
    "ghost.conv_sum": _conv_sum,
}
