"""Norms of few positions: rank one, and from Gram matrices over positions.

    || sum_t g_t a_t^T ||^2 = sum_{t,s} <a_t, a_s> <g_t, g_s>

Up to 64 positions a program owns a sample and holds both matrices whole. Beyond them, where the
operands have 16 bits, it owns a tile of both: those on the diagonal first, which also say how long
the rows of the operands are, then those below it, which count twice. A tile is used where it was
made; neither matrix is ever stored.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .. import _gram_shares as shares
from . import chained, gram_samples
from .gram_interval import interval, put_lengths, row_lengths, weighed
from .launch import launch
from .operands import MULTIPLE, Operands, product
from .precision import SIXTEEN, first, gram_numbers

MOST = 64
"""Positions of a sample whose matrices one program holds."""
TILE = 128
"""Positions on a side of a tile."""
DEPTH = {True: 64, False: 32}
"""Features in a chunk, of 16-bit operands and of float32."""
BLOCK = 1024
WARPS = 8


def possible(operands: Operands) -> bool:
    """Whether there are kernels.

    Longer float32 samples would nearly all need float64 afterwards. Tiles whose threads load
    numbers one by one do not fit the registers.
    """
    if operands.positions > MOST:
        wide = operands.columns % MULTIPLE == 0 and operands.sizes[5] % MULTIPLE == 0
        return wide and operands.a.dtype in SIXTEEN
    return operands.a.dtype is not torch.float64


def cheaper(operands: Operands) -> bool:
    """Whether the Gram matrices take fewer multiplications than the gradient."""
    entries = _side(operands) ** 2
    if gram_samples.here(operands):
        entries = shares.ENTRIES
    elif operands.positions > MOST:
        tiles = triton.cdiv(operands.positions, TILE)
        entries = tiles * (tiles + 1) // 2 * TILE**2
    gram = entries * (operands.rows + operands.columns)
    return gram < operands.positions * operands.rows * operands.columns


def _side(operands: Operands) -> int:
    return max(16, int(triton.next_power_of_2(operands.positions)))


@triton.jit
def _gram(x, positions, features, SIDE: tl.constexpr, DEPTH: tl.constexpr):
    """Return ``x x^T`` of ``x [positions, features]``, in float64 once it is complete."""
    t = tl.arange(0, SIDE)
    total = tl.zeros([SIDE, SIDE], tl.float32)
    for begin in range(0, features, DEPTH):
        k = begin + tl.arange(0, DEPTH)
        mask = (t < positions)[:, None] & (k < features)[None, :]
        rows = tl.load(x + t[:, None] * features + k[None, :], mask=mask, other=0.0)
        total += product(rows, tl.trans(rows), tl.float32, "ieee")
    return total.to(tl.float64)


@triton.jit
def _lengths(gram, positions, gamma, floor, SIDE: tl.constexpr):
    """Return the lengths of the rows behind a Gram matrix, from above."""
    t = tl.arange(0, SIDE)
    squares = tl.sum(tl.where(t[:, None] == t[None, :], gram, 0.0), 1)
    return row_lengths(squares, t < positions, gamma, floor)


@triton.jit
def gram_kernel(
    a, g, highs, done, positions, columns, rows, numbers, SIDE: tl.constexpr, DEPTH: tl.constexpr
):
    """Write the upper end of a sample's interval, and whether it is tight."""
    sample = tl.program_id(0).to(tl.int64)
    u = _gram(a + sample * positions * columns, positions, columns, SIDE, DEPTH)
    v = _gram(g + sample * positions * rows, positions, rows, SIDE, DEPTH)
    gamma = tl.cast(numbers[0], tl.float64)
    floor = tl.cast(numbers[1], tl.float64)
    lengths_a = _lengths(u, positions, gamma, floor, SIDE)
    lengths_g = _lengths(v, positions, gamma, floor, SIDE)
    pairs = tl.abs(v) * lengths_a[:, None] * lengths_a[None, :]
    pairs += tl.abs(u) * lengths_g[:, None] * lengths_g[None, :]
    high, tight = interval(
        tl.sum(tl.sum(u * v, 1)),
        tl.sum(tl.sum(pairs, 1)),
        tl.sum(lengths_a * lengths_g),
        tl.sum(lengths_a),
        tl.sum(lengths_g),
        positions,
        numbers,
    )
    tl.store(highs + sample, high)
    tl.store(done + sample, tight)


