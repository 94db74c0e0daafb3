"""Weighted sums of filtered kernel gradients: three ways that give the same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...base import validate as check
from ...base.errors import InvalidInput
from .. import ghost
from ..ghost._conv_geometry import Size
from ._band import Band
from ._sizes import ConvolutionGrid, check_layer
from .bins import bins_sum, conv_bins, kept_bins
from .conv_norm import check_band
from .filter import filtered

ROUTES = ("auto", "plain", "filter", "bins")


def conv_sum(
    x: torch.Tensor,
    g: torch.Tensor,
    factors: torch.Tensor,
    out: torch.Tensor,
    *,
    kernel_size: Size,
    stride: Size = 1,
    padding: Size = 0,
    dilation: Size = 1,
    groups: int = 1,
    size: Sequence[int],
    band: Band | None = None,
    route: str = "auto",
    backend: str | None = None,
) -> None:
    """Add the taps of ``sum_b factors_b h * R_b`` to ``out``: filtered kernel gradients.

    Args:
        x, g, kernel_size, stride, padding, dilation, groups, size, band: as ``conv_norm``.
        factors: ``[B]``, dtype of x (16 bits: float32). Factor 0 contributes nothing, whatever the
            sample holds.
        out: ``[co, ci / groups, *kernel]``, dtype of the factors, contiguous, added to.
        route: ``plain``: the ordinary weight gradient, right without a band (the grid holds the
            kernel's lags, so nothing wraps onto them). ``filter``: of filtered activations.
            ``bins``: one product per retained bin. ``auto``: the cheapest.
        backend: name of the backend. None selects the first one that supports the call; see
            ``dpkern info``.

    Raises:
        InvalidInput: wrong type, shape, dtype, device, layout, size, band or route.
    """
    layer = check_layer(x, g, kernel_size, stride, padding, dilation, groups, size)
    check_band(band, layer)
    check.choice(ROUTES, route=route)
    if (band is None) != (route == "plain") and route != "auto":
        raise InvalidInput(
            "route",
            expected="'plain' without a band, 'filter' or 'bins' with one, or 'auto'",
            got=route,
            remedy="Use route='auto'.",
        )
    sizes: dict[str, Any] = {
        "kernel_size": kernel_size,
        "stride": stride,
        "dilation": dilation,
        "groups": groups,
    }
    if route == "auto":
        route = sum_route(x, g, padding=padding, size=size, band=band, **sizes)
    if band is None:
        ghost.conv_sum(x, g, factors, out, padding=padding, backend=backend, **sizes)
        return
    if route == "bins":
        x_bins, g_bins, _ = conv_bins(x, g, padding=padding, band=band, backend=backend, **sizes)
        bins_sum(
            x_bins,
            g_bins,
            factors,
            out,
            dilation=dilation,
            groups=groups,
            band=band,
            backend=backend,
        )
        return
    inputs = conv_filtered(x, layer, band, backend=backend)
    ghost.conv_sum(inputs, g.to(inputs.dtype), factors, out, backend=backend, **sizes)


def conv_filtered(
    x: torch.Tensor, layer: ConvolutionGrid, band: Band, *, backend: str | None = None
) -> torch.Tensor:
    """Run ``filtered`` with the padding and the rows of a layer."""
    spatial = x.dim() - 2
    return filtered(
        x,
        padding=layer.padding[-spatial:],
        rows=layer.least[-spatial:],
        band=band,
        backend=backend,
    )


def sum_route(
    x: torch.Tensor,
    g: torch.Tensor,
    *,
    kernel_size: Size,
    stride: Size = 1,
    padding: Size = 0,
    dilation: Size = 1,
    groups: int = 1,
    size: Sequence[int],
    band: Band | None = None,
) -> str:
    """Return the route that ``route="auto"`` chooses for these operands.

    A caller that norms by the transforms too may keep their retained bins for the sum.

    By multiplications of a channel pair, four for a complex product; docs/spectral.md has the
    figures. Where ``bins`` wins its transforms cost what the filter's cost.
    """
    layer = ConvolutionGrid.of(x, g, kernel_size, stride, padding, dilation, groups, size)
    if band is None:
        return "plain"
    taps, positions = layer.geometry.taps, layer.geometry.positions
    return "bins" if 4 * len(kept_bins(band)) < taps * positions else "filter"


__all__ = ["ROUTES", "conv_filtered", "conv_sum", "sum_route"]
