"""Run spectral ops on devices: the platform's transforms, and torch's operations on spectra.

Transforms are made in the operands' precision (16 bits: float32) with the CPU kernels' slack for
their rounding; powers and norms are float64. Nothing here waits for the device.
"""

from __future__ import annotations

from typing import Any

import torch

from ..ghost._bounds import of_sums
from ..ghost._conv_geometry import Size
from ..spectral import bins, circulant
from ..spectral._band import Band
from ..spectral._sizes import ConvolutionGrid
from ..spectral._spectra import Grid, on, product_squares, transform_error
from ..spectral.filter import filtered
from ..spectral.whiten import whitened_norm
from ..spectral.whitened_bins import plan_for, whitened_squares
from ._spectra import chunks, constant, room

_CHUNK = 1 << 24
"""Bytes of a chunk's spectra: small beside the activations, enough to fill a device."""


def _add_powers(spectra: torch.Tensor, groups: int, out: torch.Tensor) -> None:
    """Write the powers of each group's channels to ``out [b, groups, bins]``."""
    wide = torch.view_as_real(spectra).to(torch.float64, copy=True).square_()
    batch, channels, points, _ = wide.shape
    torch.sum(wide.view(batch, groups, channels // groups, points, 2), (2, 4), out=out)


@torch.no_grad()
def conv_norm(
    x: torch.Tensor, g: torch.Tensor, *, band: Band | None, plan: ConvolutionGrid, **_: Any
) -> torch.Tensor:
    groups = plan.geometry.groups
    grid = Grid.of(plan, band)
    powers = room(x, groups, grid)
    for part, spectra in chunks(x, grid, "x", _CHUNK):
        _add_powers(spectra, groups, powers[0][part])
    if plan.single:
        powers[1].copy_(constant(g, groups))
    else:
        for part, spectra in chunks(g, grid, "g", _CHUNK):
            _add_powers(spectra, groups, powers[1][part])
    return product_squares(grid, powers[0], powers[1], transform_error(of_sums(x.dtype), grid.size))


@torch.no_grad()
def conv_bins(
    x: torch.Tensor, g: torch.Tensor, *, band: Band, plan: ConvolutionGrid, **_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    groups = plan.geometry.groups
    grid, kind = Grid(plan, plan.size, None), of_sums(x.dtype)
    powers = room(x, groups, grid)
    kept = on(x.device, bins.kept_bins, band)
    x_bins, g_bins = (t.new_empty(len(kept), len(t), 2, t.shape[1], dtype=kind) for t in (x, g))
    for part, spectra in chunks(x, grid, "x", _CHUNK):
        _add_powers(spectra, groups, powers[0][part])
        x_bins[:, part] = _gathered(spectra, kept)
    if plan.single:
        powers[1].copy_(constant(g, groups))
        g_bins[:, :, 0] = g.flatten(1)
        g_bins[:, :, 1] = 0
    else:
        at = on(x.device, bins.gradient_bins, band, grid.size, grid.folded)
        for part, spectra in chunks(g, grid, "g", _CHUNK):
            _add_powers(spectra, groups, powers[1][part])
            g_bins[:, part] = _gathered(spectra, at)
    squares = product_squares(grid, powers[0], powers[1], transform_error(kind, grid.size))
    return x_bins, bins.unfold(g_bins, grid, band), squares


@torch.no_grad()
def whitened_bins(
    x: torch.Tensor,
    g: torch.Tensor,
    matrix: torch.Tensor,
    *,
    band: Band,
    plan: ConvolutionGrid,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    kind = of_sums(x.dtype)
    error = transform_error(kind, plan.size)
    made = plan_for(plan, matrix, band, torch.float64, (error, error))
    x_bins, g_bins = conv_bins(x, g, band=band, plan=plan)[:2]
    xs, gs, x_wide, g_wide = (t.double() for t in (x, g, x_bins, g_bins))
    squares = whitened_squares(xs, gs, x_wide, g_wide, made, plan.geometry.groups)
    return x_bins, g_bins, squares


def _gathered(spectra: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Return ``[K, b, 2, channels]``: real and imaginary parts of these bins."""
    return torch.view_as_real(spectra.index_select(2, at)).permute(2, 0, 3, 1)


@torch.no_grad()
def _bins_sum(
    x_bins: torch.Tensor,
    g_bins: torch.Tensor,
    factors: torch.Tensor,
    out: torch.Tensor,
    *,
    dilation: Size = 1,
    groups: int = 1,
    band: Band,
) -> None:
    # Which samples have factor 0 is known on the device alone.
    unused = (factors == 0)[:, None, None]
    scaled = (g_bins * factors[:, None, None]).masked_fill_(unused, 0)
    bins.add_products(x_bins.masked_fill(unused, 0), scaled, out, dilation, groups, band)


@torch.no_grad()
def _whitened_norm(grads: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    # In float64, so a few samples at a time.
    samples = max(1, _CHUNK // (8 * max(1, grads[:1].numel())))
    parts = [whitened_norm.reference(part, matrix) for part in torch.split(grads, samples)]
    return torch.cat(parts)


@torch.no_grad()
def circulant_norm(x: torch.Tensor, g: torch.Tensor, *, band: Band | None = None) -> torch.Tensor:
    if not (x.numel() and g.numel()):
        return x.new_zeros(len(x), dtype=torch.float64)
    return circulant.norm_of_spectra(x, g, torch.fft.rfft(x), torch.fft.rfft(g), band)


@torch.no_grad()
def circulant_sum(
    x: torch.Tensor,
    g: torch.Tensor,
    factors: torch.Tensor,
    out: torch.Tensor,
    *,
    band: Band | None = None,
) -> None:
    if not (x.numel() and g.numel()):
        return
    unused = (factors == 0)[:, None, None, None]
    scaled = (g * factors[:, None, None, None]).masked_fill_(unused, 0)
    circulant.add_transformed(x.masked_fill(unused, 0), scaled, out, band)


KERNELS: tuple[tuple[str, Any], ...] = (
    ("spectral.conv_norm", conv_norm),
    ("spectral.conv_bins", conv_bins),
    ("spectral.whitened_bins", whitened_bins),
    ("spectral.bins_sum", _bins_sum),
    ("spectral.filtered", filtered.reference),
    ("spectral.whitened_norm", _whitened_norm),
    ("spectral.circulant_norm", circulant_norm),
    ("spectral.circulant_product", circulant.circulant_product.reference),
    ("spectral.circulant_gradient", circulant.circulant_gradient.reference),
    ("spectral.circulant_sum", circulant_sum),
)
"""``(op, run)``."""
