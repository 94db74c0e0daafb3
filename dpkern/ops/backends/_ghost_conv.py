"""The compiled CPU kernels of the ghost ops for convolutions."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ..ghost import conv
from ..ghost.conv import Geometry
from . import cpu
from ._ghost_dense import not_wide


def _refuse(x: torch.Tensor, *_: Any, **__: Any) -> str | None:
    if not x.is_cpu:
        return f"runs on the CPU, got a tensor on {x.device}"
    if x.dim() == 5:
        return "has convolutions of 1 and 2 spatial dimensions, got 3"
    return not_wide(x)


def _planes(sizes: tuple[int, ...], missing: int) -> tuple[int, ...]:
    """Height and width; a single dimension is the width."""
    return (missing, *sizes)[-2:]


@lru_cache(maxsize=1024)
def _sizes(geometry: Geometry) -> list[int]:
    return [
        geometry.batch,
        geometry.in_channels,
        geometry.out_channels,
        geometry.groups,
        *_planes(geometry.input, 1),
        *_planes(geometry.output, 1),
        *_planes(geometry.kernel, 1),
        *_planes(geometry.stride, 1),
        *_planes(geometry.padding, 0),
        *_planes(geometry.dilation, 1),
    ]


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


def _gradient(
    x: torch.Tensor, g: torch.Tensor, **arguments: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    geometry = _geometry(x, g, **arguments)
    sizes, wide = _sizes(geometry), x.dtype is torch.float64
    batch, out, per_group, *kernel = geometry.batch, *geometry.weight_shape
    dims = range(3, 3 + len(kernel))
    layout = cpu._C.conv_layout(sizes, wide)
    # Physical order of the dimensions, and the permutation back to [B, co, ci / groups, *kernel].
    if layout == 0:
        grads = x.new_empty(batch, out, *kernel, per_group).permute(
            0, 1, 2 + len(kernel), *(d - 1 for d in dims)
        )
    elif layout == 1:
        grads = x.new_empty(batch, per_group, *kernel, out).permute(
            0, 2 + len(kernel), 1, *(d - 1 for d in dims)
        )
    else:
        grads = x.new_empty(batch, out, per_group, *kernel)
    squares = torch.empty(batch, dtype=torch.float64)
    cpu._C.conv_gradient(
        sizes,
        wide,
        x.data_ptr(),
        g.data_ptr(),
        grads.data_ptr(),
        squares.data_ptr(),
        cpu._threads(),
    )
    return grads, squares


def _norm(x: torch.Tensor, g: torch.Tensor, *, route: str = "auto", **arguments: Any) -> Any:
    geometry = _geometry(x, g, **arguments)
    route = conv.norm_route(geometry, route)
    squares = torch.empty(geometry.batch, dtype=torch.float64)
    cpu._C.conv_norm(
        _sizes(geometry),
        x.dtype is torch.float64,
        route == "gram",
        x.data_ptr(),
        g.data_ptr(),
        squares.data_ptr(),
        cpu._threads(),
    )
    return squares


def _sum(
    x: torch.Tensor, g: torch.Tensor, factors: torch.Tensor, out: torch.Tensor, **arguments: Any
) -> None:
    geometry = _geometry(x, g, **arguments)
    cpu._C.conv_sum(
        _sizes(geometry),
        x.dtype is torch.float64,
        x.data_ptr(),
        g.data_ptr(),
        factors.data_ptr(),
        out.data_ptr(),
        cpu._threads(),
    )
    increment_version(out)


KERNELS: tuple[tuple[str, Any, Any], ...] = (
    ("ghost.conv_norm", _norm, _refuse),
    ("ghost.conv_gradient", _gradient, _refuse),
    ("ghost.conv_sum", _sum, _refuse),
)
"""``(op, run, refuse)``."""
