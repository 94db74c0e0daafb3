"""Norms of few positions: rank one, and from Gram matrices over positions.

    || sum_t g_t a_t^T ||^2 = sum_{t,s} <a_t, a_s> <g_t, g_s>

A program owns a sample and holds both matrices whole, so at most 64 positions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import launch
from .operands import Operands, product
from .precision import SIXTEEN, first, gram_numbers

MOST = 64
DEPTH = {True: 64, False: 32}
"""Features in a chunk, of 16-bit operands and of float32."""
BLOCK = 1024
WARPS = 8


def cheaper(operands: Operands) -> bool:
    """Whether the Gram matrices take fewer multiplications than the gradient."""
    side = _side(operands)
    gram = side * side * (operands.rows + operands.columns)
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
    lengths = tl.sqrt(squares * (1.0 + 2.0 * gamma) + floor * (1.0 + 2.0 * gamma))
    return tl.where(t < positions, lengths, 0.0)


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
    value = tl.sum(tl.sum(u * v, 1))
    pairs = tl.abs(v) * lengths_a[:, None] * lengths_a[None, :]
    pairs += tl.abs(u) * lengths_g[:, None] * lengths_g[None, :]
    both = tl.sum(lengths_a * lengths_g)
    sum_a = tl.sum(lengths_a)
    sum_g = tl.sum(lengths_g)
    half = gamma * tl.sum(tl.sum(pairs, 1)) + (gamma * gamma + 1e-13) * both * both
    half += floor * (sum_a * sum_a + sum_g * sum_g + floor * positions * positions)
    high = value + 1.01 * half
    high += 1e-14 * high
    low = value - 1.01 * half
    tight = (
        (low > 0.0)
        & (high < float("inf"))
        & (high <= low * (1.0 + tl.cast(numbers[2], tl.float64)))
    )
    tl.store(highs + sample, high)
    tl.store(done + sample, tight.to(tl.int32))


def gram(operands: Operands, highs: torch.Tensor) -> torch.Tensor:
    """Fill ``highs`` with squares from above; int32 ``[B, 1]``: which of them are tight."""
    done = torch.empty_like(highs, dtype=torch.int32)
    depth = DEPTH[operands.a.dtype in SIXTEEN]
    sizes = operands.positions, operands.rows, operands.columns
    launch(
        gram_kernel,
        operands.batch,
        operands.a,
        *(operands.a, operands.g, highs, done),
        *(operands.positions, operands.columns, operands.sizes[5]),
        gram_numbers(first(operands.a.dtype), *sizes, depth),
        SIDE=_side(operands),
        DEPTH=depth,
        warps=WARPS,
        fused=True,
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
