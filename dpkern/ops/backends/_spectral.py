"""Run spectral ops on the CPU: torch's transforms, and compiled kernels.

A few samples are transformed at a time; the kernels take their spectra while they are in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...base.dtypes import FLOATS
from ...base.memory import memory_order
from ...base.signature import Double, Float, Index, Int64, written
from ..ghost._conv_geometry import Size
from ..spectral import bins
from ..spectral._band import Band
from ..spectral._filter_products import is_even, multiplied
from ..spectral._plan import Retained, plan_of, reaches, retained
from ..spectral._sizes import ConvolutionGrid, axes, planes, volumes
from ..spectral._spectra import Grid, parseval, transform_error
from ..spectral.filter import filtered
from ..spectral.whitened_bins import plan_for
from ._extension import on_cpu
from ._native import compiled
from ._spectra import chunks, constant, room

_CHUNK = 1 << 20
"""Bytes of a chunk's spectra, which stay in the second cache."""
_FILTER_CHUNK = 1 << 17
"""Numbers of a chunk's maps, which a filter multiplies three times."""


@compiled
def spectral_powers(
    spectra: Float[Tensor, "B C K 2"], powers: Double[Tensor, "B G K", written]
) -> None:
    """Sum the powers of complex spectra over the channels of each group."""


@compiled
def spectral_squares(
    x_powers: Double[Tensor, "B G K"],
    g_powers: Double[Tensor, "B G L"],
    index: Int64[Tensor, "K"] | None,
    factors: Double[Tensor, "K"],
    x_weights: Double[Tensor, "K"],
    g_weights: Double[Tensor, "L"],
    error: float,
    share: float,
) -> Double[Tensor, "squares: B"]:
    """Return sums over groups and bins of ``factors x_powers g_powers``, from above.

    They are raised by what the error of the transforms can hide.

    Args:
        x_powers, g_powers: of a layer's inputs and of its output gradients.
        index: which bin of g belongs to a bin of x, where g has a smaller grid.
        factors: gains^2 times the bins that one stands for, over P Q.
        x_weights, g_weights: Parseval's, from powers to the squared norm of an operand.
        error: of the transforms, relative to the norm of one map.
        share: ``sqrt(P' Q')`` of g's grid.
    """
    raise NotImplementedError


@compiled
def spectral_gather(
    spectra: Float[Tensor, "B C K 2"],
    kept: Int64[Tensor, "N"],
    first: Index,
    out: Float[Tensor, "N R 2 C", written],
) -> None:
    """Gather real and imaginary parts of the kept bins, for rows of ``out`` from ``first`` on."""


@compiled
def spectral_norm(
    x: Float[Tensor, "B C D H W"],
    g: Float[Tensor, "B O Z Y X"],
    lines: Int64[Tensor, "N"],
    turns: Double[Tensor, "M"],
    index: Int64[Tensor, "K"],
    weights: Double[Tensor, "K J"],
    x_weights: Double[Tensor, "K"],
    g_weights: Double[Tensor, "L"],
    errors: Double[Tensor, "E"],
    share: float,
    narrow_sums: float,
    wide_sums: float,
    groups: Index,
    wide: bool,
    x_bin: Int64[Tensor, "K S"] | None,
    x_from: Int64[Tensor, "R"] | None,
    x_turn: Double[Tensor, "R U"] | None,
    x_count: Index,
    g_bin: Int64[Tensor, "L S"] | None,
    g_from: Int64[Tensor, "R"] | None,
    g_turn: Double[Tensor, "R U"] | None,
    g_count: Index,
    retained: Index,
    x_bins: Float[Tensor, "R B A C", written] | None,
    g_bins: Float[Tensor, "R B A O", written] | None,
) -> Double[Tensor, "squares: B"]:
    """Return squared norms of the correlation maps, from above, and write the retained bins.

    Args:
        x, g: volumes of inputs, and of output gradients; planes have the depth 1.
        lines, turns, index, weights, x_weights, g_weights, errors, share: ``NormTables``.
        narrow_sums, wide_sums, wide: of a ``NormPlan``.
        groups: of the convolution.
        x_bin, x_from, x_turn, x_count: of the ``Retained`` bins of x, or None; so for g.
        x_bins, g_bins: what was retained.
    """
    raise NotImplementedError


