"""Norms and sums of convolutions in the frequency domain: maps are transformed on the chip.

A program has a few frequencies along rows and all along columns, and takes the maps of a sample's
group one after the other: rows by products with cosines and sines, columns by products of what they
give, and the powers of all maps stay in registers. ``4 H W K + 8 P H K`` operations for a map of
H x W values on a grid of P rows and K half frequencies are several times those of a fast transform.
But a map is read from memory, and the powers of a group leave the chip, where the library writes
the spectrum of each map, and torch reads and writes it several times to add powers in float64.

Retained bins are written in the same pass, and their weighted sums are the products of circulant
layers. ``docs/spectral.md`` proves the bound. Not yet run on a GPU.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch.autograd.graph import increment_version

from ...ghost._bounds import of_sums
from ...ghost._conv_geometry import Size
from ...spectral import bins
from ...spectral._band import Band, half_weights
from ...spectral._lines import FrequencyLine, chained, circle
from ...spectral._plan import places
from ...spectral._sizes import Axes, ConvolutionGrid, axes, planes
from ...spectral._spectra import Grid, of_one_sample, on, product_squares
from ...spectral._whitened_plan import whitened_plan
from ...spectral.whitened_bins import PlanArguments, from_above, plan_arguments
from .. import _device_spectral
from .._spectra import room
from .frequencies import (
    filled,
    frequency_kernel,
    led_back,
    share,
    sides_of,
    sums_of,
    tiles_of,
)
from .launch import INTERPRETED, launch
from .operands import MULTIPLE, product
from .scaled import scaled

LARGEST = 64
"""Values on an axis of the largest grid; larger ones take the library's transforms."""
FREQUENCIES = 16
"""Frequencies along rows that one program has."""
PAIRS = 32
"""Channel pairs whose coordinates a program makes."""
COORDINATES = 128
"""Coordinates of a pair, at most; more take torch's products."""
DEPTH, ROWS = 16, 32
"""Values in one product along rows, and rows in one along columns, at most."""


