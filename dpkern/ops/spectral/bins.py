"""Sum over the retained bins with weights: no inverse transform, one matrix product per bin.

    S[o, c](k) = sum_b factors_b conj(D^[o](k)) X^[c](k)            at retained k of the half plane
    crop[o, c](u) = Re sum_k w_k Gamma_k / (PQ) S[o, c](k) exp(2 pi i k.u / (P, Q))

A band that keeps a share ``s`` of the plane keeps ``s P Q`` numbers per channel and sample.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from ...base import validate as check
from ...base.dispatch import op
from ...base.errors import InvalidInput
from ...base.phase import CONSTANTS, phase
from ...base.signature import Double, Float, Operand, Sum, written
from .._products import exact
from ..ghost._bounds import of_sums
from ..ghost._conv_geometry import Size, check_size
from ._band import Band, half_weights
from ._basis import lags
from ._sizes import Axes, ConvolutionGrid, axes, check_layer
from ._spectra import (
    Grid,
    fold_index,
    half_gains,
    on,
    powers,
    product_squares,
    transform_error,
    transformed,
)
from .conv_norm import check_band


@lru_cache(maxsize=256)
def kept_bins(band: Band) -> Tensor:
    """Return ``[K]``, flat indices of the retained bins in the half plane."""
    with phase(CONSTANTS):
        return half_gains(band).flatten().nonzero().flatten()


@lru_cache(maxsize=256)
def crop_matrix(band: Band, kernel: Axes, dilation: Axes) -> tuple[Tensor, Tensor]:
    """Return ``[taps, K]`` twice, float64: what Re S and Im S of a bin add to the taps."""
    gains, size = half_gains(band), axes(band.size)
    kept = gains.nonzero(as_tuple=True)
    weights = torch.from_numpy(half_weights(size[-1]))[kept[-1]] * gains[kept] / math.prod(size)
    taps = torch.from_numpy(lags(kernel, dilation)).double().unbind(1)
    each = zip(taps, kept, size, strict=True)
    turns = torch.stack([lag[:, None] * k / n for lag, k, n in each]).sum(0)
    angles = 2 * math.pi * turns
    return weights * angles.cos(), -weights * angles.sin()


def _turn(band: Band, kernel: Axes, dilation: Axes, part: int) -> Tensor:
    return crop_matrix(band, kernel, dilation)[part]


def _check_bins(
    x: Tensor,
    g: Tensor,
    kernel_size: Size,
    stride: Size,
    padding: Size,
    dilation: Size,
    groups: int,
    band: Band,
) -> ConvolutionGrid:
    _check_kind(band)
    layer = check_layer(x, g, kernel_size, stride, padding, dilation, groups, band.size)
    check_band(band, layer)
    return layer


def _check_kind(band: object) -> None:
    if not isinstance(band, Band):
        raise InvalidInput(
            "band",
            expected="a Band",
            got=type(band).__name__,
            remedy="Make one on the grid of this layer.",
        )


def turned_bins(layer: ConvolutionGrid, grid: Grid, band: Band) -> int:
    """Return how many retained bins of D are read at their mirror and must be conjugated."""
    if grid.index is None or layer.single:
        return 0
    return int(fold_index(grid.size, grid.folded)[1][kept_bins(band)].sum())


@op(check=_check_bins)
@torch.no_grad()
def conv_bins(
    x: Operand[Tensor, "B ci *S"],
    g: Operand[Tensor, "B co *O"],
    *,
    kernel_size: Size,
    stride: Size = 1,
    padding: Size = 0,
    dilation: Size = 1,
    groups: int = 1,
    band: Band,
) -> tuple[
    Sum[Tensor, "x_bins: K B 2 ci"], Sum[Tensor, "g_bins: K B 2 co"], Double[Tensor, "squares: B"]
]:
    """Return both operands' retained bins and the squared norm of the *whole* map, in one pass.

    Args: as ``conv_norm``, on the grid ``band.size``.

    Returns:
        ``[K, B, 2, ci]`` and ``[K, B, 2, co]``, real and imaginary parts of the unnormalised
        transforms at the ``K`` retained bins of the half plane, of the operands' dtype (16 bits:
        float32); and float64 ``[B]`` as ``conv_norm`` without the band.

    Raises:
        InvalidInput: wrong type, shape, dtype, device, layout, size or band.
    """
    layer = ConvolutionGrid.of(x, g, kernel_size, stride, padding, dilation, groups, band.size)
    grid = Grid(layer, layer.size, None)
    kept = on(x.device, kept_bins, band)
    xs, gs = x.double(), g.double()
    x_map = grid.place_input(xs, xs.new_zeros(*xs.shape[:2], *grid.size))
    g_map = grid.place_gradient(gs, gs.new_zeros(*gs.shape[:2], *grid.folded))
    if not len(x):  # MKL has no transform of nothing
        empty = (
            x_map.new_zeros(len(kept), 0, 2, t.shape[1], dtype=of_sums(x.dtype)) for t in (x, g)
        )
        x_bins, g_bins = empty
        return x_bins, g_bins, x_map.new_zeros(0)
    x_spectra, g_spectra = (transformed(m).flatten(2) for m in (x_map, g_map))
    squares = product_squares(
        grid,
        powers(x_spectra, groups),
        powers(g_spectra, groups),
        transform_error(torch.float64, grid.size),
    )
    index = on(x.device, gradient_bins, band, grid.size, grid.folded)
    x_bins, g_bins = (
        torch.view_as_real(spectra[:, :, bins]).permute(2, 0, 3, 1).to(of_sums(x.dtype))
        for spectra, bins in ((x_spectra, kept), (g_spectra, index))
    )
    return x_bins.contiguous(), unfold(g_bins.contiguous(), grid, band), squares


def gradient_bins(band: Band, size: Axes, folded: Axes) -> Tensor:
    """Return ``[K]``, the bins of D that stand for the retained ones."""
    kept = kept_bins(band)
    return kept if size == folded else fold_index(size, folded)[0][kept]


def _signs(band: Band, size: Axes, folded: Axes) -> Tensor:
    """Return ``[K]``: -1 where ``gradient_bins`` reads a conjugate, else 1."""
    return 1.0 - 2.0 * fold_index(size, folded)[1][kept_bins(band)].double()


def unfold(g_bins: Tensor, grid: Grid, band: Band) -> Tensor:
    """Conjugate the bins of D that were read at their mirror, in place."""
    if grid.index is not None:
        signs = on(g_bins.device, _signs, band, grid.size, grid.folded)
        g_bins[:, :, 1] *= signs.to(g_bins.dtype)[:, None, None]
    return g_bins


def _check_sum(
    x_bins: Tensor,
    g_bins: Tensor,
    factors: Tensor,
    out: Tensor,
    dilation: Size,
    groups: int,
    band: Band,
) -> None:
    groups = check.integer(1, groups=groups)
    _check_kind(band)
    if len(x_bins) != len(kept_bins(band)):
        raise InvalidInput(
            "band",
            expected=f"the one whose {len(x_bins)} bins are given",
            got=f"{band}, which keeps {len(kept_bins(band))}",
            remedy="Pass the band that conv_bins had.",
        )
    spatial = len(band.size)
    if spatial == 2 and band.size[0] == 1 and out.dim() == 3:
        spatial = 1  # a line is a plane of height 1
    weight = (g_bins.shape[3], x_bins.shape[3] // groups, *(None,) * spatial)
    check.tensor(out=out, shape=weight)
    check_size("dilation", dilation, spatial, 1)


@op(check=_check_sum)
@torch.no_grad()
def bins_sum(
    x_bins: Float[Tensor, "K B 2 ci"],
    g_bins: Float[Tensor, "K B 2 co"],
    factors: Float[Tensor, "B"],
    out: Float[Tensor, "co ...", written],
    *,
    dilation: Size = 1,
    groups: int = 1,
    band: Band,
) -> None:
    """Add the taps of ``sum_b factors_b h * R_b`` to ``out``, from what ``conv_bins`` kept.

    Args:
        x_bins, g_bins: ``[K, B, 2, channels]``.
        factors: ``[B]``, same dtype. Factor 0 contributes nothing, whatever the sample holds.
        out: ``[co, ci / groups, *kernel]``, same dtype, contiguous, added to.
        dilation, groups: of the convolution.
        band: the filter on its grid.

    Raises:
        InvalidInput: wrong type, shape, dtype, device or layout.
    """
    kept = factors != 0
    if not bool(kept.all()):
        x_bins, g_bins, factors = x_bins[:, kept], g_bins[:, kept], factors[kept]
    add_products(x_bins, g_bins * factors[:, None, None], out, dilation, groups, band)


def add_products(
    x_bins: Tensor,
    scaled: Tensor,
    out: Tensor,
    dilation: Size,
    groups: int,
    band: Band,
) -> None:
    """Add the taps of the products of X's bins and D's, which hold the factors, to ``out``."""
    kind = exact(out.dtype, out.device)
    x_bins, scaled = x_bins.to(kind), scaled.to(kind)
    parts = zip(*(t.chunk(groups, d) for t, d in ((scaled, 3), (x_bins, 3), (out, 0))), strict=True)
    for gs, xs, total in parts:
        # Rows are real and imaginary parts of D^, columns those of X^.
        products = gs.flatten(2).mT @ xs.flatten(2)
        blocks = products.view(len(products), 2, gs.shape[3], 2, xs.shape[3])
        re = blocks[:, 0, :, 0] + blocks[:, 1, :, 1]
        im = blocks[:, 0, :, 1] - blocks[:, 1, :, 0]
        add_crop(re, im, total, dilation, band)


def taps_apart(out: Tensor, dilation: Size) -> Axes:
    """Return the distances of the taps of ``out [O, C, *kernel]`` on its grid."""
    spatial = out.dim() - 2
    return axes((dilation,) * spatial if isinstance(dilation, int) else tuple(dilation))


def add_crop(re: Tensor, im: Tensor, out: Tensor, dilation: Size, band: Band) -> None:
    """Add the taps of the spectrum ``re + i im``, each ``[K, O, C]``, to ``out``.

    ``out`` is ``[O, C, *kernel]``.
    """
    kernel, between = axes(out.shape[2:]), taps_apart(out, dilation)
    cosines, sines = (
        on(re.device, _turn, band, kernel, between, part).to(re.dtype) for part in (0, 1)
    )
    taps = cosines @ re.flatten(1) + sines @ im.flatten(1)
    out.add_(taps.view(-1, *re.shape[1:]).permute(1, 2, 0).reshape(out.shape))


__all__ = [
    "add_crop",
    "add_products",
    "bins_sum",
    "conv_bins",
    "crop_matrix",
    "gradient_bins",
    "kept_bins",
    "taps_apart",
    "turned_bins",
    "unfold",
]
