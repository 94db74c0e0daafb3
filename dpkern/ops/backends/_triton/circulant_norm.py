"""Norms of block-circulant layers: at one position powers of frequencies in registers, at several
spectra in memory. ``docs/spectral.md`` proves the bounds. Not yet run on a GPU.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from ...spectral import circulant
from ...spectral._band import Band
from ...spectral._spectra import on
from .. import _device_spectral
from .frequencies import (
    SCALED,
    bins_of,
    multiple,
    parts_of,
    products_of,
    refuse,
    sides_of,
    tiles_of,
    transform_table,
    transformed,
)
from .launch import INTERPRETED, launch
from .operands import MULTIPLE, product
from .precision import up
from .scaled import BLOCK, scaled

LARGEST = 512
"""Largest block of a norm."""


@triton.jit
def _powers(
    x, matrix, scale, k, places,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Return the sums over a sample's blocks of the powers of frequencies k."""
    power = tl.zeros([ROWS], tl.float64)
    for first in range(0, places, COLUMNS):
        place = first + tl.arange(0, COLUMNS)
        cosine = tl.zeros([ROWS, COLUMNS], tl.float64)
        sine = tl.zeros([ROWS, COLUMNS], tl.float64)
        for begin in range(0, SIZE, DEPTH):
            u = begin + tl.arange(0, DEPTH)
            mask = (place < places)[:, None] & (u < SIZE)[None, :]
            block = tl.load(x + place[:, None] * SIZE + u[None, :], mask=mask, other=0.0)
            block = tl.trans(block.to(tl.float64) * scale)
            turns = matrix + 2 * k[:, None] * WIDTH + u[None, :]
            cosine += product(tl.load(turns), block, tl.float64, "ieee")
            sine += product(tl.load(turns + WIDTH), block, tl.float64, "ieee")
        power += tl.sum(cosine * cosine + sine * sine, 1)
    return power