@triton.jit
def power_map_kernel(
    x, scales, across, down, powers, slots, kept, each, groups, p, bins, batch,
    KEEP: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    USED_ROWS: tl.constexpr,
    USED_COLUMNS: tl.constexpr,
    SUMS: tl.constexpr,
    GRID: tl.constexpr,
    LARGEST: tl.constexpr,
    FREQUENCIES: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Write the powers of one group's maps at some frequencies along rows and along columns.

    KEEP: of each map the bins with a slot as well, ``[slot, sample, 2, channel]``.
    """
    across_tiles = tl.cdiv(bins, FREQUENCIES)
    tiles = tl.cdiv(p, GRID) * across_tiles
    unit = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    kx = tile % across_tiles * FREQUENCIES + tl.arange(0, FREQUENCIES)
    ky = tile // across_tiles * GRID + tl.arange(0, GRID)
    scale = tl.load(scales + unit // groups)
    x += unit * each * (HEIGHT * WIDTH)
    inside = (ky < p)[:, None] & (kx < bins)[None, :]
    if KEEP:
        slot = tl.load(slots + ky[:, None] * bins + kx[None, :], mask=inside, other=-1)
        kept += (slot * batch + unit // groups) * (2 * groups * each) + unit % groups * each
    power = tl.zeros([GRID, FREQUENCIES], tl.float64)
    for channel in range(each):
        re = tl.zeros([GRID, FREQUENCIES], SUMS)
        im = tl.zeros([GRID, FREQUENCIES], SUMS)
        for top in range(0, USED_ROWS, ROWS):
            row = top + tl.arange(0, ROWS)
            cosine = tl.zeros([ROWS, FREQUENCIES], SUMS)
            sine = tl.zeros([ROWS, FREQUENCIES], SUMS)
            for left in range(0, USED_COLUMNS, DEPTH):
                column = left + tl.arange(0, DEPTH)
                mask = (row < USED_ROWS)[:, None] & (column < USED_COLUMNS)[None, :]
                part = tl.load(x + row[:, None] * WIDTH + column[None, :], mask=mask, other=0.0)
                if SUMS == tl.float32:
                    part = part.to(tl.float32)
                part = (part.to(tl.float64) * scale).to(SUMS)
                turns = across + column[:, None] * LARGEST + kx[None, :]
                cosine += product(part, tl.load(turns), SUMS, "ieee")
                sine += product(part, tl.load(turns + LARGEST * LARGEST), SUMS, "ieee")
            turns = down + ky[:, None] * LARGEST + row[None, :]
            turn = tl.load(turns)
            re += product(turn, cosine, SUMS, "ieee")
            im += product(turn, sine, SUMS, "ieee")
            turn = tl.load(turns + LARGEST * LARGEST)
            re -= product(turn, sine, SUMS, "ieee")
            im += product(turn, cosine, SUMS, "ieee")
        wide_re, wide_im = re.to(tl.float64), im.to(tl.float64)
        power += wide_re * wide_re + wide_im * wide_im
        if KEEP:
            tl.store(kept + channel, re, mask=slot >= 0)
            tl.store(kept + groups * each + channel, -im, mask=slot >= 0)
        x += HEIGHT * WIDTH
    place = (unit * p + ky[:, None]) * bins + kx[None, :]
    tl.store(powers + place, power, mask=inside)


@triton.jit
def whitened_kernel(
    x_bins, g_bins, turns, even, odd, partial, columns, pairs, groups, batch, outs, ins, count,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Write the sum of squares of some channel pairs' coordinates, all in float64."""
    tiles = tl.cdiv(pairs, PAIRS)
    tile = tl.program_id(0) % tiles
    group = tl.program_id(0) // tiles % groups
    sample = (tl.program_id(0) // (tiles * groups)).to(tl.int64)
    pair = tile * PAIRS + tl.arange(0, PAIRS)
    x_bins += sample * 2 * ins + group * columns
    g_bins += sample * 2 * outs + group * (pairs // columns)
    row = tl.arange(0, ROWS)
    total = tl.zeros([PAIRS, ROWS], tl.float64)
    for begin in range(0, count, DEPTH):
        k = begin + tl.arange(0, DEPTH)
        mask = (pair < pairs)[:, None] & (k < count)[None, :]
        place = g_bins + k[None, :] * (2 * batch * outs) + (pair // columns)[:, None]
        g_re = tl.load(place, mask=mask, other=0.0).to(tl.float64)
        g_im = tl.load(place + outs, mask=mask, other=0.0).to(tl.float64)
        place = x_bins + k[None, :] * (2 * batch * ins) + (pair % columns)[:, None]
        x_re = tl.load(place, mask=mask, other=0.0).to(tl.float64)
        x_im = tl.load(place + ins, mask=mask, other=0.0).to(tl.float64)
        re = g_re * x_re + g_im * x_im
        im = g_re * x_im - g_im * x_re
        cosine = tl.load(turns + k)[None, :]
        sine = tl.load(turns + WIDTH + k)[None, :]
        table = k[:, None] * ROWS + row[None, :]
        total += product(cosine * re - sine * im, tl.load(even + table), tl.float64, "ieee")
        total += product(cosine * im + sine * re, tl.load(odd + table), tl.float64, "ieee")
    tl.store(partial + tl.program_id(0), tl.sum(tl.sum(total * total, 1)))


def _waves(line: FrequencyLine, frequencies: int, first: int = 0) -> np.ndarray[Any, Any]:
    """Return cosines and sines ``[2, frequencies, values]``, of values from place ``first`` on."""
    turns = np.outer(np.arange(frequencies), np.arange(line.count) * line.step + first) % line.n
    return circle(line.n)[:, turns]


def _filled(waves: np.ndarray[Any, Any], dtype: torch.dtype) -> torch.Tensor:
    table = np.zeros((2, LARGEST, LARGEST))
    table[:, : waves.shape[1], : waves.shape[2]] = waves
    return torch.from_numpy(table).to(dtype)


def _across(line: FrequencyLine, first: int, dtype: torch.dtype) -> torch.Tensor:
    """Return cosines and sines ``[2, values, half frequencies]``, zeros behind them."""
    return _filled(_waves(line, line.n // 2 + 1, first).transpose(0, 2, 1), dtype)


def _down(line: FrequencyLine, first: int, dtype: torch.dtype) -> torch.Tensor:
    """Return cosines and sines ``[2, frequencies, values]``, zeros behind them."""
    return _filled(_waves(line, line.n, first), dtype)


@lru_cache(maxsize=256)
def _error(rows: FrequencyLine, columns: FrequencyLine, dtype: torch.dtype) -> float:
    """Return eta of a map's transform, relative to the norm of the map."""
    wide = dtype is torch.float64
    waves = np.abs(_waves(columns, columns.n // 2 + 1))
    halves = waves * np.sqrt(half_weights(columns.n) / columns.n)[:, None]
    first = np.concatenate([halves[0], halves[1]])
    second = np.abs(_waves(rows, rows.n)).sum(0) / math.sqrt(rows.n)
    errors = []
    for parts, line, depth, additions in ((first, columns, DEPTH, 1), (second, rows, ROWS, 2)):
        chain = min(depth, line.count) * (3 if wide else 1)
        roundings = chain + additions * -(-line.count // depth) + (8 if wide else 3)
        unit = 2.0**-53 if wide else 2.0**-24
        gamma = roundings * unit / (1 - roundings * unit)
        errors.append(gamma * math.sqrt(parts.sum(0).max() * parts.sum(1).max()))
    return chained(*errors) * (1 + 2.0**-20) + 2.0**-100


Bins = tuple[torch.Tensor, torch.Tensor]


def _whitened_table(name: str, arguments: PlanArguments) -> torch.Tensor:
    """Return a table of a ``WhitenedPlan``, with zeros behind its bins and its coordinates."""
    plan = whitened_plan(*arguments)
    count, first = len(plan.weights), plan.odd_from
    found: torch.Tensor = getattr(plan, name)
    if name == "weights":
        return found
    width = -(-count // DEPTH) * DEPTH
    if name == "turns":
        table = found.new_zeros(2, width)
        table[:, :count] = found.T
        return table
    rows = max(len(plan.even), first + len(plan.odd))
    table = found.new_zeros(width, max(16, int(triton.next_power_of_2(rows))))
    begin = first if name == "odd" else 0
    table[:count, begin : begin + len(found)] = found.T
    return table


@lru_cache(maxsize=256)
def _sources(band: Band, size: Axes, folded: Axes, which: int) -> Bins:
    """Return the bins of x (0) or g (1) that retained ones are read from, and which each is."""
    index = bins.kept_bins(band) if which == 0 else bins.gradient_bins(band, size, folded)
    found, source = torch.unique(index, return_inverse=True)
    return found, source


def _source(band: Band, size: Axes, folded: Axes, which: int) -> torch.Tensor:
    return _sources(band, size, folded, which)[1]


def _slots(band: Band, size: Axes, folded: Axes, which: int) -> torch.Tensor:
    """Return ``[P (Q / 2 + 1)]``, the slot of each bin, or -1."""
    height, width = (size, folded)[which]
    slots = torch.full((height * (width // 2 + 1),), -1, dtype=torch.int32, device="cpu")
    found, _ = _sources(band, size, folded, which)
    slots[found] = torch.arange(len(found), dtype=torch.int32, device="cpu")
    return slots


class Transformed:
    """Both operands' powers, and their retained bins if a band names them.

    Samples are multiplied by powers of two that take their largest entries to [1, 2).

    Attributes:
        scales, sizes: ``[2, B]``, these powers of two, and the squares of operands then.
        powers: ``[B, groups, bins]`` of x and of g.
        kept: ``[K, B, 2, channels]`` of x and of g.
        errors: of the transforms of x and of g, relative to the norms of their maps.
    """

    def __init__(self, x: torch.Tensor, g: torch.Tensor, grid: Grid, band: Band | None) -> None:
        self.grid = grid
        self.scales, self.sizes = scaled(x, g)
        self.powers = room(x, grid.layer.geometry.groups, grid)
        self.kept: list[torch.Tensor] = []
        self.errors = [
            _error(side.rows, side.columns, of_sums(x.dtype))
            for side in places(of_one_sample(grid), shared=False)
        ]
        for which, operand in enumerate((x, g)):
            self._run(which, operand, band)

    def _run(self, which: int, operand: torch.Tensor, band: Band | None) -> None:
        grid, device, dtype = self.grid, operand.device, of_sums(operand.dtype)
        side = places(of_one_sample(grid), shared=False)[which]
        groups, maps = grid.layer.geometry.groups, planes(operand)
        batch, channels, height, width = maps.shape
        top, left = grid.layer.padding if which == 0 else (0, 0)
        slots = kept = self.powers[which]
        if band is not None:
            arguments = band, grid.size, grid.folded, which
            slots = on(device, _slots, *arguments)
            kept = operand.new_empty(len(_sources(*arguments)[0]), batch, 2, channels, dtype=dtype)
        half, wide = side.columns.n // 2 + 1, dtype is torch.float64
        most = 32 if wide or band is not None else LARGEST  # what fits the registers
        down = min(most, max(16, int(triton.next_power_of_2(side.rows.n))))
        launch(
            power_map_kernel,
            batch * groups * triton.cdiv(half, FREQUENCIES) * triton.cdiv(side.rows.n, down),
            operand,
            *(operand, self.scales[which]),
            on(device, _across, side.columns, left, dtype),
            on(device, _down, side.rows, top, dtype),
            *(self.powers[which], slots, kept, channels // groups, groups, side.rows.n, half),
            batch,
            KEEP=band is not None,
            HEIGHT=height,
            WIDTH=width,
            USED_ROWS=side.rows.count,
            USED_COLUMNS=side.columns.count,
            SUMS=sums_of(dtype),
            GRID=down,
            LARGEST=LARGEST,
            FREQUENCIES=FREQUENCIES,
            ROWS=LARGEST if INTERPRETED else 16 if wide or side.rows.count <= 16 else ROWS,
            DEPTH=LARGEST if INTERPRETED else DEPTH,
            fused=True,
            maxnreg=255,
        )
        if band is not None:
            if len(kept) < len(bins.kept_bins(band)):
                kept = kept[on(device, _source, *arguments)]
            self.kept.append(bins.unfold(kept, grid, band) if which else kept)

    def squares(self) -> torch.Tensor:
        """Return the squared norms of correlation maps, from above."""
        geometry = self.grid.layer.geometry
        x_powers, g_powers = self.powers
        squares = product_squares(self.grid, x_powers, g_powers, max(self.errors))
        # Sums of powers over maps and frequencies are float64, and none is negative.
        terms = max(geometry.in_channels, geometry.out_channels) + self.powers[0][0].numel() + 64
        return self.back(squares * (1 + terms * 2.0**-50))

    def whitened(self, matrix: torch.Tensor, band: Band) -> torch.Tensor:
        """Return the squared norms of the scaled operands' whitened coordinates, from above."""
        layer, (x_bins, g_bins), (x_error, g_error) = self.grid.layer, self.kept, self.errors
        groups, device = layer.geometry.groups, x_bins.device
        arguments = plan_arguments(layer, matrix, band, torch.float64, (x_error, g_error))
        plan = whitened_plan(*arguments)
        turns, even, odd, weights = (
            on(device, _whitened_table, name, arguments)
            for name in ("turns", "even", "odd", "weights")
        )
        (count, batch, _, ins), outs = x_bins.shape, g_bins.shape[3]
        columns, pairs = ins // groups, ins * outs // groups**2
        tiles = triton.cdiv(pairs, PAIRS)
        partial = weights.new_empty(batch, groups * tiles)
        launch(
            whitened_kernel,
            batch * groups * tiles,
            x_bins,
            *(x_bins, g_bins, turns, even, odd, partial),
            *(columns, pairs, groups, batch, outs, ins, count),
            WIDTH=turns.shape[1],
            ROWS=even.shape[1],
            PAIRS=PAIRS,
            DEPTH=DEPTH,
            warps=8,
            fused=True,
            maxnreg=255,
        )
        x_powers, g_powers = (
            t.double().view(count, batch, 2, groups, -1).square().sum((2, 4))
            for t in (x_bins, g_bins)
        )
        kept = (x_powers * g_powers * weights[:, None, None]).sum((0, 2))
        x_most, g_most = (powers.amax((0, 2)) for powers in (x_powers, g_powers))
        # Products of a chunk count three times, as on tensor cores.
        plan = replace(plan, product_error=3 * plan.product_error)
        x_norm, g_norm = self.sizes.sqrt()
        return from_above(partial.sum(1), kept, x_most, g_most, x_norm, g_norm, plan)

    def back(self, squares: torch.Tensor) -> torch.Tensor:
        """Return the squares of the operands as they were, rounded up at 0."""
        power = (1 / self.scales[0] * (1 / self.scales[1])).clamp(2.0**-600, 2.0**600)
        return torch.where(squares == 0, squares, squares * power * power + 2.0**-1074)

    def bins(self) -> Bins:
        """Return the retained bins of the operands as they were."""
        x_bins, g_bins = (
            kept * (1 / scale).to(kept.dtype)[:, None, None]
            for kept, scale in zip(self.kept, self.scales, strict=True)
        )
        return x_bins, g_bins


def _reaches(x: torch.Tensor, g: torch.Tensor, grid: Grid) -> bool:
    takes = len(grid.size) == 2 and max(grid.size) <= LARGEST and min(grid.rows) > 0
    return takes and bool(x.numel() and g.numel())


@torch.no_grad()
def _norm(
    x: torch.Tensor, g: torch.Tensor, *, band: Band | None, plan: ConvolutionGrid, **_: Any
) -> torch.Tensor:
    grid = Grid.of(plan, band)
    if not _reaches(x, g, grid):
        return _device_spectral.conv_norm(x, g, band=band, plan=plan)
    return Transformed(x, g, grid, None).squares()


@torch.no_grad()
def _bins(
    x: torch.Tensor, g: torch.Tensor, *, band: Band, plan: ConvolutionGrid, **_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grid = Grid(plan, plan.size, None)
    if not _reaches(x, g, grid):
        return _device_spectral.conv_bins(x, g, band=band, plan=plan)
    both = Transformed(x, g, grid, band)
    return *both.bins(), both.squares()


@torch.no_grad()
def _whitened(
    x: torch.Tensor,
    g: torch.Tensor,
    matrix: torch.Tensor,
    *,
    band: Band,
    plan: ConvolutionGrid,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grid = Grid(plan, plan.size, None)
    if not _reaches(x, g, grid) or max(matrix.shape) > COORDINATES:
        return _device_spectral.whitened_bins(x, g, matrix, band=band, plan=plan)
    both = Transformed(x, g, grid, band)
    return *both.bins(), both.back(both.whitened(matrix, band))


def _crop(band: Band, kernel: Axes, dilation: Axes, dtype: torch.dtype) -> torch.Tensor:
    """Return a table from products of bins ``[2 K]`` to taps; sines count the other way round."""
    cosines, sines = (part.numpy().T for part in bins.crop_matrix(band, kernel, dilation))
    return filled(np.stack([cosines, -sines], 1).reshape(-1, cosines.shape[1]), dtype)


@torch.no_grad()
def _sum(
    x_bins: torch.Tensor,
    g_bins: torch.Tensor,
    factors: torch.Tensor,
    out: torch.Tensor,
    *,
    dilation: Size = 1,
    groups: int = 1,
    band: Band,
) -> None:
    (count, batch, _, ins), outs = x_bins.shape, g_bins.shape[3]
    if not (x_bins.numel() and g_bins.numel() and out.numel()):
        return
    kernel, between = axes(out.shape[2:]), bins.taps_apart(out, dilation)
    matrix = on(out.device, _crop, band, kernel, between, out.dtype)
    rows, columns = outs // groups, ins // groups
    sides = sides_of(rows, columns, out.dtype)
    tiles = tiles_of(rows, columns, sides)
    each = share(tiles * count, batch)
    lines = -(-rows * columns // MULTIPLE) * MULTIPLE
    for group in range(groups):
        products = out.new_empty(1, -(-batch // each), 2 * count, lines)
        own = slice(group * rows, (group + 1) * rows)
        launch(
            frequency_kernel,
            tiles * count * products.shape[1],
            out,
            *(g_bins[..., own], x_bins[..., group * columns :], factors, products),
            *((rows, columns), (rows, columns), batch, each, count),
            *((1, 2 * outs, outs, 2 * batch * outs), (1, 2 * ins, ins, 2 * batch * ins)),
            (columns, 1, lines),
            FACTORS=True,
            CONJUGATE=True,
            ADD=False,
            SUMS=sums_of(out.dtype),
            **sides,
        )
        led_back(products, matrix, out[own], math.prod(kernel), add=True)
    increment_version(out)


def _never(*_: Any, **__: Any) -> None:
    return None


KERNELS: tuple[tuple[str, Any, Any], ...] = (
    ("spectral.conv_norm", _norm, _never),
    ("spectral.conv_bins", _bins, _never),
    ("spectral.whitened_bins", _whitened, _never),
    ("spectral.bins_sum", _sum, _never),
)
"""``(op, run, refuse)``."""