@compiled
def spectral_bins(
    x: Float[Tensor, "B C D H W"],
    lines: Int64[Tensor, "N"],
    turns: Double[Tensor, "M"],
    bin: Int64[Tensor, "K S"],
    source: Int64[Tensor, "R"],
    turn: Double[Tensor, "R U"],
    count: Index,
    wide: bool,
    bins: Float[Tensor, "R B A C", written],
) -> Double[Tensor, "squares: B"]:
    """Write the retained bins of one operand, whose maps are ``x``, and return its squares.

    Args:
        x: volumes; planes have the depth 1.
        lines, turns: of the operand's lines, as in ``NormTables``.
        bin, source, turn, count: its ``Retained`` bins.
        wide: whether to compute in double.
        bins: what was retained.

    Returns:
        The squares of the rows and columns that outputs use, to 2^-11 of them where they are not
        beyond the range of the arithmetic.
    """
    raise NotImplementedError


@compiled
def spectral_bins_sum(
    x_bins: Float[Tensor, "K B A C"],
    g_bins: Float[Tensor, "K B A O"],
    factors: Float[Tensor, "B"],
    cosines: Double[Tensor, "T K"],
    sines: Double[Tensor, "T K"],
    groups: Index,
    out: Float[Tensor, "O I T", written],
) -> None:
    """Add the taps of the weighted sum over samples, from the retained bins of both operands."""


@compiled
def spectral_whitened(
    x: Float[Tensor, "B C H W"],
    g: Float[Tensor, "B O Y X"],
    x_bins: Float[Tensor, "K B A C"],
    g_bins: Float[Tensor, "K B A O"],
    x_squares: Double[Tensor, "B"],
    g_squares: Double[Tensor, "B"],
    even: Double[Tensor, "E K"],
    odd: Double[Tensor, "N K"],
    odd_from: Index,
    turns: Double[Tensor, "K A"],
    weights: Double[Tensor, "K"],
    stretch: float,
    product_error: float,
    x_error: float,
    g_error: float,
    share: float,
    groups: Index,
    rows: Index,
    columns: Index,
) -> Double[Tensor, "squares: B"]:
    """Return squared norms of whitened coordinates, from above.

    Args:
        x, g: planes of inputs, and of output gradients.
        x_bins, g_bins: their retained bins.
        x_squares, g_squares: of ``spectral_bins``.
        even, odd, odd_from, turns, weights, stretch, product_error, x_error, g_error, share: of a
            ``WhitenedPlan``.
        groups: of the convolution.
        rows, columns: how many of x outputs use.
    """
    raise NotImplementedError


@compiled
def whitened_norm(
    grads: Float[Tensor, "B outer taps inner"], matrix: Double[Tensor, "r taps"]
) -> Double[Tensor, "squares: B"]:
    """Return squares, from above, of the matrix times every channel pair's taps."""
    raise NotImplementedError


def _refuse(x: Tensor, *_: Any, **__: Any) -> str | None:
    if x.dtype not in FLOATS:
        kind = str(x.dtype).removeprefix("torch.")
        return on_cpu(x) or f"has float32 and float64 operands, got {kind}"
    return on_cpu(x)


def _squares(grid: Grid, powers: list[Tensor], eta: float) -> Tensor:
    x_powers, g_powers = powers
    x_weights, g_weights = parseval(grid.size), parseval(grid.folded)
    share = math.prod(grid.folded) ** 0.5
    return spectral_squares(
        x_powers, g_powers, grid.index, grid.factors, x_weights, g_weights, eta, share
    )


