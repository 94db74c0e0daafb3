"""Norms of whitened coordinates from the retained bins of both operands: no filter, and no taps.

With ``Z = conj(D^) X^`` at the retained bins, every coordinate of ``y = M F`` is a sum of so many
products as there are bins (``_whitened_plan``), where F takes a filter and one product for each
output position.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ...base import validate as check
from ...base.dispatch import op
from ...base.signature import Double, Operand, Sum
from ..ghost._bounds import of_sums
from ..ghost._conv_geometry import Size
from ._band import Band
from ._filter_products import filter_products, is_even
from ._plan import reaches, transform_products
from ._sizes import ConvolutionGrid, axes
from ._spectra import Grid, of_one_sample
from ._whitened_plan import Matrix, WhitenedPlan, whitened_plan
from .bins import _check_bins, conv_bins, kept_bins

_CHUNK = 1 << 22
"""Products of bins that the reference makes at a time."""


def _check(
    x: Tensor,
    g: Tensor,
    matrix: Tensor,
    kernel_size: Size,
    stride: Size,
    padding: Size,
    dilation: Size,
    groups: int,
    band: Band,
) -> ConvolutionGrid:
    layer = _check_bins(x, g, kernel_size, stride, padding, dilation, groups, band)
    check.tensor(matrix=matrix, shape=(None, layer.geometry.taps))
    return layer


_values: Any = WeakIdKeyDictionary()
"""Matrices on devices with their versions and values: a copy at every call would let the host
wait."""


def _matrix(matrix: Tensor) -> Matrix:
    if matrix.is_cpu:
        return Matrix.of(matrix)
    version, values = _values.get(matrix, (None, None))
    if values is None or version != matrix._version:
        values = Matrix.of(matrix.cpu())
        _values[matrix] = matrix._version, values
    assert isinstance(values, Matrix)
    return values


PlanArguments = tuple[Matrix, Grid, Band, torch.dtype, tuple[float, float] | None]


def plan_arguments(
    layer: ConvolutionGrid,
    matrix: Tensor,
    band: Band,
    dtype: torch.dtype,
    transforms: tuple[float, float] | None = None,
) -> PlanArguments:
    """Return the arguments of ``whitened_plan``, of transforms with these errors."""
    grid = of_one_sample(Grid(layer, layer.size, None))
    return _matrix(matrix), grid, band, dtype, transforms


def plan_for(
    layer: ConvolutionGrid,
    matrix: Tensor,
    band: Band,
    dtype: torch.dtype,
    transforms: tuple[float, float] | None = None,
) -> WhitenedPlan:
    """Return the tables and errors of a layer's coordinates, of transforms with these errors."""
    return whitened_plan(*plan_arguments(layer, matrix, band, dtype, transforms))