@triton.jit
def power_kernel(
    x, g, matrix, weights, scales, partial, samples, ins, outs, bins,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Write a sample's sum over some frequencies of weight times the powers of both operands."""
    tiles = tl.cdiv(bins, ROWS)
    sample = (tl.program_id(0) // tiles).to(tl.int64)
    k = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    scale = tl.load(scales + sample)
    of_x = _powers(
        x + sample * ins * SIZE, matrix, scale, k, ins, SIZE, WIDTH, ROWS, COLUMNS, DEPTH
    )
    scale = tl.load(scales + samples + sample)
    of_g = _powers(
        g + sample * outs * SIZE, matrix, scale, k, outs, SIZE, WIDTH, ROWS, COLUMNS, DEPTH
    )
    weight = tl.load(weights + k, mask=k < bins, other=0.0)
    tl.store(partial + tl.program_id(0), tl.sum(weight * (of_x * of_g)))


@triton.jit
def square_kernel(
    x, g, weights, partial, positions, ins, outs, bins,
    x_strides, g_strides, x_sample, g_sample,
    GRAMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Write one frequency's share of a sample's square: a tile of the spectrum, or of two Gram
    matrices over positions."""
    rows = positions if GRAMS else outs
    columns = positions if GRAMS else ins
    column_tiles = tl.cdiv(columns, COLUMNS)
    tiles = tl.cdiv(rows, ROWS) * column_tiles
    tile = tl.program_id(0) % tiles
    k = tl.program_id(0) // tiles % bins
    sample = tl.program_id(0) // (tiles * bins)
    m = tile // column_tiles
    n = tile % column_tiles
    if GRAMS:  # noqa: SIM102 (known when compiled)
        if m > n:  # positions t, s count for s, t: the tiles are square
            tl.store(partial + tl.program_id(0), 0.0)
            return
    i = m * ROWS + tl.arange(0, ROWS)
    j = n * COLUMNS + tl.arange(0, COLUMNS)
    x += k * x_strides[3] + sample * x_sample
    g += k * g_strides[3] + sample * g_sample
    weight = tl.load(weights + k)
    if GRAMS:
        re, im = products_of(
            g, g, weights, i, j, 0, outs, rows, columns, g_strides, g_strides,
            False, True, tl.float64, ROWS, COLUMNS, DEPTH,
        )  # fmt: skip
        x_re, x_im = products_of(
            x, x, weights, i, j, 0, ins, rows, columns, x_strides, x_strides,
            False, True, tl.float64, ROWS, COLUMNS, DEPTH,
        )  # fmt: skip
        if m < n:
            weight *= 2.0
        re *= x_re
        im *= x_im
    else:
        re, im = products_of(
            g, x, weights, i, j, 0, positions, rows, columns, g_strides, x_strides,
            False, True, tl.float64, ROWS, COLUMNS, DEPTH,
        )  # fmt: skip
        re *= re
        im *= im
    tl.store(partial + tl.program_id(0), weight * tl.sum(tl.sum(re + im, 1)))


@triton.jit(do_not_specialize=["samples"])
def above_kernel(partial, scales, sizes, squares, samples, count, numbers, BLOCK: tl.constexpr):
    """Add a sample's shares, add what rounding can hide, and scale back."""
    sample = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    shares = tl.zeros([BLOCK], tl.float64)
    for begin in range(0, count, BLOCK):
        mask = begin + lanes < count
        shares += tl.load(partial + sample * count + begin + lanes, mask=mask, other=0.0)
    size = tl.sqrt(tl.load(sizes + sample)) * tl.sqrt(tl.load(sizes + samples + sample))
    square = tl.sum(shares) + tl.cast(numbers[0], tl.float64) * size * size
    norm = tl.sqrt(tl.where(square < 0.0, 0.0, square)) + tl.cast(numbers[1], tl.float64) * size
    square = norm * norm * (1.0 + tl.cast(numbers[2], tl.float64))
    # The operands' common power of two, so far that what leaves the range does so in either case.
    one = tl.cast(1.0, tl.float64)
    power = (one / tl.load(scales + sample)) * (one / tl.load(scales + samples + sample))
    least = tl.cast((1023 - 600) << 52, tl.int64).to(tl.float64, bitcast=True)
    power = tl.minimum(tl.maximum(power, least), one / least)
    tiny = tl.cast(1, tl.int64).to(tl.float64, bitcast=True)
    tl.store(squares + sample, tl.where(square == 0.0, 0.0, square * power * power + tiny))


def _norm(x: torch.Tensor, g: torch.Tensor, *, band: Band | None = None) -> torch.Tensor:
    batch, positions, _, block = x.shape
    if block > LARGEST:
        return _device_spectral.circulant_norm(x, g, band=band)
    squares = x.new_zeros(batch, dtype=torch.float64)
    if not (x.numel() and g.numel()):
        return squares
    scales, sizes = scaled(x, g)
    weights = on(x.device, circulant.weights_of, block, band)
    partial = _powers_of(x, g, scales, weights) if positions == 1 else _at(x, g, scales, weights)
    most = 1.0 if band is None else float(np.abs(band.gains).max()) ** 2
    numbers = _errors(x, g, partial.shape[1], most)
    given = partial, scales, sizes, squares, batch, partial.shape[1], numbers
    launch(above_kernel, batch, x, *given, BLOCK=BLOCK)
    return squares


def _powers_of(
    x: torch.Tensor, g: torch.Tensor, scales: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Return shares ``[B, n]`` of the squares of samples with one position."""
    (batch, _, ins, block), outs, bins = x.shape, g.shape[2], len(weights)
    matrix = on(x.device, transform_table, block, torch.float64)
    sides = sides_of(bins, MULTIPLE, torch.float64)  # two sums beside each other
    tiles = triton.cdiv(bins, sides["ROWS"])
    partial = scales.new_empty(batch, tiles)
    launch(
        power_kernel,
        batch * tiles,
        x,
        *(x, g, matrix, weights, scales, partial, batch, ins, outs, bins),
        SIZE=block,
        WIDTH=matrix.shape[1],
        **sides,
    )
    return partial


def _at(
    x: torch.Tensor, g: torch.Tensor, scales: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Return shares ``[B, n]`` of the squares of samples with several positions."""
    (batch, positions, ins, _), outs = x.shape, g.shape[2]
    grams, dtype = circulant.norm_route(x, g) == "positions", torch.float64
    rows, columns = (positions, positions) if grams else (multiple(outs), multiple(ins))
    sides = sides_of(rows, columns, dtype)
    if grams and not INTERPRETED:
        sides |= {"ROWS": MULTIPLE, "COLUMNS": MULTIPLE, "warps": 4}  # four sums beside each other
    count = tiles_of(rows, columns, sides) * len(weights)
    partial = scales.new_empty(batch, count)
    for part in parts_of(x, multiple(ins) + multiple(outs), dtype):
        xs = transformed(x[part], dtype, scales[0, part], SCALED)
        gs = transformed(g[part], dtype, scales[1, part], SCALED)
        strides = [s.over_places if grams else s.over_terms for s in (xs, gs)]
        launch(
            square_kernel,
            len(x[part]) * count,
            x,
            *(xs.planes, gs.planes, weights, partial[part]),
            *(positions, xs.padded, gs.padded, len(weights), *strides),
            *(positions * xs.padded, positions * gs.padded),
            GRAMS=grams,
            **sides,
        )
    return partial


_CHAIN = 64
"""Roundings of a chunk's products, three for each of them (docs/ghost.md), and of coefficients."""


def _errors(x: torch.Tensor, g: torch.Tensor, count: int, most: float) -> tuple[float, ...]:
    """Return what docs/spectral.md proves that rounding can hide, of the scaled operands.

    Relative to the operands' squares, to the product of their norms, and to the result; ``most`` is
    the largest squared gain.
    """
    (_, positions, ins, block), outs, unit = x.shape, g.shape[2], 2.0**-53
    entries = max(x[0].numel(), g[0].numel())
    last = count + -(-entries // BLOCK) + _CHAIN  # of sums of squares
    transform = block + _CHAIN
    squared = norm = 0.0
    if positions == 1:
        squared = 6 * transform + 2 * (ins + outs) + bins_of(block) + last
    else:
        norm = 2 * transform
        if circulant.norm_route(x, g) == "positions":
            squared = 1.5 * (2 * (ins + outs) + 2 * _CHAIN + last)
        else:
            norm += 2 * positions + _CHAIN
    return tuple(
        up(1.01 * error * unit)
        for error in (block * squared * most, 1.5 * math.sqrt(block * most) * norm, 4 * last)
    )


KERNELS: tuple[tuple[str, Any, Any], ...] = (("spectral.circulant_norm", _norm, refuse),)
"""``(op, run, refuse)``."""
