"""The interval of a norm that was computed from tiles of Gram matrices.

``docs/ghost.md`` derives it. ``numbers`` are those of ``precision.gram_numbers``.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_lengths(squares, live, gamma, floor):
    """Return lengths from above, of rows whose squares were computed; 0 where there are none."""
    squares = squares.to(tl.float64)
    lengths = tl.sqrt(squares * (1.0 + 2.0 * gamma) + floor * (1.0 + 2.0 * gamma))
    return tl.where(live, lengths, 0.0)


@triton.jit
def put_lengths(lengths, tile, live, numbers, SIDE: tl.constexpr):
    """Store the lengths of rows behind a tile on the diagonal, in float32 from above."""
    lanes = tl.arange(0, SIDE)
    squares = tl.sum(tl.where(lanes[:, None] == lanes[None, :], tile, 0.0), 1)
    gamma = tl.cast(numbers[0], tl.float64)
    long = row_lengths(squares, live, gamma, tl.cast(numbers[1], tl.float64)) * (1.0 + 2.0**-22)
    tl.store(lengths, long.to(tl.float32))


@triton.jit
def weighed(tile, rows, columns):
    """Return the sum of a tile's sizes, each times the lengths of its row and its column."""
    sizes = tl.abs(tile).to(tl.float64) * tl.load(columns)[None, :].to(tl.float64)
    return tl.sum(tl.sum(sizes, 1) * tl.load(rows).to(tl.float64))


@triton.jit
def interval(value, pairs, both, sum_a, sum_g, positions, numbers):
    """Return the upper end of a square's interval, and whether it is tight.

    ``both`` bounds the sizes of all products, of which the weighted sum loses a share as well.
    """
    gamma = tl.cast(numbers[0], tl.float64)
    floor = tl.cast(numbers[1], tl.float64)
    half = gamma * pairs + (gamma * gamma + 1e-13) * both * both
    half += floor * (sum_a * sum_a + sum_g * sum_g + floor * positions * positions)
    high = value + 1.01 * half
    high += 1e-14 * high
    low = value - 1.01 * half
    summed = tl.cast(numbers[3], tl.float64) * both
    high += summed * (2.0 * tl.sqrt(tl.maximum(high, 0.0)) + summed)
    tight = (
        (low > 0.0)
        & (high < float("inf"))
        & (high <= low * (1.0 + tl.cast(numbers[2], tl.float64)))
    )
    return high, tight.to(tl.int32)
