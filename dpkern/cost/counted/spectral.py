"""Spectral ops, counted: everything but the transforms, which are torch's and enter the tally as
``modelled``, by the textbook forms of ``ops.spectral._transform_flops``.

Matrices that a band and a layer's sizes make once (gains, crops, filters) are constants.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ...ops.spectral import bins, circulant, filter
from ...ops.spectral._band import Band, half_weights
from ...ops.spectral._sizes import Layer, Pair
from ...ops.spectral._spectra import Grid, fold_index, half_gains, parseval, transform_error
from ...ops.spectral._transform_flops import Flops, of_plane
from ...ops.spectral.conv_norm import transforms
from ..primitives import Counts
from ._layers import address, run
from ._tally import Kernel, Tally

_CIRCULANT = {"rank_one": 0, "positions": 1, "spectrum": 2}


def _modelled(flops: Flops) -> Tally:
    counts = Counts(MUL=flops.products, ADD=flops.additions)
    return Tally(modelled=counts, flops=flops.total)


def _pair(numbers: Sequence[int], missing: int) -> Pair:
    """Height and width; a line is a plane of height 1."""
    height, width = (missing, *numbers)[-2:]
    return height, width


def _placed(
    x: torch.Tensor,
    used: Pair,
    size: Pair,
    first: Pair = (0, 0),
    step: Pair = (1, 1),
) -> tuple[torch.Tensor, Tally]:
    """Maps on grids ``[B, channels, *size]``, and what reading them took."""
    grids = torch.zeros(*x.shape[:2], *size, dtype=x.dtype)
    placement = [x.shape[0] * x.shape[1], *_pair(x.shape[2:], 1), *used, *size, *first, *step]
    return grids, run("spectral_place", x.dtype, x, placement, grids)


def _spectra(maps: torch.Tensor) -> torch.Tensor:
    """``[B, channels, bins]``; MKL has no transform of nothing."""
    if not maps.numel():
        shape = (*maps.shape[:2], maps.shape[2] * (maps.shape[3] // 2 + 1))
        return torch.zeros(shape, dtype=(maps.new_zeros(1) + 0j).dtype)
    spectra: torch.Tensor = torch.fft.rfft2(maps)
    return spectra.flatten(2).contiguous()


class _Operands:
    """Both operands' spectra, their powers, and what these took."""

    def __init__(self, x: torch.Tensor, g: torch.Tensor, grid: Grid, groups: int) -> None:
        self.grid, layer = grid, grid.layer
        self.constant = layer.extent == (1, 1)
        steps = [s // f for s, f in zip(layer.stride, grid.folds, strict=True)]
        x_maps, read = _placed(x, grid.rows, grid.size, layer.padding)
        self.tally = read
        if self.constant:
            g_maps, read = _placed(g, (1, 1), (1, 1))
            self.g = g_maps.flatten(2)
        else:
            g_maps, read = _placed(g, layer.output, grid.folded, step=(steps[0], steps[1]))
            self.g = _spectra(g_maps)
        self.tally += read
        self.x = _spectra(x_maps)
        self.powers = [
            self._power(self.x, groups, False),
            self._power(self.g, groups, self.constant),
        ]

    def _power(self, spectra: torch.Tensor, groups: int, real: bool) -> torch.Tensor:
        batch, channels, points = spectra.shape
        powers = torch.zeros(batch, groups, points, dtype=torch.float64)
        kind = spectra.real.dtype
        sizes = batch, groups, channels // groups, points, real
        self.tally += run("spectral_powers", kind, spectra, *sizes, powers)
        return powers

    def squares(self, dtype: torch.dtype) -> torch.Tensor:
        """From above."""
        grid, (x_powers, g_powers) = self.grid, self.powers
        batch, groups, x_bins = x_powers.shape
        squares = torch.empty(batch, dtype=torch.float64)
        height, width = grid.folded
        self.tally += run(
            "spectral_squares",
            None,
            *(x_powers, g_powers, batch, groups, x_bins, height * (width // 2 + 1)),
            *(self.constant, address(grid.index), grid.factors),
            *(parseval(grid.size), parseval(grid.folded)),
            transform_error(dtype, grid.size),
            (height * width) ** 0.5,
            squares,
        )
        return squares

    def gathered(self, spectra: torch.Tensor, at: torch.Tensor, turned: Any) -> torch.Tensor:
        """Bins ``at`` of all samples, ``[K, B, 2, channels]``."""
        batch, channels, points = spectra.shape
        real = not spectra.is_complex()
        kind = spectra.dtype if real else spectra.real.dtype
        out = torch.empty(len(at), batch, 2, channels, dtype=kind)
        mask = torch.zeros(len(at), dtype=torch.uint8) if turned is None else turned.byte()
        sizes = batch, channels, points, real, len(at)
        self.tally += run("spectral_gather", kind, spectra, *sizes, at.contiguous(), mask, out)
        return out


def _conv_norm(
    x: torch.Tensor,
    g: torch.Tensor,
    *,
    kernel_size: Any,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    size: Sequence[int],
    band: Band | None = None,
) -> tuple[torch.Tensor, Tally]:
    layer = Layer.of(x, g, kernel_size, stride, padding, dilation, groups, size)
    grid = Grid.of(layer, band)
    operands = _Operands(x, g, grid, groups)
    squares = operands.squares(x.dtype)
    return squares, operands.tally + _modelled(transforms(layer, grid))


def _conv_bins(
    x: torch.Tensor,
    g: torch.Tensor,
    *,
    kernel_size: Any,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    band: Band,
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], Tally]:
    layer = Layer.of(x, g, kernel_size, stride, padding, dilation, groups, band.size)
    grid = Grid(layer, layer.size, None)
    kept = bins.kept_bins(band)
    operands = _Operands(x, g, grid, groups)
    turned = None if grid.index is None else fold_index(grid.size, grid.folded)[1][kept]
    x_bins = operands.gathered(operands.x, kept, None)
    at = kept if grid.index is None else grid.index[kept]
    g_bins = operands.gathered(operands.g, at, turned)
    squares = operands.squares(x.dtype)
    tally = operands.tally + _modelled(transforms(layer, grid))
    return (x_bins, g_bins, squares), tally


def _bins_sum(
    x_bins: torch.Tensor,
    g_bins: torch.Tensor,
    factors: torch.Tensor,
    out: torch.Tensor,
    *,
    dilation: Any = 1,
    groups: int = 1,
    band: Band,
) -> tuple[None, Tally]:
    axes = len(band.size)
    steps = (dilation,) * axes if isinstance(dilation, int) else tuple(dilation)
    kernel, between = ((1, *pair)[-2:] for pair in (tuple(out.shape[2:]), steps))
    cosines, sines = (m.to(out.dtype).contiguous() for m in bins.crop_matrix(band, kernel, between))
    taps = math.prod(out.shape[2:])
    sizes = [*x_bins.shape[:2], groups, out.shape[1], len(out) // groups, taps]
    operands = x_bins, g_bins, factors, sizes, cosines, sines, out
    return None, run("spectral_bins_sum", out.dtype, *operands)


def _filtered(
    x: torch.Tensor, *, padding: Sequence[int], rows: Sequence[int], band: Band
) -> tuple[torch.Tensor, Tally]:
    given, used, before = _pair(x.shape[2:], 1), _pair(rows, 1), _pair(padding, 0)
    read = filter.read_places(x, padding, rows)
    maps = x.shape[0] * x.shape[1]
    out = torch.empty(*x.shape[:2], *rows, dtype=x.dtype)
    if band.kind == "rectangle":
        down, across = filter.toeplitz(band, before, used, given)
        down, across = (m.to(x.dtype).contiguous() for m in (down, across))
        sizes = [maps, *given, *read, *used]
        return out, run("spectral_separable", x.dtype, x, sizes, down, across, out)
    size = _pair(band.size, 1)
    grids, tally = _placed(x, read, size, before)
    spectra, gains = _spectra(grids), half_gains(band).to(x.dtype).contiguous()
    tally += run("spectral_gain", x.dtype, spectra, maps, gains.numel(), gains)
    if maps:
        halves = spectra.view(*x.shape[:2], size[0], size[1] // 2 + 1)
        grids = torch.fft.irfft2(halves, s=size).contiguous()
    placement = [maps, *size, *used, *size, 0, 0, 1, 1]
    tally += run("spectral_take", x.dtype, grids, placement, out)
    return out, tally + _modelled(of_plane(band.size) * (2 * maps))


def _whitened_norm(grads: torch.Tensor, matrix: torch.Tensor) -> tuple[torch.Tensor, Tally]:
    squares = torch.empty(len(grads), dtype=torch.float64)
    plain = grads.contiguous()
    sizes = len(grads), grads.shape[1] * grads.shape[2], matrix.shape[1]
    return squares, run("whitened_norm", grads.dtype, plain, *sizes, matrix, len(matrix), squares)


def _lines(x: torch.Tensor) -> torch.Tensor:
    """Half spectra of the last axis."""
    if not x.numel():
        shape = (*x.shape[:-1], x.shape[-1] // 2 + 1)
        return torch.zeros(shape, dtype=(x.new_zeros(1) + 0j).dtype)
    spectra: torch.Tensor = torch.fft.rfft(x)
    return spectra.contiguous()


def _circulant_norm(
    x: torch.Tensor, g: torch.Tensor, *, band: Band | None = None
) -> tuple[torch.Tensor, Tally]:
    batch, positions, ins, block = x.shape
    tally, spectra, sizes = Tally(), [], []
    for operand in (x, g):
        wide, square = operand.new_empty(operand.shape, dtype=torch.float64), torch.empty(batch)
        square = square.double()
        each = operand.shape[1:].numel()
        tally += run("circulant_wide", x.dtype, operand, batch, each, wide, square)
        spectra.append(_lines(wide))
        sizes.append(square)
    weights = torch.from_numpy(half_weights(block)) / block
    if band is not None:
        weights = weights * half_gains(band).flatten().square()
    errors = circulant.norm_errors(x, g)
    squares = torch.empty(batch, dtype=torch.float64)
    shape = [batch, positions, ins, g.shape[2], block]
    route = _CIRCULANT[circulant.norm_route(x, g)]
    tally += run(
        "circulant_squares", None, *spectra, shape, route, weights, *sizes, *errors, squares
    )
    return squares, tally + _modelled(circulant.transforms(x, g, batch))


def _used(x: torch.Tensor, factors: torch.Tensor | None, scale: bool, samples: int) -> Any:
    """The used samples, scaled or not, and what reading them took."""
    out = x.new_empty(samples, *x.shape[1:], requires_grad=False)
    each = x.shape[1:].numel()
    return out, run("circulant_used", x.dtype, x, address(factors), scale, len(x), each, out)


def _circulant_gradient(
    x: torch.Tensor, g: torch.Tensor
) -> tuple[tuple[torch.Tensor, torch.Tensor], Tally]:
    batch, positions, ins, block = x.shape
    outs = g.shape[2]
    (xs, x_read), (gs, g_read) = (_used(t, None, False, batch) for t in (x, g))
    made, tally = _products(xs, gs, [batch, positions, ins, outs, block], None)
    grads = torch.empty(batch, outs, ins, block, dtype=x.dtype)
    squares = torch.empty(batch, dtype=torch.float64)
    entries = outs * ins * block
    tally += run("circulant_keep", x.dtype, made, batch, entries, grads, squares)
    made_of = _modelled(circulant.transforms(x, g, batch, inverse=batch))
    return (grads, squares), x_read + g_read + tally + made_of


def _products(
    x: torch.Tensor, g: torch.Tensor, sizes: list[int], gains: torch.Tensor | None
) -> tuple[torch.Tensor, Tally]:
    """Gradients ``[B, p, q, d]`` from their spectra."""
    batch, _, ins, outs, block = sizes
    spectra = torch.zeros(batch, outs, ins, block // 2 + 1, dtype=(x.new_zeros(1) + 0j).dtype)
    operands = _lines(x), _lines(g), sizes, address(gains), spectra
    tally = run("circulant_products", x.dtype, *operands)
    if not spectra.numel():
        return x.new_zeros(batch, outs, ins, block), tally
    return torch.fft.irfft(spectra, n=block).contiguous(), tally


def _circulant_sum(
    x: torch.Tensor,
    g: torch.Tensor,
    factors: torch.Tensor,
    out: torch.Tensor,
    *,
    band: Band | None = None,
) -> tuple[None, Tally]:
    samples, (_, positions, ins, block) = int(torch.count_nonzero(factors)), x.shape
    gs, tally = _used(g, factors, True, samples)
    if not samples:
        return None, tally
    xs, read = _used(x, factors, False, samples)
    gains = None if band is None else half_gains(band).flatten().to(x.dtype).contiguous()
    sizes = [1, samples * positions, ins, g.shape[2], block]
    made, products = _products(xs, gs, sizes, gains)
    added = run("circulant_add", x.dtype, made, out.numel(), out)
    made_of = _modelled(circulant.transforms(x, g, samples, inverse=1))
    return None, tally + read + products + added + made_of


KERNELS: dict[str, Kernel] = {
    "spectral.conv_norm": _conv_norm,
    "spectral.conv_bins": _conv_bins,
    "spectral.bins_sum": _bins_sum,
    "spectral.filtered": _filtered,
    "spectral.whitened_norm": _whitened_norm,
    "spectral.circulant_norm": _circulant_norm,
    "spectral.circulant_gradient": _circulant_gradient,
    "spectral.circulant_sum": _circulant_sum,
}
