"""Norms of convolutions in the frequency domain: maps are transformed on the chip.

A program has a few frequencies along rows and all along columns, and takes the maps of a sample's
group one after the other: rows by products with cosines and sines, columns by products of what these
give, and the powers of all maps stay in registers. ``2 H W K + 8 P H K`` operations for a map
of H x W values on a grid of P rows and K half frequencies are some five times those of a fast
transform; but a map is read from memory, and the powers of a whole group leave the chip, where the
library writes a map's spectrum, and torch reads it three times and writes twice to add up powers.

``docs/spectral.md`` proves the bound. Not yet run on a GPU.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from ...ghost._bounds import of_sums
from ...spectral._band import Band, half_weights
from ...spectral._plan import FrequencyLine, circle, places
from ...spectral._sizes import ConvolutionGrid, planes
from ...spectral._spectra import Grid, of_one_sample, on, product_squares
from .. import _device_spectral
from .._spectra import room
from .circulant import scaled
from .launch import INTERPRETED, launch
from .operands import product

LARGEST = 64
"""Values on an axis of the largest grid; larger ones take the library's transforms."""
FREQUENCIES = 16
"""Of rows, in one program."""
DEPTH, ROWS = 16, 32
"""Values in one product along rows, and rows in one along columns, at most."""


@triton.jit
def power_map_kernel(
    x, scales, across, down, powers, each, groups, p, bins,
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
    """Write the powers of one group's maps at some frequencies of rows and all of columns."""
    tiles = tl.cdiv(bins, FREQUENCIES)
    unit = (tl.program_id(0) // tiles).to(tl.int64)
    kx = tl.program_id(0) % tiles * FREQUENCIES + tl.arange(0, FREQUENCIES)
    ky = tl.arange(0, GRID)
    scale = tl.load(scales + unit // groups)
    x += unit * each * (HEIGHT * WIDTH)
    power = tl.zeros([GRID, FREQUENCIES], tl.float64)
    for _ in range(each):
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
        x += HEIGHT * WIDTH
    place = (unit * p + ky[:, None]) * bins + kx[None, :]
    tl.store(powers + place, power, mask=(ky < p)[:, None] & (kx < bins)[None, :])


def _filled(turns: np.ndarray[Any, Any], dtype: torch.dtype) -> torch.Tensor:
    table = np.zeros((2, LARGEST, LARGEST))
    table[:, : turns.shape[1], : turns.shape[2]] = turns
    return torch.from_numpy(table).to(dtype)


def _across(line: FrequencyLine, dtype: torch.dtype) -> torch.Tensor:
    """Return cosines and sines ``[2, values, half frequencies]``, zeros behind them."""
    return _filled(_waves(line, line.n // 2 + 1).transpose(0, 2, 1), dtype)


def _down(line: FrequencyLine, dtype: torch.dtype) -> torch.Tensor:
    """Return cosines and sines ``[2, frequencies, values]``, zeros behind them."""
    return _filled(_waves(line, line.n), dtype)


def _waves(line: FrequencyLine, frequencies: int) -> np.ndarray[Any, Any]:
    turns = np.outer(np.arange(frequencies), np.arange(line.count) * line.step) % line.n
    return circle(line.n)[:, turns]


@lru_cache(maxsize=256)
def _error(rows: FrequencyLine, columns: FrequencyLine, dtype: torch.dtype) -> float:
    """Return eta of a map's transform, relative to the norm of the map."""
    wide = dtype is torch.float64
    waves = np.abs(_waves(columns, columns.n // 2 + 1))
    halves = waves * np.sqrt(half_weights(columns.n) / columns.n)[:, None]
    first = np.concatenate([halves[0], halves[1]])
    second = np.abs(_waves(rows, rows.n)).sum(0) / math.sqrt(rows.n)
    eta = 1.0
    for parts, line, depth, additions in ((first, columns, DEPTH, 1), (second, rows, ROWS, 2)):
        chain = min(depth, line.count) * (3 if wide else 1)
        roundings = chain + additions * -(-line.count // depth) + (8 if wide else 3)
        unit = 2.0**-53 if wide else 2.0**-24
        gamma = roundings * unit / (1 - roundings * unit)
        eta *= 1 + gamma * math.sqrt(parts.sum(0).max() * parts.sum(1).max())
    return float((eta - 1) * (1 + 2.0**-20)) + 2.0**-100


@torch.no_grad()
def _norm(
    x: torch.Tensor, g: torch.Tensor, *, band: Band | None, plan: ConvolutionGrid, **_: Any
) -> torch.Tensor:
    grid = of_one_sample(Grid.of(plan, band))
    if max(grid.size) > LARGEST or min(grid.rows) == 0 or not (x.numel() and g.numel()):
        return _device_spectral.conv_norm(x, g, band=band, plan=plan)
    dtype, geometry = of_sums(x.dtype), plan.geometry
    scales, _ = scaled(x, g)
    powers = room(x, geometry.groups, grid)
    errors = []
    sides = places(grid, shared=False)
    for operand, side, scale, out in zip((x, g), sides, scales, powers, strict=True):
        maps = planes(operand)
        (height, width), bins = maps.shape[2:], side.columns.n // 2 + 1
        launch(
            power_map_kernel,
            len(x) * geometry.groups * triton.cdiv(bins, FREQUENCIES),
            x,
            *(operand, scale),
            on(x.device, _across, side.columns, dtype),
            on(x.device, _down, side.rows, dtype),
            *(out, maps.shape[1] // geometry.groups, geometry.groups, side.rows.n, bins),
            HEIGHT=height,
            WIDTH=width,
            USED_ROWS=side.rows.count,
            USED_COLUMNS=side.columns.count,
            SUMS=tl.float64 if dtype is torch.float64 else tl.float32,
            GRID=max(16, int(triton.next_power_of_2(side.rows.n))),
            LARGEST=LARGEST,
            FREQUENCIES=FREQUENCIES,
            ROWS=LARGEST if INTERPRETED else 16 if side.rows.count <= 16 else ROWS,
            DEPTH=LARGEST if INTERPRETED else DEPTH,
            fused=True,
            maxnreg=255,
        )
        errors.append(_error(side.rows, side.columns, dtype))
    squares = product_squares(grid, *powers, max(errors))
    # Sums of powers over maps and frequencies are float64, and none is negative.
    terms = max(geometry.in_channels, geometry.out_channels) + powers[0][0].numel() + 64
    return _scaled_back(squares * (1 + terms * 2.0**-50), scales)


def _scaled_back(squares: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return squares of operands that were multiplied by ``scales``, rounded up at 0."""
    power = (1 / scales[0] * (1 / scales[1])).clamp(2.0**-600, 2.0**600)
    return torch.where(squares == 0, squares, squares * power * power + 2.0**-1074)


def _never(*_: Any, **__: Any) -> None:
    return None


KERNELS: tuple[tuple[str, Any, Any], ...] = (("spectral.conv_norm", _norm, _never),)
"""``(op, run, refuse)``."""
