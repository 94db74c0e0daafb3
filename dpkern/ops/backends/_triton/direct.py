"""Norms and kept gradients, tile by tile: a program owns a tile and walks over all positions.

No sample's positions are split over programs. A tile's chunks of positions start from zero and are
added to the total by plain additions, so that the bound of ``docs/ghost.md`` holds whatever a
tensor core does inside a chunk. float32 samples whose interval is too wide are done again in
float64; of 16-bit operands the upper end is returned however wide the interval is.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from . import chained, tuned
from .launch import INTERPRETED, launch
from .operands import Operands, inputs, outputs, product
from .precision import (
    CHUNK,
    LEAST_CHUNK,
    SIXTEEN,
    WIDE,
    SumPrecision,
    direct_numbers,
    first,
    longest,
)
from .rows import added
from .tuned import Tile

BLOCK = 1024  # partial sums in one step of bound_kernel


def tile_of(operands: Operands, dtype: torch.dtype, tf32: bool = False) -> Tile:
    """Return the tile that ships for products of this type: what fits the registers."""
    rows, columns = operands.rows, operands.columns
    if INTERPRETED:
        # Its time is that of the operations, not of their sizes.
        most = Tile(128, 256, 256 if dtype is torch.float64 else CHUNK, 4)
    elif dtype in SIXTEEN or tf32:
        # Half of them where threads load singly.
        deep = CHUNK if operands.wide and not tf32 else CHUNK // 2
        most = Tile(128, 128, deep, 8) if operands.wide else Tile(64, 64, deep, 8)
        # Short samples would leave a deep chunk half empty.
        shortest = max(LEAST_CHUNK, int(triton.next_power_of_2(operands.positions)))
        most = most._replace(depth=min(deep, shortest))
    elif dtype is torch.float32:
        most = Tile(64, 64, 16, 8)
    else:
        most = Tile(32, 32, 16, 4)
    height = min(most.rows, max(16, triton.next_power_of_2(rows)))
    width = min(most.columns, max(16, triton.next_power_of_2(columns)))
    warps = most.warps if height * width >= 64 * 64 else 4
    return most._replace(rows=height, columns=width, warps=warps)


def tiles(operands: Operands, tile: Tile) -> tuple[int, int]:
    """Return how many of them cover a gradient's rows and columns."""
    return triton.cdiv(operands.rows, tile.rows), triton.cdiv(operands.columns, tile.columns)


