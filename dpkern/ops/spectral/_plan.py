"""Prepare the compiled norm of correlation maps: its frequencies, weights and rounding errors.

``csrc/cpu/spectral_transform.h`` transforms a map by products with cosines and sines, folded about
its centre, and keeps ``M`` and ``N`` of a quarter of the frequencies, ``M +- 2 N`` being the powers
at ``(+-ky, kx)``. Where a line is long, and in volumes, it takes all axes in two levels
(``spectral_long.h``) and keeps the powers of half of the frequencies. Here stand the tables that it
reads. The proof of the errors is in ``docs/spectral.md``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ._band import Array, Band, half_weights
from ._lines import (
    LONGEST,
    FrequencyLine,
    Integers,
    LongLine,
    chained,
    circle,
    long_line,
    whole_line,
)
from ._sizes import Axes
from ._spectra import Grid, half, half_gains

_ERROR = 7e-5
"""Error of a transform up to which float32 is precise."""
_CHANNELS = 64
"""Channels of a group up to which float32 may sum their powers."""
_CHEAP = 12
"""Products of the weighted gradient for each of the norm, from which a double norm is cheap."""


@dataclass(frozen=True)
class NormTables:
    """The tables that the kernel reads besides the operands, all of them on the CPU.

    Attributes:
        lines: depth, if maps are volumes, rows and columns of x, then of g, ``(n, count, step)``
            each.
        turns: their cosines and sines.
        index: the place of g's numbers for each place of x.
        weights: ``[places of x, 3]``, of the products ``M M``, ``N N`` and ``M N``; of long lines
            ``[places of x, 1]``, of powers.
        x_weights, g_weights: Parseval's, from ``M`` or powers to the squared norm of an operand.
        errors: of the transforms of x and of g in float32, and of both in float64.
        share: the root of the size of g's grid.
        skew: whether gains at ``(ky, kx)`` and ``(-ky, kx)`` differ.
    """

    lines: Tensor
    turns: Tensor
    index: Tensor
    weights: Tensor
    x_weights: Tensor
    g_weights: Tensor
    errors: Tensor
    share: float
    skew: bool

    @cached_property
    def sides(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """The lines of x with their cosines and sines, and those of g."""
        x, g = self.lines.chunk(2)
        first = 2 * int(x[::3].sum())
        return (x, self.turns[:first]), (g, self.turns[first:])


@dataclass(frozen=True)
class NormPlan:
    """The way in which a layer's norm is computed.

    Attributes:
        tables: of its grid.
        narrow_sums, wide_sums: errors of the product over frequencies in float32 and in float64.
        wide: whether to compute in double at once.
    """

    tables: NormTables
    narrow_sums: float
    wide_sums: float
    wide: bool


@dataclass(frozen=True)
class Places:
    """Places ``[kx, ky]`` of a quarter of a grid's frequencies, both flat."""

    parts: ClassVar[int] = 2
    """Bins of a place."""

    rows: FrequencyLine
    columns: FrequencyLine

    @property
    def lines(self) -> tuple[FrequencyLine, FrequencyLine]:
        """Rows and columns."""
        return self.rows, self.columns

    @property
    def count(self) -> int:
        """The number of places."""
        return (self.columns.n // 2 + 1) * len(self.rows.frequencies)

    @property
    def frequencies(self) -> tuple[Integers, Integers]:
        """``ky`` and ``kx`` of every place."""
        ky = np.tile(self.rows.frequencies, self.columns.n // 2 + 1)
        return ky, np.repeat(np.arange(self.columns.n // 2 + 1), len(self.rows.frequencies))

    @property
    def weights(self) -> Array:
        """The share of ``M`` in the squared norm of a map."""
        both = np.outer(half_weights(self.columns.n), self.rows.weights)
        return both.ravel() / (self.rows.n * self.columns.n)

    def find(self, ky: Integers, kx: Integers) -> tuple[Integers, Integers, NDArray[np.bool_]]:
        """Return the places of frequencies, -1 where it is that of ``-ky``, and conjugates.

        The bin is that of ``(+-ky, kx)`` there, or its conjugate.
        """
        ky, kx = ky % self.rows.n, kx % self.columns.n
        conjugate = 2 * kx > self.columns.n
        ky, kx = (
            np.where(conjugate, -ky % self.rows.n, ky),
            np.where(conjugate, -kx % self.columns.n, kx),
        )
        mirrored = 2 * ky > self.rows.n
        ky = np.where(mirrored, self.rows.n - ky, ky)
        order = self.rows.frequencies
        first = np.zeros(self.rows.n // 2 + 1, dtype=np.int64)
        first[order[::-1]] = np.arange(len(order))[::-1]
        return kx * len(order) + first[ky], np.where(mirrored, -1, 1), conjugate

    def factors(self, gains: Array, signs: Integers) -> Array:
        """Return the weights of products, for squared gains ``[P, Q/2 + 1]``."""
        ky, kx = self.frequencies
        plus, minus = gains[ky, kx], gains[-ky % self.rows.n, kx]
        even, odd = self.weights / 2 * (plus + minus), self.weights * (plus - minus)
        return np.stack([even, 4 * signs * even, odd], 1)


@dataclass(frozen=True)
class LongPlaces:
    """Places ``[kx, ky, kz]`` of half of the frequencies of a grid with long lines, all flat.

    Attributes:
        lines: depth, if maps are volumes, rows and columns.
    """

    parts: ClassVar[int] = 1

    lines: tuple[LongLine, ...]

    @property
    def rows(self) -> LongLine:
        """The last axis but one."""
        return self.lines[-2]

    @property
    def columns(self) -> LongLine:
        """The last axis, that of half spectra."""
        return self.lines[-1]

    @property
    def count(self) -> int:
        """The number of places."""
        return len(self.columns.halves) * math.prod(line.n for line in self.lines[:-1])

    @property
    def frequencies(self) -> tuple[Integers, ...]:
        """Those of every place, ``kx`` above the half where the kernel has the conjugate."""
        others = [line.frequencies for line in self.lines[-2::-1]]
        grids = np.meshgrid(self.columns.halves, *others, indexing="ij")
        return tuple(grid.ravel() for grid in grids[::-1])

    @property
    def weights(self) -> Array:
        """The share of a power in the squared norm of a map."""
        each = math.prod(line.n for line in self.lines[:-1])
        return np.repeat(self.columns.stands, each) / (each * self.columns.n)

    def find(self, *frequencies: Integers) -> tuple[Integers, Integers, NDArray[np.bool_]]:
        """Return the places of frequencies, 1 for each, and which are conjugates there."""
        across = np.full(self.columns.n, -1)
        across[self.columns.halves] = np.arange(len(self.columns.halves))
        conjugate = across[frequencies[-1] % self.columns.n] < 0
        sign = np.where(conjugate, -1, 1)
        place = across[sign * frequencies[-1] % self.columns.n]
        for line, k in zip(self.lines[-2::-1], frequencies[-2::-1], strict=True):
            down = np.empty(line.n, np.int64)
            down[line.frequencies] = np.arange(line.n)
            place = place * line.n + down[sign * k % line.n]
        return place, np.ones_like(place), conjugate

    def factors(self, gains: Array, _: Integers) -> Array:
        """Return the weights of products, for squared gains of a half spectrum."""
        frequencies = self.frequencies
        sign = np.where(2 * frequencies[-1] > self.columns.n, -1, 1)
        each = zip(frequencies, self.lines, strict=True)
        kept = gains[tuple(sign * k % line.n for k, line in each)]
        return (self.weights * kept)[:, None]


Sides = tuple[Places, Places] | tuple[LongPlaces, LongPlaces]
"""Those of the inputs and of the output gradients."""


@lru_cache(maxsize=256)
def _make(sides: Sides, band: Band | None) -> NormTables:
    x, g = sides
    turned: list[FrequencyLine | LongLine] = [*x.lines, *g.lines]
    gains = np.ones(half(tuple(line.n for line in x.lines)))
    if band is not None:
        gains = half_gains(band).numpy() ** 2
    index, signs, _ = g.find(*x.frequencies)
    weights = x.factors(gains, signs)
    errors = [
        _error_of(side.lines, dtype) for dtype in (torch.float32, torch.float64) for side in sides
    ]
    return NormTables(
        lines=torch.tensor([_numbers(line) for line in turned]).flatten(),
        turns=torch.from_numpy(np.concatenate([circle(line.n).ravel() for line in turned])),
        index=torch.from_numpy(index),
        weights=torch.from_numpy(weights),
        x_weights=torch.from_numpy(x.weights),
        g_weights=torch.from_numpy(g.weights),
        errors=torch.tensor(errors, dtype=torch.float64),
        share=math.sqrt(math.prod(line.n for line in g.lines)),
        skew=bool(weights[:, 2:].any()),
    )


def _numbers(line: FrequencyLine | LongLine) -> tuple[int, int, int]:
    return line.n, line.count, line.step if isinstance(line, FrequencyLine) else line.first


def _error_of(lines: Sequence[FrequencyLine | LongLine], dtype: torch.dtype) -> float:
    """Return eta of all axes: ``1 + u`` for folding, and the sums, of each."""
    unit = torch.finfo(dtype).eps / 2
    errors = [error for line in lines for error in (unit, line.error(dtype))]
    return chained(*errors) * (1 + 2.0**-30)


def sums_error(
    grid: Grid, tables: NormTables, dtype: torch.dtype, most: int | None = None
) -> float:
    """Return the error of the product over frequencies, relative to ``sum w M_x M_d``.

    M is a sum of ``4 C`` squares, N one of ``2 C`` products whose sizes add up to ``M / 2``; gains
    that differ between ``ky`` and ``-ky`` meet both operands' errors once more. Powers of long
    lines are sums of ``2 C`` squares. More than ``most`` channels are added up in float64.
    """
    geometry = grid.layer.geometry
    channels = (geometry.in_channels, geometry.out_channels)
    each = [n // geometry.groups for n in channels]
    maps = sum(each) if most is None else sum(min(n, most) for n in each)
    terms = (12 if tables.skew else 6 if tables.weights.shape[1] > 1 else 2) * maps + 8
    unit = torch.finfo(dtype).eps / 2
    return (1 + 2.0**-10) * terms * unit + (len(tables.index) + geometry.groups + 16) * 2.0**-50


def places(grid: Grid, shared: bool = True) -> tuple[Places, Places]:
    """Return the frequencies of the inputs and of the output gradients, one level for a line."""
    (rows, columns), (g_rows, g_columns) = (
        [FrequencyLine(n, count, step, shared) for n, count, step in side] for side in _sizes(grid)
    )
    return Places(rows, columns), Places(g_rows, g_columns)


def _sizes(grid: Grid) -> list[list[tuple[int, int, int]]]:
    """Return ``(n, count, step)`` of the lines of x and of g."""
    steps = [s // f for s, f in zip(grid.layer.stride, grid.folds, strict=True)]
    x = zip(grid.size, grid.rows, (1,) * len(steps), strict=True)
    return [list(x), list(zip(grid.folded, grid.layer.output, steps, strict=True))]


@lru_cache(maxsize=1024)
def _sides(grid: Grid, shared: bool = True) -> Sides | None:
    """Return the frequencies in a kernel's order; None where a line has no two levels."""
    if max(grid.size) <= LONGEST and len(grid.size) == 2:
        return places(grid, shared)
    found = []
    for side in _sizes(grid):
        # Devices take a volume's lines in one level.
        of_line = whole_line if len(side) == 3 and not shared else partial(long_line, shared=shared)
        lines = [of_line(*sizes) for sizes in side]
        if None in lines:
            return None
        found.append(LongPlaces(tuple(line for line in lines if line is not None)))
    return found[0], found[1]


def sides_of(grid: Grid, shared: bool = True) -> Sides:
    """Return the frequencies in a kernel's order, of a grid whose lines have levels."""
    sides = _sides(grid, shared)
    assert sides is not None
    return sides


def reaches(grid: Grid) -> bool:
    """Whether the CPU kernel takes this grid, of which every line has one level or two."""
    return min(grid.rows) > 0 and _sides(grid) is not None


def tables_of(grid: Grid, shared: bool = True) -> NormTables:
    """Return the tables of a grid, for kernels whose frequencies share products or do not."""
    return _make(sides_of(grid, shared), grid.band)


@lru_cache(maxsize=1024)
def plan_of(grid: Grid) -> NormPlan:
    """Return the plan of a layer on its grid."""
    tables = _make(sides_of(grid), grid.band)
    narrow, wide = (sums_error(grid, tables, dtype) for dtype in (torch.float32, torch.float64))
    return NormPlan(tables=tables, narrow_sums=narrow, wide_sums=wide, wide=_wide(grid, tables))


def takes(size: Axes) -> bool:
    """Whether the CPU kernel takes grids of this size; a stride leaves factors of it."""
    short = max(size) <= LONGEST and len(size) == 2
    return short or all(long_line(n, n, 1) is not None for n in size)


def transform_products(grid: Grid) -> int:
    """Return the products of one sample's transforms and powers."""
    geometry = grid.layer.geometry
    x, g = _sides(grid) or places(grid)
    total = 0
    for side, maps in ((x, geometry.in_channels), (g, geometry.out_channels)):
        *others, columns = side.lines
        total += maps * columns.products * math.prod(line.count for line in others)
        # Lines of complex numbers: of each kx, and of each frequency of the axes behind.
        behind = columns.n // 2 + 1
        while others:
            line = others.pop()
            each = 2 * line.products + (6 if side.parts == 2 else 4) * len(line.frequencies)
            total += maps * each * behind * math.prod(line.count for line in others)
            behind *= line.n
    return total


def _wide(grid: Grid, tables: NormTables) -> bool:
    """Whether to compute in double at once: where float32 is imprecise, or double is cheap."""
    geometry = grid.layer.geometry
    channels = max(geometry.in_channels, geometry.out_channels) // geometry.groups
    if float(tables.errors[:2].max()) > _ERROR or channels > _CHANNELS:
        return True
    pairs = geometry.in_channels * geometry.out_channels // geometry.groups
    taps = math.prod(geometry.kernel) * geometry.positions
    return pairs * taps > _CHEAP * transform_products(grid)


@dataclass(frozen=True)
class Retained:
    """Bins of one operand that the kernel writes out.

    Attributes:
        places: ``[places, 2]``, the bin at ``(+ky, kx)`` and at ``(-ky, kx)``, or -1; of long lines
            ``[places, 1]``.
        source: ``[K]``, which of them each retained bin is; aliases of a stride share one.
        turn: ``[K, 4]``, from ``A - i B`` about the centre to real and imaginary part.
        count: how many bins there are.
    """

    places: Tensor
    source: Tensor
    turn: Tensor
    count: int


def _retain(side: Places | LongPlaces, centre: Axes, frequencies: Sequence[Integers]) -> Retained:
    place, sign, conjugate = side.find(*frequencies)
    which, source = np.unique(2 * place + (sign < 0), return_inverse=True)
    table = np.full(2 * side.count, -1)
    table[which] = np.arange(len(which))
    # The powers' origin is the centre: a turn by exp(-2 pi i k.centre), by integer angles.
    real, imag = np.ones(len(place)), np.zeros(len(place))
    lines: Sequence[FrequencyLine | LongLine] = side.lines
    for line, k, at in zip(lines, frequencies, centre, strict=True):
        c, s = circle(line.n)[:, k * at % line.n]
        real, imag = real * c + imag * s, imag * c - real * s
    side_sign = np.where(conjugate, -1.0, 1.0)
    turn = np.stack([real, side_sign * imag, imag, -side_sign * real], 1)
    return Retained(
        places=torch.from_numpy(table.reshape(-1, 2)[:, : side.parts].copy()),
        source=torch.from_numpy(source.reshape(-1)),
        turn=torch.from_numpy(turn),
        count=len(which),
    )


@lru_cache(maxsize=256)
def retained(grid: Grid, band: Band, shared: bool = True) -> tuple[Retained, Retained]:
    """Return the retained bins of the inputs and of the output gradients."""
    x, g = sides_of(grid, shared)
    kept = [index.numpy() for index in half_gains(band).nonzero(as_tuple=True)]
    lines: Sequence[FrequencyLine | LongLine] = x.lines
    of_x = tuple(p + line.origin for p, line in zip(grid.layer.padding, lines, strict=True))
    of_g = tuple(line.origin * line.step for line in g.lines)
    return _retain(x, of_x, kept), _retain(g, of_g, kept)


__all__ = [
    "LongPlaces",
    "NormPlan",
    "NormTables",
    "Places",
    "Retained",
    "places",
    "plan_of",
    "reaches",
    "retained",
    "sides_of",
    "sums_error",
    "tables_of",
    "takes",
    "transform_products",
]
