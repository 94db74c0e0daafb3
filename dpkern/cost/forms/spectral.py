"""Closed forms of spectral ops.

Transforms are a library's and ``modelled``, by the textbook forms of
``ops.spectral._transform_flops`` (the CPU's fused norm multiplies by cosines and sines in their
place, which is not counted); what is done with spectra is ``exact``. A complex product that is
added to a sum takes four products and four additions or subtractions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ...base.counts import Counts, Item, Itemised
from ...ops import _values
from ...ops.ghost._bounds import of_sums
from ...ops.spectral import bins, circulant, filter
from ...ops.spectral._band import Band
from ...ops.spectral._sizes import Axes, ConvolutionGrid, axes
from ...ops.spectral._spectra import Grid, half, half_gains
from ...ops.spectral._transform_flops import Flops, of_map
from ...ops.spectral.conv_norm import read_entries, transforms
from ._form import Form
from ._layers import WIDE, dots, itemised, widened

_NOTE = "split radix for powers of two, 5 n lg n for other complex lines, half of it for real ones"


def _modelled(flops: Flops) -> Itemised:
    counts = Counts(MUL=flops.products, ADD=flops.additions)
    return Itemised((Item(name="transforms", counts=counts, kind="modelled", note=_NOTE),))


def _half(size: Axes) -> int:
    return math.prod(half(size))


def _layer(
    x: torch.Tensor, g: torch.Tensor, size: Sequence[int], arguments: Any
) -> ConvolutionGrid:
    given = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1, **arguments}
    names = "kernel_size", "stride", "padding", "dilation", "groups"
    kernel, stride, padding, dilation, groups = (given[name] for name in names)
    return ConvolutionGrid.of(x, g, kernel, stride, padding, dilation, groups, size)


def _norm_parts(layer: ConvolutionGrid, grid: Grid, dtype: torch.dtype) -> dict[str, Counts]:
    """Count the way from spectra to squared norms."""
    geometry = layer.geometry
    batch, ins, outs = geometry.batch, _half(grid.size), _half(grid.folded)
    x_bins, g_bins = ins * geometry.in_channels, outs * geometry.out_channels
    if layer.single:  # g is its own spectrum, real and constant
        powers = dots(2 * x_bins + geometry.out_channels)
        wide = widened(dtype, 2 * x_bins + geometry.out_channels)
    else:
        powers = dots(2 * (x_bins + g_bins))
        wide = widened(dtype, 2 * (x_bins + g_bins))
    folded = Counts(MUL=ins, ADD=0 if grid.index is None else ins)
    group = folded + dots(ins + 2 * outs) + 2 * outs * Counts(CMP=1, MUX=1)
    return {
        "widened": batch * wide,
        "powers": batch * powers,
        "products_over_bins": batch * geometry.groups * group,
        "rounding_bound": batch * Counts(SQRT=5, MUL=9, ADD=3),
    }


def conv_norm(
    x: torch.Tensor,
    g: torch.Tensor,
    *,
    size: Sequence[int],
    band: Band | None = None,
    **arguments: Any,
) -> Itemised:
    """Count ``spectral.conv_norm``."""
    layer = _layer(x, g, size, arguments)
    grid = Grid.of(layer, band)
    parts = _norm_parts(layer, grid, x.dtype)
    read = [(read_entries(layer, grid), x.dtype)]
    made = itemised(read, [(len(x), WIDE)], walked=_walked(layer), **parts)
    return made + _modelled(transforms(layer, grid))


def conv_bins(x: torch.Tensor, g: torch.Tensor, *, band: Band, **arguments: Any) -> Itemised:
    """Count ``spectral.conv_bins``."""
    layer = _layer(x, g, band.size, arguments)
    grid = Grid(layer, layer.size, None)
    kept = 2 * len(bins.kept_bins(band)) * len(x) * (x.shape[1] + g.shape[1])
    turned = bins.turned_bins(layer, grid, band) * len(g) * g.shape[1]
    parts = _norm_parts(layer, grid, x.dtype) | {"conjugates": Counts(SUB=turned)}
    read = [(read_entries(layer, grid), x.dtype)]
    written = [(kept, of_sums(x.dtype)), (len(x), WIDE)]
    made = itemised(read, written, walked=_walked(layer), **parts)
    return made + _modelled(transforms(layer, grid))


def whitened_bins(
    x: torch.Tensor, g: torch.Tensor, matrix: torch.Tensor, *, band: Band, **arguments: Any
) -> Itemised:
    """Count ``spectral.whitened_bins`` with a matrix whose rows are neither even nor odd.

    Even and odd rows take half of the coordinates' products.
    """
    layer = _layer(x, g, band.size, arguments)
    grid = Grid(layer, layer.size, None)
    geometry, kept, rank = layer.geometry, len(bins.kept_bins(band)), len(matrix)
    batch, maps = len(x), x.shape[1] + g.shape[1]
    pairs = geometry.in_channels * geometry.out_channels // geometry.groups
    turned = Counts(MUL=4, ADD=1, SUB=1)
    rounding = dots(read_entries(layer, grid)) + batch * Counts(SQRT=6, MUL=9, ADD=5)
    made = itemised(
        [(read_entries(layer, grid), x.dtype), (matrix.numel(), matrix.dtype)],
        [(2 * kept * batch * maps, of_sums(x.dtype)), (batch, WIDE)],
        walked=(),
        products=batch * pairs * kept * turned,
        turns=batch * geometry.in_channels * kept * turned,
        coordinates=batch * dots(pairs * rank * (2 * kept + 1)),
        powers=batch * (dots(2 * kept * maps) + geometry.groups * kept * Counts(MUL=2, ADD=1)),
        rounding_bound=rounding,
    )
    return made + _modelled(transforms(layer, grid))


def _walked(layer: ConvolutionGrid) -> tuple[str, ...]:
    """Return the parts that a walk confirms; the reference also transforms single places."""
    return () if layer.single else ("powers",)


def bins_sum(
    x_bins: torch.Tensor,
    g_bins: torch.Tensor,
    factors: torch.Tensor,
    out: torch.Tensor,
    *,
    used: int | None = None,
    **_: Any,
) -> Itemised:
    """Count ``spectral.bins_sum``; ``used`` counts nonzero factors; None reads the factors."""
    used = _values.count_used_samples(factors) if used is None else used
    kept, channels = len(x_bins), x_bins.shape[3] + g_bins.shape[3]
    pairs, taps = kept * len(out) * out.shape[1], math.prod(out.shape[2:])
    entries, any_used = (out.numel(), 1) if used else (0, 0)
    return itemised(
        [(len(factors) + 2 * kept * used * channels + entries, out.dtype)],
        [(entries, out.dtype)],
        walked=("scaling", "products", "crop"),
        tests=Counts(CMP=len(factors)),
        scaling=Counts(MUL=2 * kept * used * g_bins.shape[3]),
        products=dots(4 * pairs * used) + pairs * any_used * Counts(ADD=1, SUB=1),
        crop=dots(2 * pairs * taps * any_used) + Counts(ADD=entries),
    )


def filtered(
    x: torch.Tensor, *, padding: Sequence[int], rows: Sequence[int], band: Band, **_: Any
) -> Itemised:
    """Count ``spectral.filtered``: two small products per map for a rectangle, else transforms."""
    maps = x.shape[0] * x.shape[1]
    taken, used = filter.read_places(x, padding, rows), axes(rows)
    read = [(maps * math.prod(taken), x.dtype)]
    written = [(maps * math.prod(used), of_sums(x.dtype))]
    if band.kind == "rectangle":
        sizes, each = list(taken), 0
        for axis in reversed(range(len(used))):
            each += math.prod(sizes) * used[axis]
            sizes[axis] = used[axis]
        products = dots(maps * each)
        # A map of which no column is taken has no row either.
        return itemised(read, written, walked=("products",), products=products)
    gains = Counts(MUL=2 * maps * half_gains(band).numel())
    return itemised(read, written, walked=("gains",), gains=gains) + _modelled(
        of_map(band.size) * (2 * maps)
    )


def whitened_norm(grads: torch.Tensor, matrix: torch.Tensor, **_: Any) -> Itemised:
    """Count ``spectral.whitened_norm``."""
    batch, (rank, taps) = len(grads), matrix.shape
    pairs = batch * grads.shape[1] * grads.shape[2]
    matrix_norm = dots(matrix.numel()) + Counts(SQRT=1, MUL=1)
    return itemised(
        [(grads.numel(), grads.dtype), (matrix.numel(), matrix.dtype)],
        [(batch, WIDE)],
        walked=("coordinates",),
        widened=widened(grads.dtype, grads.numel()),
        coordinates=dots(pairs * rank * (taps + 1)),
        rounding_bound=dots(pairs * taps) + matrix_norm + batch * Counts(SQRT=2, MUL=3, ADD=1),
    )


def circulant_norm(x: torch.Tensor, g: torch.Tensor, **_: Any) -> Itemised:
    """Count ``spectral.circulant_norm``: one position, Gram matrices, or the spectrum."""
    batch, positions, ins, block = x.shape
    outs, operands = g.shape[2], x.numel() + g.numel()
    route = circulant.norm_route(x, g)
    bound = Counts(SQRT=3, MUL=4, ADD=1)
    if route == "rank_one":
        each = dots(2 * (ins + outs)) + Counts(MUL=1)
    elif route == "positions":
        product = Counts(MUL=4, ADD=3, SUB=1)
        pairs = (ins + outs) * product + Counts(MUL=2, SUB=1, ADD=1)
        each = positions**2 * pairs + Counts(CMP=1, MUX=1)
        bound = Counts(SQRT=3, MUL=6, ADD=2)
    else:
        each = ins * outs * (positions * Counts(MUL=4, ADD=3, SUB=1) + dots(2))
    return itemised(
        [(operands, x.dtype)],
        [(batch, WIDE)],
        walked=("products_over_bins",) if route == "spectrum" else (),
        widened=widened(x.dtype, operands),
        products_over_bins=batch * (block // 2 + 1) * (each + dots(1)),
        rounding_bound=dots(operands) + batch * bound,
    ) + _modelled(circulant.transforms(x, g, batch))


def circulant_product(x: torch.Tensor, weight: torch.Tensor, **_: Any) -> Itemised:
    """Count ``spectral.circulant_product``."""
    (batch, ins, block), outs = x.shape, len(weight)
    made = itemised(
        [(x.numel() + weight.numel(), x.dtype)],
        [(batch * outs * block, x.dtype)],
        walked=("products",),
        products=batch * outs * ins * (block // 2 + 1) * Counts(MUL=4, ADD=3, SUB=1),
    )
    lines = batch * (ins + outs) + ins * outs
    return made + _modelled(circulant.line(block) * lines)


def circulant_gradient(x: torch.Tensor, g: torch.Tensor, **_: Any) -> Itemised:
    """Count ``spectral.circulant_gradient``."""
    batch, positions, ins, block = x.shape
    pairs = batch * ins * g.shape[2]
    entries, products = pairs * block, pairs * (block // 2 + 1) * positions
    return itemised(
        [(x.numel() + g.numel(), x.dtype)],
        [(entries, x.dtype), (batch, WIDE)],
        walked=("products", "squares"),
        products=products * Counts(MUL=4, ADD=3, SUB=1),
        squares=widened(x.dtype, entries) + dots(entries),
    ) + _modelled(circulant.transforms(x, g, batch, inverse=batch))


def circulant_sum(
    x: torch.Tensor,
    g: torch.Tensor,
    factors: torch.Tensor,
    out: torch.Tensor,
    *,
    band: Band | None = None,
    used: int | None = None,
    **_: Any,
) -> Itemised:
    """Count ``spectral.circulant_sum``; ``used`` counts nonzero factors; None reads the factors."""
    used = _values.count_used_samples(factors) if used is None else used
    tests = Counts(CMP=len(factors))
    if not used:
        return itemised([(len(factors), factors.dtype)], [], tests=tests)
    positions, ins, block = x.shape[1:]
    outs, rows = g.shape[2], used * positions
    pairs = ins * outs * (block // 2 + 1)
    return itemised(
        [(len(factors) + rows * block * (ins + outs) + out.numel(), out.dtype)],
        [(out.numel(), out.dtype)],
        walked=("scaling", "products", "gains", "sums"),
        tests=tests,
        scaling=Counts(MUL=rows * outs * block),
        products=pairs * rows * Counts(MUL=4, ADD=3, SUB=1),
        gains=Counts(MUL=0 if band is None else 2 * pairs),
        sums=Counts(ADD=out.numel()),
    ) + _modelled(circulant.transforms(x, g, used, inverse=1))


FORMS: dict[str, Form] = {
    "spectral.conv_norm": conv_norm,
    "spectral.conv_bins": conv_bins,
    "spectral.bins_sum": bins_sum,
    "spectral.whitened_bins": whitened_bins,
    "spectral.filtered": filtered,
    "spectral.whitened_norm": whitened_norm,
    "spectral.circulant_norm": circulant_norm,
    "spectral.circulant_product": circulant_product,
    "spectral.circulant_gradient": circulant_gradient,
    "spectral.circulant_sum": circulant_sum,
}
