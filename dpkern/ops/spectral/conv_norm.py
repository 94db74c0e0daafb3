"""Bound the norm that a mechanism in the frequency domain clips, without any per-sample map.

``|| R ||``, the norm of the whole correlation map (or of its kept part), is a product over
frequencies of two sums over channels: no spectrum of a channel pair is ever made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...base.dispatch import op
from ...base.errors import InvalidInput
from ...base.signature import Double, Operand
from ..ghost._conv_geometry import Size
from ._band import Band
from ._sizes import ConvolutionGrid, axes, check_layer
from ._spectra import Grid, powers, product_squares, transform_error, transformed
from ._transform_flops import Flops, of_map

_CHUNK = 1 << 20


def check_band(band: object, layer: ConvolutionGrid) -> None:
    """Check that ``band`` is a band of the layer's grid, or None."""
    if band is None:
        return
    sizes = band.size if isinstance(band, Band) else None
    if sizes is None or axes(sizes) != layer.size:
        raise InvalidInput(
            "band",
            expected=f"a Band of size {layer.size}, or None",
            got=band,
            remedy="Make the band on the grid of this layer.",
        )


def _check(
    x: Tensor,
    g: Tensor,
    kernel_size: Size,
    stride: Size,
    padding: Size,
    dilation: Size,
    groups: int,
    size: Sequence[int],
    band: Band | None,
) -> ConvolutionGrid:
    layer = check_layer(x, g, kernel_size, stride, padding, dilation, groups, size)
    check_band(band, layer)
    return layer


def transforms(layer: ConvolutionGrid, grid: Grid) -> Flops:
    """Return the operations of the transforms of all channels of all samples.

    An output gradient at a single place is its own spectrum.
    """
    each = of_map(grid.size) * layer.geometry.in_channels
    if not layer.single:
        each += of_map(grid.folded) * layer.geometry.out_channels
    return each * layer.geometry.batch


def read_entries(layer: ConvolutionGrid, grid: Grid) -> int:
    """Return how many numbers of x and g the transforms take: x up to the last place used."""
    geometry = layer.geometry
    inputs = geometry.in_channels * math.prod(grid.rows)
    return geometry.batch * (inputs + geometry.out_channels * geometry.positions)


@op(check=_check)
@torch.no_grad()
def conv_norm(
    x: Operand[Tensor, "B ci *S"],
    g: Operand[Tensor, "B co *O"],
    *,
    kernel_size: Size,
    stride: Size = 1,
    padding: Size = 0,
    dilation: Size = 1,
    groups: int = 1,
    size: Sequence[int],
    band: Band | None = None,
) -> Double[Tensor, "squares: B"]:
    """Return the squared norm of each sample's map, or of its filtered part, from above.

    ``||h * R_b||^2`` with ``h = IDFT(gains)``; ``||R_b||^2`` without a band. Dilation does not
    enter: all lags are counted.

    Args:
        x: inputs ``[B, ci, *S]``, one to three spatial dimensions, float32, float64 or 16
            bits, contiguous.
        g: output gradients ``[B, co, *O]`` of the same dtype, contiguous.
        kernel_size, stride, padding, dilation: an int, or one per spatial dimension.
        groups: a divisor of ci and co.
        size: ``(P, Q)``, the grid of the mechanism: at least ``s (Ho - 1) + t (d - 1) + 1``. Three
            spatial dimensions have three.
        band: the filter on this grid, or None.

    Returns:
        float64 ``[B]``: at least the exact value of these inputs, and above it by about 1e-5
        (float32; Triton's 1e-4, up to 1e-3 above 64 values on an axis) or 1e-13 (float64) of it
        unless the spectra of x and g hardly meet. Proved of the kernels (docs/spectral.md);
        elsewhere if the transforms keep Higham's bound, which leaves out what underflows
        (operands below 2^-126). Left out everywhere: denormals that the processor
        was told to flush, and float64 operands below 2^-500.

    Raises:
        InvalidInput: wrong type, shape, dtype, device, layout, size or band.

    =========================== ===========================================
    edge case                   result
    =========================== ===========================================
    empty batch                 ``[0]``
    NaN or inf in a sample      NaN or infinite for this sample
    grid below the least        InvalidInput
    =========================== ===========================================
    """
    layer = ConvolutionGrid.of(x, g, kernel_size, stride, padding, dilation, groups, size)
    grid = Grid.of(layer, band)
    eta = transform_error(torch.float64, grid.size)
    parts = [x.new_zeros(0, dtype=torch.float64)]
    samples = max(1, _CHUNK // (x[:1].numel() + g[:1].numel() + 1))
    for begin in range(0, len(x), samples):
        xs, gs = x[begin : begin + samples].double(), g[begin : begin + samples].double()
        x_map = grid.place_input(xs, xs.new_zeros(*xs.shape[:2], *grid.size))
        g_map = grid.place_gradient(gs, gs.new_zeros(*gs.shape[:2], *grid.folded))
        x_power, g_power = (powers(transformed(m).flatten(2), groups) for m in (x_map, g_map))
        parts.append(product_squares(grid, x_power, g_power, eta))
    return torch.cat(parts)


__all__ = ["check_band", "conv_norm", "read_entries", "transforms"]