@torch.no_grad()
def _conv_norm(
    x: Tensor, g: Tensor, *, band: Band | None, plan: ConvolutionGrid, **_: Any
) -> Tensor:
    grid = Grid.of(plan, band)
    return _fused(x, g, grid) if reaches(grid) else _by_transforms(x, g, grid)


def _fused(
    x: Tensor,
    g: Tensor,
    grid: Grid,
    kept: tuple[Retained | None, Retained | None] = (None, None),
    out: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    """Run the kernel, which writes the bins that are ``kept`` to ``out`` as well."""
    made = plan_of(grid)
    tables = made.tables
    (xs, gs), (x_bins, g_bins) = kept, out
    return spectral_norm(
        volumes(x),
        volumes(g),
        tables.lines,
        tables.turns,
        tables.index,
        tables.weights,
        tables.x_weights,
        tables.g_weights,
        tables.errors,
        tables.share,
        made.narrow_sums,
        made.wide_sums,
        grid.layer.geometry.groups,
        made.wide,
        None if xs is None else xs.places,
        None if xs is None else xs.source,
        None if xs is None else xs.turn,
        0 if xs is None else xs.count,
        None if gs is None else gs.places,
        None if gs is None else gs.source,
        None if gs is None else gs.turn,
        0 if gs is None else gs.count,
        0 if x_bins is None else len(x_bins),
        x_bins,
        g_bins,
    )


def _by_transforms(x: Tensor, g: Tensor, grid: Grid) -> Tensor:
    plan, groups = grid.layer, grid.layer.geometry.groups
    powers = room(x, groups, grid)
    for part, spectra in chunks(x, grid, "x", _CHUNK):
        spectral_powers(torch.view_as_real(spectra), powers[0][part])
    if plan.single:
        powers[1].copy_(constant(g, groups))
    else:
        for part, spectra in chunks(g, grid, "g", _CHUNK):
            spectral_powers(torch.view_as_real(spectra), powers[1][part])
    return _squares(grid, powers, transform_error(x.dtype, grid.size))


@torch.no_grad()
def _conv_bins(
    x: Tensor, g: Tensor, *, band: Band, plan: ConvolutionGrid, **_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    grid, groups = Grid(plan, plan.size, None), plan.geometry.groups
    kept = bins.kept_bins(band)
    found = [t.new_empty(len(kept), len(t), 2, t.shape[1]) for t in (x, g)]
    if reaches(grid):
        squares = _fused(x, g, grid, retained(grid, band), (found[0], found[1]))
        return found[0], found[1], squares
    powers = room(x, groups, grid)
    for part, spectra in chunks(x, grid, "x", _CHUNK):
        parts = torch.view_as_real(spectra)
        spectral_powers(parts, powers[0][part])
        spectral_gather(parts, kept, part.start, found[0])
    if plan.single:
        powers[1].copy_(constant(g, groups))
        found[1][:, :, 0] = g.flatten(1)
        found[1][:, :, 1] = 0
    else:
        at = bins.gradient_bins(band, grid.size, grid.folded)
        for part, spectra in chunks(g, grid, "g", _CHUNK):
            parts = torch.view_as_real(spectra)
            spectral_powers(parts, powers[1][part])
            spectral_gather(parts, at, part.start, found[1])
    squares = _squares(grid, powers, transform_error(x.dtype, grid.size))
    return found[0], bins.unfold(found[1], grid, band), squares


@torch.no_grad()
def _whitened_bins(
    x: Tensor, g: Tensor, matrix: Tensor, *, band: Band, plan: ConvolutionGrid, **_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    grid = Grid(plan, plan.size, None)
    x_bins, g_bins, x_squares, g_squares = _bins(x, g, grid, band)
    made = plan_for(plan, matrix, band, x.dtype)
    # A volume's rows are those of all its planes: its norm is not below that of the used ones.
    xs, gs = (volumes(t).flatten(2, 3) for t in (x, g))
    rows = xs.shape[2] if x.dim() == 5 else grid.rows[-2]
    squares = spectral_whitened(
        xs,
        gs,
        x_bins,
        g_bins,
        x_squares,
        g_squares,
        made.even,
        made.odd,
        made.odd_from,
        made.turns,
        made.weights,
        made.stretch,
        made.product_error,
        made.x_error,
        made.g_error,
        made.share,
        plan.geometry.groups,
        rows,
        grid.rows[-1],
    )
    return x_bins, g_bins, squares


def _bins(x: Tensor, g: Tensor, grid: Grid, band: Band) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the retained bins of both operands, and the squares of their maps."""
    if not reaches(grid):
        x_bins, g_bins, _ = _conv_bins(x, g, band=band, plan=grid.layer)
        x_squares, g_squares = (t.flatten(1).double().square().sum(1) for t in (x, g))
        return x_bins, g_bins, x_squares, g_squares
    made = plan_of(grid)
    found, squares = [], []
    for maps, keep, line in zip((x, g), retained(grid, band), made.tables.sides, strict=True):
        bins = maps.new_empty(len(keep.source), len(maps), 2, maps.shape[1])
        tables = *line, keep.places, keep.source, keep.turn, keep.count
        squares.append(spectral_bins(volumes(maps), *tables, made.wide, bins))
        found.append(bins)
    return found[0], found[1], squares[0], squares[1]


@torch.no_grad()
def _filtered(x: Tensor, *, padding: Sequence[int], rows: Sequence[int], band: Band) -> Tensor:
    if band.kind == "rectangle" or not is_even(band):
        return filtered.reference(x, padding=padding, rows=rows, band=band)
    used, before = axes(rows), axes(padding, 0)
    maps = planes(x)
    out = maps.new_empty(*maps.shape[:2], *used)
    samples = max(1, _FILTER_CHUNK // max(1, maps[:1].numel()))
    for begin in range(0, len(maps), samples):
        part = slice(begin, begin + samples)
        out[part] = multiplied(maps[part], before, used, band)
    return out.view(*x.shape[:2], *rows)


def _bins_sum(
    x_bins: Tensor,
    g_bins: Tensor,
    factors: Tensor,
    out: Tensor,
    *,
    dilation: Size,
    groups: int,
    band: Band,
    **_: Any,
) -> None:
    turns = bins.crop_matrix(band, axes(out.shape[2:]), bins.taps_apart(out, dilation))
    spectral_bins_sum(x_bins, g_bins, factors, *turns, groups, out.flatten(2))


def _whitened_norm(grads: Tensor, matrix: Tensor) -> Tensor:
    """Run the kernel with the gradients as they lie in memory, a view of them."""
    order = memory_order(grads)
    shape = [grads.shape[i] for i in order]
    first = min(place for place, i in enumerate(order) if i > 2)
    outer, inner = (
        torch.Size(sizes).numel() for sizes in (shape[:first], shape[first + _axes(grads) :])
    )
    rows = grads.permute(0, *order).reshape(len(grads), outer, matrix.shape[1], inner)
    return whitened_norm(rows, matrix)


def _axes(grads: Tensor) -> int:
    return grads.dim() - 3


def _refuse_whitened(grads: Tensor, *_: Any, **__: Any) -> str | None:
    order = memory_order(grads)
    taps = [place for place, i in enumerate(order) if i > 2]
    if [order[place] for place in taps] != list(range(3, grads.dim())) or taps != list(
        range(taps[0], taps[0] + len(taps))
    ):
        return "reads taps that stand together in memory, in order"
    return on_cpu(grads)


KERNELS: tuple[tuple[str, Any, Any], ...] = (
    ("spectral.conv_norm", _conv_norm, _refuse),
    ("spectral.conv_bins", _conv_bins, _refuse),
    ("spectral.bins_sum", _bins_sum, _refuse),
    ("spectral.whitened_bins", _whitened_bins, _refuse),
    ("spectral.filtered", _filtered, _refuse),
    ("spectral.whitened_norm", _whitened_norm, _refuse_whitened),
)
"""``(op, run, refuse)``."""