@triton.jit
def direct_kernel(
    a, g, grads, squares, totals, a_squares, g_squares, done,
    sizes, a_strides, g_strides, geometry,
    KEEP: tl.constexpr,
    SKIP: tl.constexpr,
    DENSE: tl.constexpr,
    LAST: tl.constexpr,
    PRECISION: tl.constexpr,
    SUMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Compute one tile of one gradient: stored (KEEP), or its squares and its error terms."""
    positions = sizes[0]
    rows = sizes[1]
    columns = sizes[2]
    row_tiles = tl.cdiv(rows, ROWS)
    column_tiles = tl.cdiv(columns, COLUMNS)
    tile = tl.program_id(0) % (row_tiles * column_tiles)
    unit = tl.program_id(0) // (row_tiles * column_tiles)
    sample = (unit // sizes[3]).to(tl.int64)
    group = (unit % sizes[3]).to(tl.int64)
    unit = unit.to(tl.int64)
    if SKIP:  # noqa: SIM102 (known when compiled)
        if tl.load(done + unit) != 0:
            return  # tight already
    a += sample * a_strides[0] + group * sizes[4] * a_strides[1]
    g += sample * g_strides[0] + group * rows * g_strides[1]
    m = tile // column_tiles
    n = tile % column_tiles
    i = m * ROWS + tl.arange(0, ROWS)
    j = n * COLUMNS + tl.arange(0, COLUMNS)

    total = tl.zeros([ROWS, COLUMNS], SUMS)
    track = tl.zeros([ROWS], SUMS)
    for begin in range(0, positions, DEPTH):
        t = begin + tl.arange(0, DEPTH)
        live = t < positions
        left = outputs(g, i, t * g_strides[2], live, sizes[5], g_strides[1])
        right = inputs(a, j, t, t * 0, live, columns, a_strides, geometry, DENSE, LAST)
        total += product(left, right, SUMS, PRECISION)
        if not KEEP:
            track += tl.sum(total * total, 1)

    place = unit * row_tiles * column_tiles + tile
    if KEEP:
        entry = (unit * rows + i)[:, None] * columns + j[None, :]
        stored = total.to(grads.dtype.element_ty)
        tl.store(grads + entry, stored, mask=(i < rows)[:, None] & (j < columns)[None, :])
        wide = stored.to(tl.float64)
        tl.store(squares + place, tl.sum(tl.sum(wide * wide, 1)))
    else:
        tl.store(squares + place, tl.sum(tl.sum(total * total, 1).to(tl.float64)))
        tl.store(totals + place, tl.sum(track.to(tl.float64)))
        # The operands' own squares: once for each row and each column of tiles.
        if n == 0:
            sizes_g = tl.zeros([ROWS], tl.float64)
            for begin in range(0, positions, DEPTH):
                t = begin + tl.arange(0, DEPTH)
                left = outputs(g, i, t * g_strides[2], t < positions, sizes[5], g_strides[1]).to(
                    SUMS
                )
                sizes_g += tl.sum(left * left, 1).to(tl.float64)
            tl.store(g_squares + unit * row_tiles + m, tl.sum(sizes_g))
        if m == 0:
            sizes_a = tl.zeros([COLUMNS], tl.float64)
            for begin in range(0, positions, DEPTH):
                t = begin + tl.arange(0, DEPTH)
                live = t < positions
                right = inputs(a, j, t, t * 0, live, columns, a_strides, geometry, DENSE, LAST)
                right = right.to(SUMS)
                sizes_a += tl.sum(right * right, 0).to(tl.float64)
            tl.store(a_squares + unit * column_tiles + n, tl.sum(sizes_a))


@triton.jit
def _added(partials, count, BLOCK: tl.constexpr):
    """Return the sum of ``count`` float64 numbers, in an order of their own."""
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float64)
    for begin in range(0, count, BLOCK):
        total += tl.load(partials + begin + lanes, mask=begin + lanes < count, other=0.0)
    return tl.sum(total)


@triton.jit
def bound_kernel(
    squares, totals, a_squares, g_squares, highs, done,
    row_tiles, column_tiles,
    numbers,
    SKIP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the upper end of a gradient's interval, and whether it is tight."""
    unit = tl.program_id(0).to(tl.int64)
    if SKIP:  # noqa: SIM102 (known when compiled)
        if tl.load(done + unit) != 0:
            return  # tight already
    count = row_tiles * column_tiles
    square = _added(squares + unit * count, count, BLOCK)
    total = _added(totals + unit * count, count, BLOCK)
    a_square = _added(a_squares + unit * column_tiles, column_tiles, BLOCK)
    g_square = _added(g_squares + unit * row_tiles, row_tiles, BLOCK)
    size_a = a_square * (1.0 + tl.cast(numbers[3], tl.float64)) + numbers[6]
    size_g = g_square * (1.0 + tl.cast(numbers[3], tl.float64)) + numbers[7]
    error = numbers[0] * tl.sqrt(size_a * size_g) + numbers[8]
    error += numbers[1] * tl.sqrt(total * 1.02 + numbers[5])
    relative = tl.cast(numbers[2], tl.float64)
    norm = tl.sqrt(square * (1.0 + relative) + numbers[4]) + error
    low = tl.sqrt(square * (1.0 - relative)) - error
    high = norm * norm
    high += 1e-14 * high
    tight = (
        (low > 0.0)
        & (high < float("inf"))
        & (high <= low * low * (1.0 + tl.cast(numbers[9], tl.float64)))
    )
    tl.store(highs + unit, high)
    tl.store(done + unit, tight.to(tl.int32))


def _pass(
    operands: Operands,
    kind: SumPrecision,
    dtype: torch.dtype,
    highs: torch.Tensor,
    done: torch.Tensor,
    skip: bool,
    tile: Tile | None = None,
) -> None:
    """Bound all gradients with products of this type; only those not done yet with ``skip``."""
    if tile is None and not skip:
        tile = _tile_of_norms(operands, kind, dtype, highs, done)
    tile = tile or tile_of(operands, dtype)
    m, n = tiles(operands, tile)
    units, like = operands.batch * operands.groups, operands.a
    squares, totals = highs.new_empty(2, units * m * n).unbind()
    a_squares, g_squares = highs.new_empty(units * n), highs.new_empty(units * m)
    launch(
        direct_kernel,
        units * m * n,
        like,
        *(operands.a, operands.g, squares, squares, totals, a_squares, g_squares, done),
        *(operands.sizes, operands.a_strides, operands.g_strides, operands.geometry),
        KEEP=False,
        SKIP=skip,
        PRECISION="ieee",
        **constants(operands, dtype, tile),
    )
    sizes = operands.positions, operands.rows, operands.columns, tile.depth, tile.columns
    launch(
        bound_kernel,
        units,
        like,
        *(squares, totals, a_squares, g_squares, highs, done, m, n),
        direct_numbers(kind, *sizes, chained.possible(operands)),
        SKIP=skip,
        BLOCK=BLOCK,
    )


def _tile_of_norms(
    operands: Operands,
    kind: SumPrecision,
    dtype: torch.dtype,
    highs: torch.Tensor,
    done: torch.Tensor,
) -> Tile:
    def attempt(tile: Tile) -> torch.Tensor:
        tried = torch.zeros_like(highs)
        _pass(operands, kind, dtype, tried, torch.zeros_like(done), False, tile)
        return tried

    return tuned.tile("norm", operands, dtype, tile_of(operands, dtype), attempt)


def constants(
    operands: Operands, dtype: torch.dtype, tile: Tile, *, registers: bool = True
) -> dict[str, Any]:
    """Return the constants of a tile's kernel; ``registers`` is all that a thread may have."""
    return {
        "DENSE": operands.dense,
        "LAST": operands.last,
        "SUMS": tl.float64 if dtype is torch.float64 else tl.float32,
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "DEPTH": tile.depth,
        "warps": tile.warps,
        "stages": tile.stages,
        "fused": True,
        # Left alone, ptxas aims at fewer and spills a few bytes; and so it does, told this, for
        # convolutions by positions on sm_80. None leaves it alone.
        "maxnreg": 255 if registers else None,
    }


def too_long(a: torch.Tensor, positions: int) -> str | None:
    """Return why not, if a 16-bit sample has more positions than its only pass allows."""
    most = longest(CHUNK if INTERPRETED else CHUNK // 2)
    if a.dtype in SIXTEEN and positions > most:
        return f"has 16-bit samples of up to {most} positions"
    return None


def norms(operands: Operands, done: torch.Tensor | None, highs: torch.Tensor) -> torch.Tensor:
    """Return ``highs``, squares ``[B, groups]`` from above, computed where they are not ``done``.

    The first pass decides for 16-bit operands: its interval also holds the norm of what
    ``weighted_sum`` adds, whose rounding a narrower one would not cover. Others have a second pass
    in float64, whose programs end at once where there is nothing to do.
    """
    dtype = operands.a.dtype
    again = done is not None
    if done is None:
        done = highs.new_zeros(highs.shape, dtype=torch.int32)
    if dtype in SIXTEEN:
        _pass(operands, first(dtype), dtype, highs, done, skip=again)
        return highs
    if dtype is torch.float32 and not again:
        depth = tile_of(operands, dtype).depth
        again = operands.positions <= longest(depth)
        if again:
            _pass(operands, first(dtype), dtype, highs, done, skip=False)
    _pass(operands, WIDE, torch.float64, highs, done, skip=again)
    return highs


def gradients(operands: Operands, grads: torch.Tensor, *, tf32: bool = False) -> torch.Tensor:
    """Fill ``grads``; their squares ``[B]`` from above.

    ``tf32``: float32 operands may be rounded to it. The norms are those of what is stored.
    """
    dtype = operands.a.dtype
    tf32 = tf32 and dtype is torch.float32 and operands.wide

    def attempt(tile: Tile) -> torch.Tensor:
        tried = torch.empty_like(grads)
        _store(operands, tried, tile, tf32)
        return tried

    op = "gradient in tf32" if tf32 else "gradient"
    shipped = tile_of(operands, dtype, tf32)
    return _store(operands, grads, tuned.tile(op, operands, dtype, shipped, attempt), tf32)


def _store(operands: Operands, grads: torch.Tensor, tile: Tile, tf32: bool) -> torch.Tensor:
    m, n = tiles(operands, tile)
    units = operands.batch * operands.groups
    squares = grads.new_empty(operands.batch, operands.groups * m * n, dtype=torch.float64)
    launch(
        direct_kernel,
        units * m * n,
        operands.a,
        *(operands.a, operands.g, grads, *(squares,) * 4, squares),
        *(operands.sizes, operands.a_strides, operands.g_strides, operands.geometry),
        KEEP=True,
        SKIP=False,
        PRECISION="tf32" if tf32 else "ieee",
        **constants(operands, operands.a.dtype, tile),
    )
    return added(squares) * (1 + 1e-12)
