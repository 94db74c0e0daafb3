"""Prepare the compiled norm of correlation maps: its frequencies, weights and rounding errors.

``csrc/cpu/spectral_transform.h`` transforms a map by products with cosines and sines, folded about
its centre, and keeps ``M`` and ``N`` of a quarter of the frequencies, ``M +- 2 N`` being the powers
at ``(+-ky, kx)``. Here stand the tables that it reads. The proof of the errors is in
``docs/spectral.md``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ._band import Array, Band, half_weights
from ._sizes import Pair
from ._spectra import Grid, half_gains

Integers = NDArray[np.int64]
LONGEST = 128
"""Values on an axis up to which products take no more than a third longer than a library's fast
transform, whose bound is not ours; up to 96 they are faster."""
_PRECISE = 64
"""Values on an axis up to which sums of float32 keep a small error."""
_CHANNELS = 64
"""Channels of a group up to which float32 may sum their powers."""
_CHEAP = 12
"""Products of the weighted gradient for each of the norm, from which a double norm is cheap."""


@dataclass(frozen=True)
class FrequencyLine:
    """``count`` values, ``step`` apart, on a circle of ``n``.

    Attributes:
        shared: whether frequencies k and n/2 - k share products where they can.
    """

    n: int
    count: int
    step: int
    shared: bool = True

    @property
    def split(self) -> bool:
        """Whether frequencies k and n/2 - k share products."""
        return self.shared and self.n % 2 == 0 and self.step % 2 == 1

    @property
    def terms(self) -> int:
        """Products in the longest sum."""
        half = self.count // 2
        return half // 2 + 1 if self.split else half + 1

    @property
    def frequencies(self) -> Integers:
        """Those along a column in the kernel's order, one of which may stand there twice."""
        first = np.arange((self.n // 4 if self.split else self.n // 2) + 1)
        return np.stack([first, self.n // 2 - first], 1).ravel() if self.split else first

    @property
    def weights(self) -> Array:
        """The number of frequencies that each one stands for, 0 for a second copy."""
        weights: Array = half_weights(self.n)[self.frequencies]
        if self.split and self.n % 4 == 0:
            weights[-1] = 0
        return weights

    def error(self, dtype: torch.dtype) -> float:
        """Return the error of the sums relative to their exact norm, from above.

        ``gamma ||B||_2`` with ``B`` the absolute values of the isometry that the line is, and
        ``||B||_2^2 <= ||B||_1 ||B||_inf``.
        """
        unit = torch.finfo(dtype).eps / 2
        # A coefficient, the sum, the sum of even and odd terms, and one to spare; float64
        # coefficients are off by more than one rounding.
        roundings = self.terms + (3 if dtype is torch.float32 else 8)
        gamma = roundings * unit / (1 - roundings * unit)
        turns = np.outer(np.arange(self.n // 2 + 1), np.arange(self.count) * self.step) % self.n
        scale = np.sqrt(half_weights(self.n) / self.n)[:, None]
        parts = np.abs(np.concatenate([table[turns] * scale for table in circle(self.n)]))
        return float(gamma * math.sqrt(parts.sum(0).max() * parts.sum(1).max()) * (1 + 1e-9))


@lru_cache(maxsize=256)
def circle(n: int) -> Array:
    """Return cosines and sines of ``2 pi m / n``, ``[2, n]``, with the exact zeros and ones."""
    quarter, rest = np.divmod(4 * np.arange(n), n)  # a quarter of the circle has n steps here
    near = 2 * rest <= n
    angle = np.where(near, rest, n - rest) * (math.pi / (2 * n))
    cosine = np.where(near, np.cos(angle), np.sin(angle))
    sine = np.where(near, np.sin(angle), np.cos(angle))
    signs = [(cosine, sine), (-sine, cosine), (-cosine, -sine), (sine, -cosine)]
    table: Array = np.stack([np.choose(quarter, [pair[part] for pair in signs]) for part in (0, 1)])
    return table + 0.0


@dataclass(frozen=True)
class NormTables:
    """The tables that the kernel reads besides the operands, all of them on the CPU.

    Attributes:
        lines: rows and columns of x, then of g, ``(n, count, step)`` each.
        turns: their cosines and sines.
        index: the place of g's ``M`` and ``N`` for each place of x.
        weights: ``[places of x, 3]``, of the products ``M M``, ``N N`` and ``M N``.
        x_weights, g_weights: Parseval's, from ``M`` to the squared norm of an operand.
        errors: of the transforms of x and of g in float32, and of both in float64.
        share: ``sqrt(P' Q')`` of g's grid.
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
        first = 2 * int(self.lines[0] + self.lines[3])
        x, g = self.lines[:6], self.lines[6:]
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

    rows: FrequencyLine
    columns: FrequencyLine

    @property
    def ky(self) -> Integers:
        """Frequencies along columns."""
        return np.tile(self.rows.frequencies, self.columns.n // 2 + 1)

    @property
    def kx(self) -> Integers:
        """Frequencies along rows."""
        return np.repeat(np.arange(self.columns.n // 2 + 1), len(self.rows.frequencies))

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


@lru_cache(maxsize=256)
def _make(x: Places, g: Places, band: Band | None) -> NormTables:
    (p, q), turned = (x.rows.n, x.columns.n), (x.rows, x.columns, g.rows, g.columns)
    gains = np.ones((p, q // 2 + 1)) if band is None else half_gains(band).numpy() ** 2
    index, signs, _ = g.find(x.ky, x.kx)
    plus, minus = gains[x.ky, x.kx], gains[-x.ky % p, x.kx]
    even, odd = x.weights / 2 * (plus + minus), x.weights * (plus - minus)
    errors = [
        _both(rows, columns, dtype)
        for dtype in (torch.float32, torch.float64)
        for rows, columns in (turned[:2], turned[2:])
    ]
    return NormTables(
        lines=torch.tensor([(line.n, line.count, line.step) for line in turned]).flatten(),
        turns=torch.from_numpy(np.concatenate([circle(line.n).ravel() for line in turned])),
        index=torch.from_numpy(index),
        weights=torch.from_numpy(np.stack([even, 4 * signs * even, odd], 1)),
        x_weights=torch.from_numpy(x.weights),
        g_weights=torch.from_numpy(g.weights),
        errors=torch.tensor(errors, dtype=torch.float64),
        share=math.sqrt(g.rows.n * g.columns.n),
        skew=bool(odd.any()),
    )


def _both(rows: FrequencyLine, columns: FrequencyLine, dtype: torch.dtype) -> float:
    """Return eta of both axes: ``(1 + u)^2`` for folding, and the two sums."""
    unit = torch.finfo(dtype).eps / 2
    factors = (1 + unit) ** 2 * (1 + rows.error(dtype)) * (1 + columns.error(dtype))
    return float((factors - 1) * (1 + 2.0**-30))


def sums_error(
    grid: Grid, tables: NormTables, dtype: torch.dtype, most: int | None = None
) -> float:
    """Return the error of the product over frequencies, relative to ``sum w M_x M_d``.

    M is a sum of ``4 C`` squares, N one of ``2 C`` products whose sizes add up to ``M / 2``; gains
    that differ between ``ky`` and ``-ky`` meet both operands' errors once more. More than ``most``
    channels are added up in float64.
    """
    geometry = grid.layer.geometry
    channels = (geometry.in_channels, geometry.out_channels)
    each = [n // geometry.groups for n in channels]
    maps = sum(each) if most is None else sum(min(n, most) for n in each)
    terms = (12 if tables.skew else 6) * maps + 8
    unit = torch.finfo(dtype).eps / 2
    return (1 + 2.0**-10) * terms * unit + (len(tables.index) + geometry.groups + 16) * 2.0**-50


def places(grid: Grid, shared: bool = True) -> tuple[Places, Places]:
    """Return the frequencies of the inputs and of the output gradients."""
    steps = [s // f for s, f in zip(grid.layer.stride, grid.folds, strict=True)]
    rows, columns = (
        FrequencyLine(n, count, 1, shared) for n, count in zip(grid.size, grid.rows, strict=True)
    )
    g_rows, g_columns = (
        FrequencyLine(n, count, step, shared)
        for n, count, step in zip(grid.folded, grid.layer.output, steps, strict=True)
    )
    return Places(rows, columns), Places(g_rows, g_columns)


def tables_of(grid: Grid, shared: bool = True) -> NormTables:
    """Return the tables of a grid, for kernels whose frequencies share products or do not."""
    return _make(*places(grid, shared), grid.band)


@lru_cache(maxsize=1024)
def plan_of(grid: Grid) -> NormPlan:
    """Return the plan of a layer on its grid."""
    tables = tables_of(grid)
    narrow, wide = (sums_error(grid, tables, dtype) for dtype in (torch.float32, torch.float64))
    return NormPlan(tables=tables, narrow_sums=narrow, wide_sums=wide, wide=_wide(grid))


def reaches(grid: Grid) -> bool:
    """Whether the kernel takes this grid."""
    return max(grid.size) <= LONGEST and min(grid.rows) > 0


def transform_products(grid: Grid) -> int:
    """Return the products of one sample's transforms and powers."""
    total = 0
    geometry = grid.layer.geometry
    for side, maps in zip(places(grid), (geometry.in_channels, geometry.out_channels), strict=True):
        rows, columns = side.rows, side.columns
        across = len(columns.frequencies) * columns.terms * 2 * rows.count
        down = (columns.n // 2 + 1) * len(rows.frequencies) * (rows.terms * 4 + 6)
        total += maps * (across + down)
    return total


def _wide(grid: Grid) -> bool:
    """Whether to compute in double at once: where float32 is imprecise, or double is cheap."""
    geometry = grid.layer.geometry
    channels = max(geometry.in_channels, geometry.out_channels) // geometry.groups
    if max(grid.size) > _PRECISE or channels > _CHANNELS:
        return True
    pairs = geometry.in_channels * geometry.out_channels // geometry.groups
    taps = math.prod(geometry.kernel) * geometry.positions
    return pairs * taps > _CHEAP * transform_products(grid)


@dataclass(frozen=True)
class Retained:
    """Bins of one operand that the kernel writes out.

    Attributes:
        places: ``[places, 2]``, the bin at ``(+ky, kx)`` and at ``(-ky, kx)``, or -1.
        source: ``[K]``, which of them each retained bin is; aliases of a stride share one.
        turn: ``[K, 4]``, from ``A - i B`` about the centre to real and imaginary part.
        count: how many bins there are.
    """

    places: Tensor
    source: Tensor
    turn: Tensor
    count: int


def _retain(side: Places, centre: Pair, ky: Integers, kx: Integers) -> Retained:
    place, sign, conjugate = side.find(ky, kx)
    which, source = np.unique(2 * place + (sign < 0), return_inverse=True)
    table = np.full(2 * len(side.ky), -1)
    table[which] = np.arange(len(which))
    # The powers' origin is the centre: a turn by exp(-2 pi i k.centre), by integer angles.
    down, across = circle(side.rows.n), circle(side.columns.n)
    one, two = ky * centre[0] % side.rows.n, kx * centre[1] % side.columns.n
    real = down[0, one] * across[0, two] - down[1, one] * across[1, two]
    imag = -down[1, one] * across[0, two] - down[0, one] * across[1, two]
    side_sign = np.where(conjugate, -1.0, 1.0)
    turn = np.stack([real, side_sign * imag, imag, -side_sign * real], 1)
    return Retained(
        places=torch.from_numpy(table.reshape(-1, 2)),
        source=torch.from_numpy(source.reshape(-1)),
        turn=torch.from_numpy(turn),
        count=len(which),
    )


@lru_cache(maxsize=256)
def retained(grid: Grid, band: Band, shared: bool = True) -> tuple[Retained, Retained]:
    """Return the retained bins of the inputs and of the output gradients."""
    x, g = places(grid, shared)
    (top, left), (height, width) = grid.layer.padding, grid.rows
    y, z = (
        n // 2 * line.step for n, line in zip(grid.layer.output, (g.rows, g.columns), strict=True)
    )
    ky, kx = (index.numpy() for index in half_gains(band).nonzero(as_tuple=True))
    centre = top + height // 2, left + width // 2
    return _retain(x, centre, ky, kx), _retain(g, (y, z), ky, kx)


__all__ = [
    "FrequencyLine",
    "NormPlan",
    "NormTables",
    "Places",
    "Retained",
    "circle",
    "places",
    "plan_of",
    "reaches",
    "retained",
    "sums_error",
    "tables_of",
    "transform_products",
]