@op(check=_check)
@torch.no_grad()
def whitened_bins(
    x: Operand[Tensor, "B ci *S"],
    g: Operand[Tensor, "B co *O"],
    matrix: Double[Tensor, "r taps"],
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
    """Return both operands' retained bins and the squared norms of whitened coordinates.

    ``sum || M F ||^2`` over channel pairs, with F the taps of ``h * R``: the norm of
    ``conv_release`` without its rows.

    Args: as ``conv_bins``, and
        matrix: M, float64 ``[r, taps]`` (``WhitenedBasis.signal``).

    Returns:
        The bins of ``conv_bins``, for ``bins_sum``; and float64 ``[B]``, at least the exact value
        of these inputs. Above it by about 1e-3 of it (float32) or 1e-12 (float64) where the taps
        hold a tenth of the map's norm; by any factor for float32 operands with norms below 2^-40
        or above 2^50.

    Raises:
        InvalidInput: wrong type, shape, dtype, device, layout, size or band.
    """
    layer = ConvolutionGrid.of(x, g, kernel_size, stride, padding, dilation, groups, band.size)
    plan = plan_for(layer, matrix, band, torch.float64)
    xs, gs = x.double(), g.double()
    options: dict[str, Any] = {"kernel_size": kernel_size, "stride": stride, "padding": padding}
    options |= {"dilation": dilation, "groups": groups}
    x_bins, g_bins, _ = conv_bins.reference(xs, gs, **options, band=band)
    squares = whitened_squares(xs, gs, x_bins, g_bins, plan, groups)
    kind = of_sums(x.dtype)
    return x_bins.to(kind), g_bins.to(kind), squares


def whitened_squares(
    x: Tensor, g: Tensor, x_bins: Tensor, g_bins: Tensor, plan: WhitenedPlan, groups: int
) -> Tensor:
    """Return squared norms of whitened coordinates, from above; all operands are float64."""
    numbers = 4 * x_bins.shape[0] * x_bins.shape[3] * g_bins.shape[3]
    each = max(1, _CHUNK // max(1, numbers))  # the products of a few samples at a time
    parts = [slice(first, first + each) for first in range(0, max(1, len(x)), each)]
    sums = [conv_parts(x_bins[:, part], g_bins[:, part], plan, groups) for part in parts]
    kept = [torch.cat(of_all) for of_all in zip(*sums, strict=True)]
    x_norm, g_norm = (t.flatten(1).norm(dim=1) for t in (x, g))
    return from_above(kept[0], kept[1], kept[2], kept[3], x_norm, g_norm, plan)


def conv_parts(
    x_bins: Tensor, g_bins: Tensor, plan: WhitenedPlan, groups: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return squared norms of the coordinates and of the kept map, and the largest powers."""
    device, batch = x_bins.device, x_bins.shape[1]
    even, odd, turns, weights = (
        t.to(device) for t in (plan.even, plan.odd, plan.turns, plan.weights)
    )
    cosines, sines = turns.unbind(1)
    first = plan.odd_from
    count = max(len(even), first + len(odd))
    total, kept = x_bins.new_zeros(2, batch).unbind()
    most = x_bins.new_zeros(2, batch)
    for xs, gs in zip(x_bins.chunk(groups, 3), g_bins.chunk(groups, 3), strict=True):
        z = torch.einsum("kbpo,kbqc->bpqock", gs, xs)
        re, im = z[:, 0, 0] + z[:, 1, 1], z[:, 0, 1] - z[:, 1, 0]
        rows = re.new_zeros(*re.shape[:-1], count)
        rows[..., : len(even)] = (cosines * re - sines * im) @ even.T
        rows[..., first : first + len(odd)] += (cosines * im + sines * re) @ odd.T
        total = total + rows.flatten(1).square().sum(1)
        powers = [t.square().sum((2, 3)) for t in (xs, gs)]
        kept = kept + weights @ (powers[0] * powers[1])
        most = torch.maximum(most, torch.stack([power.amax(0) for power in powers]))
    return total, kept, most[0], most[1]


def from_above(
    squares: Tensor,
    kept: Tensor,
    x_most: Tensor,
    g_most: Tensor,
    x_norm: Tensor,
    g_norm: Tensor,
    plan: WhitenedPlan,
) -> Tensor:
    """Return squared norms raised by what the errors of bins and coordinates can hide."""
    bins = plan.g_error * g_norm * x_most.sqrt()
    bins += plan.x_error * x_norm * (g_most.sqrt() + plan.share * plan.g_error * g_norm)
    slack = plan.stretch * bins + plan.product_error * kept.sqrt()
    above: Tensor = squares.sqrt() + slack * (1 + 2.0**-10)
    return above.square() * (1 + 2.0**-30)


def norm_by_bins(
    x: Tensor,
    g: Tensor,
    *,
    rank: int,
    kernel_size: Size,
    stride: Size = 1,
    padding: Size = 0,
    dilation: Size = 1,
    groups: int = 1,
    size: Sequence[int],
    band: Band,
) -> bool:
    """Whether retained bins are the cheaper way to ``rank`` whitened coordinates of each pair.

    They are where they are half as many as the output positions, and where the filter that the
    other way needs costs more than the products that it saves.
    """
    layer = ConvolutionGrid.of(x, g, kernel_size, stride, padding, dilation, groups, size)
    return _by_bins(layer, rank, band)


# Picoseconds of each product, as measured with AVX-512 on one core; only their ratios matter.
_COORDINATES, _TRANSFORMS, _SUMS, _PACKED = 25, 40, 17, 1200
_GRADIENTS, _FILTERS, _DOUBLE = 22, 37, 100
_LANES = 16


def by_grams(bins: int, ins: int, outs: int, rank: int) -> bool:
    """Whether Gram matrices over channels take less time than the channel pairs of a group.

    It is ``Grams::cheaper`` in ``csrc/cpu/spectral_whitened.cpp``.
    """
    return 2 * _gram_work(bins, ins, outs) < ins * outs * bins * (rank + 4) // _LANES


def _gram_work(bins: int, ins: int, outs: int) -> int:
    """Return products of 8 lanes of float64, those that add up lanes included."""
    return 2 * bins**2 * (-(-ins // 8) + -(-outs // 8) + 16)


@lru_cache(maxsize=256)
def _by_bins(layer: ConvolutionGrid, rank: int, band: Band) -> bool:
    geometry, grid = layer.geometry, Grid(layer, layer.size, None)
    if layer.size != axes(band.size) or not (reaches(grid) and is_even(band)):
        return False
    ins, outs = geometry.in_channels, geometry.out_channels
    pairs, bins = ins * outs // geometry.groups, len(kept_bins(band))
    if 2 * bins < geometry.positions:
        return True
    sizes = bins, ins // geometry.groups, outs // geometry.groups, rank
    coordinates = pairs * bins * (rank + 4)
    if by_grams(*sizes):
        coordinates = 2 * _LANES * geometry.groups * _gram_work(*sizes[:3])
    by_bins = (
        coordinates * _COORDINATES
        + pairs * bins * 4 * _SUMS
        + transform_products(grid) * _TRANSFORMS
        + bins * (ins + outs) * _PACKED
    )
    filters = filter_products(band, layer.padding, layer.least, layer.input)
    by_positions = (
        pairs * geometry.taps * (geometry.positions * _GRADIENTS + rank * _DOUBLE)
        + ins * filters * _FILTERS
    )
    return by_bins < by_positions


__all__ = [
    "PlanArguments",
    "conv_parts",
    "from_above",
    "norm_by_bins",
    "plan_arguments",
    "plan_for",
    "whitened_bins",
    "whitened_squares",
]