@triton.jit
def _gram_tile(
    x, t, s, positions, features, SIDE: tl.constexpr, DEPTH: tl.constexpr, DIAGONAL: tl.constexpr
):
    """Return ``x_t x_s^T`` of two ranges of positions."""
    total = tl.zeros([SIDE, SIDE], tl.float32)
    for begin in range(0, features, DEPTH):
        k = begin + tl.arange(0, DEPTH)
        inside = (k < features)[None, :]
        mask = (t < positions)[:, None] & inside
        left = tl.load(x + t[:, None] * features + k[None, :], mask=mask, other=0.0)
        if DIAGONAL:
            right = left
        else:
            mask = (s < positions)[:, None] & inside
            right = tl.load(x + s[:, None] * features + k[None, :], mask=mask, other=0.0)
        total += product(left, tl.trans(right), tl.float32, "ieee")
    return total


@triton.jit
def gram_tile_kernel(
    a, g, sums, lengths, positions, columns, rows, numbers,
    DIAGONAL: tl.constexpr,
    SIDE: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Write a tile's part of the square and of its error; from the diagonal lengths of rows."""
    side = tl.cdiv(positions, SIDE)
    below = side * (side - 1) // 2
    if DIAGONAL:
        sample = (tl.program_id(0) // side).to(tl.int64)
        m = tl.program_id(0) % side
        n = m
        place = sample * (side + below) + m
    else:
        sample = (tl.program_id(0) // below).to(tl.int64)
        tile = tl.program_id(0) % below
        place = sample * (side + below) + side + tile
        # Tile (m, n), n < m, is the n-th behind the m (m - 1) / 2 tiles of the rows above.
        m = 1
        for row in range(2, side):
            m += (tile >= row * (row - 1) // 2).to(tl.int32)
        n = tile - m * (m - 1) // 2
    t = m * SIDE + tl.arange(0, SIDE)
    s = n * SIDE + tl.arange(0, SIDE)
    lengths += sample * 2 * side * SIDE
    a += sample * positions * columns
    u = _gram_tile(a, t, s, positions, columns, SIDE, DEPTH, DIAGONAL)
    lengths_a = lengths + t
    g += sample * positions * rows
    v = _gram_tile(g, t, s, positions, rows, SIDE, DEPTH, DIAGONAL)
    lengths_g = lengths_a + side * SIDE
    if DIAGONAL:
        put_lengths(lengths_a, u, t < positions, numbers, SIDE)
        put_lengths(lengths_g, v, t < positions, numbers, SIDE)
        tl.debug_barrier()  # what others of this program have put
        twice = 1.0
    else:
        twice = 2.0
    value = tl.sum(tl.sum(u.to(tl.float64) * v.to(tl.float64), 1))
    pairs = weighed(v, lengths_a, lengths + s) + weighed(u, lengths_g, lengths + side * SIDE + s)
    tl.store(sums + 2 * place, value * twice)
    tl.store(sums + 2 * place + 1, pairs * twice)


@triton.jit
def gram_bound_kernel(
    sums, lengths, highs, done, positions, numbers, SIDE: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the upper end of a sample's interval, and whether it is tight."""
    sample = tl.program_id(0).to(tl.int64)
    side = tl.cdiv(positions, SIDE)
    tiles = side * (side + 1) // 2
    lanes = tl.arange(0, BLOCK)
    value = tl.zeros([BLOCK], tl.float64)
    pairs = tl.zeros([BLOCK], tl.float64)
    sums += sample * 2 * tiles
    for begin in range(0, tiles, BLOCK):
        tile = begin + lanes
        value += tl.load(sums + 2 * tile, mask=tile < tiles, other=0.0)
        pairs += tl.load(sums + 2 * tile + 1, mask=tile < tiles, other=0.0)
    both = tl.zeros([BLOCK], tl.float64)
    sum_a = tl.zeros([BLOCK], tl.float64)
    sum_g = tl.zeros([BLOCK], tl.float64)
    lengths += sample * 2 * side * SIDE
    for begin in range(0, positions, BLOCK):
        t = begin + lanes
        row_a = tl.load(lengths + t, mask=t < positions, other=0.0).to(tl.float64)
        row_g = tl.load(lengths + side * SIDE + t, mask=t < positions, other=0.0).to(tl.float64)
        both += row_a * row_g
        sum_a += row_a
        sum_g += row_g
    high, tight = interval(
        tl.sum(value),
        tl.sum(pairs),
        tl.sum(both),
        tl.sum(sum_a),
        tl.sum(sum_g),
        positions,
        numbers,
    )
    tl.store(highs + sample, high)
    tl.store(done + sample, tight)


def gram(operands: Operands, highs: torch.Tensor) -> torch.Tensor:
    """Fill ``highs`` with squares from above; int32 ``[B, 1]``: which of them are tight."""
    if gram_samples.here(operands):
        return gram_samples.grams([operands], highs[None])[0]
    done = torch.empty_like(highs, dtype=torch.int32)
    depth = DEPTH[operands.a.dtype in SIXTEEN]
    sizes = operands.positions, operands.rows, operands.columns
    numbers = gram_numbers(first(operands.a.dtype), *sizes, depth, chained.possible(operands))
    given = operands.positions, operands.columns, operands.sizes[5], numbers
    if operands.positions <= MOST:
        launch(
            gram_kernel,
            operands.batch,
            operands.a,
            *(operands.a, operands.g, highs, done, *given),
            SIDE=_side(operands),
            DEPTH=depth,
            warps=WARPS,
            fused=True,
        )
        return done
    side = int(triton.cdiv(operands.positions, TILE))
    below = side * (side - 1) // 2
    sums = highs.new_empty(operands.batch, side + below, 2)
    lengths = highs.new_empty(operands.batch, 2, side * TILE, dtype=torch.float32)
    for diagonal, tiles in ((True, side), (False, below)):
        launch(
            gram_tile_kernel,
            operands.batch * tiles,
            operands.a,
            *(operands.a, operands.g, sums, lengths, *given),
            DIAGONAL=diagonal,
            SIDE=TILE,
            DEPTH=depth,
            warps=WARPS,
            fused=True,
            maxnreg=255,
        )
    launch(
        gram_bound_kernel,
        operands.batch,
        operands.a,
        *(sums, lengths, highs, done, operands.positions, numbers),
        SIDE=TILE,
        BLOCK=BLOCK,
    )
    return done


@triton.jit
def _square(x, size, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float64)
    for begin in range(0, size, BLOCK):
        part = tl.load(x + begin + lanes, mask=begin + lanes < size, other=0.0).to(tl.float64)
        total += part * part
    return tl.sum(total)


@triton.jit
def rank_one_kernel(a, g, squares, columns, rows, BLOCK: tl.constexpr):
    """Write ``|a|^2 |g|^2`` of a sample with one position."""
    sample = tl.program_id(0).to(tl.int64)
    square = _square(a + sample * columns, columns, BLOCK)
    square *= _square(g + sample * rows, rows, BLOCK)
    tl.store(squares + sample, square + 1e-11 * square)


def rank_one(operands: Operands, squares: torch.Tensor) -> torch.Tensor:
    """Return ``squares``, filled from above."""
    launch(
        rank_one_kernel,
        operands.batch,
        operands.a,
        *(operands.a, operands.g, squares, operands.columns, operands.rows),
        BLOCK=BLOCK,
    )
    return squares
