"""Integers of linear layers of one position: products of two vectors of whole numbers.

A program rounds one sample's vectors as ``ghost.linear_integer_sum`` says, the one of fewer entries
first, and splits every entry into two bytes, ``x = 256 h + l``. Products of bytes and their sums
are exact in int32, and tensor cores make them:

    sum_b x_b y_b = 2^16 sum_b h h' + 2^8 sum_b (h l' + l h') + sum_b l l'

Entries are at most 2^14 + 1/2 before they are rounded, so ``|h| <= 65``. Not yet run on a GPU.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from .. import _numbers
from .integers import shares
from .launch import INTERPRETED, launch, number
from .operands import tile_at

_BLOCK = 4096 if INTERPRETED else 512
_TILE, _DEPTH, _WARPS = 64, 64, 4
_SKEW = 2.0**-3
"""The least ratio of the first vector's norm to the root of what both have."""


@triton.jit
def _square(x, count, BLOCK: tl.constexpr):
    """Return the sum of squares of a row in float64."""
    total = tl.zeros([BLOCK], tl.float64)
    for begin in range(0, count, BLOCK):
        entry = begin + tl.arange(0, BLOCK)
        part = tl.load(x + entry, mask=entry < count, other=0.0).to(tl.float64)
        total += part * part
    return tl.sum(total)


@triton.jit
def _rounded(x, entry, count, scale, SUMS: tl.constexpr):
    """Return entries times ``scale``, rounded to nearest; zeros where the scale is."""
    part = tl.load(x + entry, mask=entry < tl.where(scale != 0.0, count, 0), other=0.0).to(SUMS)
    if SUMS == tl.float64:
        return (part * scale + 6755399441055744.0) - 6755399441055744.0
    return (part * scale + 12582912.0) - 12582912.0


@triton.jit
def _rounded_square(x, count, scale, SUMS: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float64)
    for begin in range(0, count, BLOCK):
        whole = _rounded(x, begin + tl.arange(0, BLOCK), count, scale, SUMS).to(tl.float64)
        total += whole * whole
    return tl.sum(total)


@triton.jit
def _store(x, high, low, count, scale, padded, SUMS: tl.constexpr, BLOCK: tl.constexpr):
    """Store both bytes of every entry; samples lie innermost."""
    for begin in range(0, count, BLOCK):
        entry = begin + tl.arange(0, BLOCK)
        whole = _rounded(x, entry, count, scale, SUMS).to(tl.int32)
        upper = (whole + 128) >> 8
        place = entry.to(tl.int64) * padded
        tl.store(high + place, upper.to(tl.int8), mask=entry < count)
        tl.store(low + place, (whole - upper * 256).to(tl.int8), mask=entry < count)


@triton.jit
def _finite(x):
    return x * 0.0 == 0.0


@triton.jit(do_not_specialize=["few_count", "many_count", "padded", "skew", "most", "longest"])
def vectors_kernel(
    few, many, factors, few_bytes, many_bytes,
    few_count: tl.int64, many_count: tl.int64, padded: tl.int64,
    skew: tl.int64, most: tl.int64, longest: tl.int64,
    SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Round one sample's vectors: their product is no longer than ``|factor| |few| |many|``."""
    sample = tl.program_id(0).to(tl.int64)
    few += sample * few_count
    many += sample * many_count
    factor = tl.load(factors + sample).to(tl.float64)
    used = factor != 0.0  # what is not read cannot be NaN
    few_square = _square(few, tl.where(used, few_count, 0), BLOCK)
    many_square = _square(many, tl.where(used, many_count, 0), BLOCK)
    square = tl.minimum(factor * factor * few_square * many_square, number(most, tl.float64))
    fits = (square > 0.0) & _finite(few_square * many_square)
    square = tl.where(fits, square, 0.0)
    room = tl.sqrt(square)

    wide = tl.sqrt(room) * number(skew, tl.float64) / tl.sqrt(tl.where(fits, few_square, 1.0))
    scale = wide.to(SUMS)
    few_scale = tl.where(_finite(scale), scale, 0.0)
    first_square = _rounded_square(few, few_count, few_scale, SUMS, BLOCK)

    going = first_square > 0.0
    left = room / tl.sqrt(tl.where(going, first_square, 1.0))
    left = tl.minimum(left, number(longest, tl.float64))
    many_size = tl.sqrt(tl.where(going, many_square, 1.0))
    many_scale = few_scale * 0.0
    less = left * 0.0 + 0.5
    while going:
        left -= less
        less = less * 2.0
        scale = (tl.where(factor < 0.0, -left, left) / many_size).to(SUMS)
        scale = tl.where(_finite(scale), scale, 0.0)
        last_square = _rounded_square(many, many_count, scale, SUMS, BLOCK)
        taken = (left > 0.0) & (first_square * last_square <= square)
        many_scale = tl.where(taken, scale, many_scale)
        going = (left > 0.0) & (first_square * last_square > square)

    few_planes = few_count * padded
    many_planes = many_count * padded
    _store(few, few_bytes + sample, few_bytes + few_planes + sample, few_count, few_scale,
           padded, SUMS, BLOCK)  # fmt: skip
    _store(many, many_bytes + sample, many_bytes + many_planes + sample, many_count, many_scale,
           padded, SUMS, BLOCK)  # fmt: skip


@triton.jit
def products_kernel(
    left, right, out, rows, columns, padded, per_split,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Add products of bytes over a range of samples to one tile."""
    i, j, split = tile_at(rows, columns, TILE, TILE)
    first = split * per_split
    high = tl.zeros([TILE, TILE], tl.int32)
    cross = tl.zeros([TILE, TILE], tl.int32)
    low = tl.zeros([TILE, TILE], tl.int32)
    b = tl.arange(0, DEPTH)
    x = left + i.to(tl.int64)[:, None] * padded + b[None, :]
    y = right + j.to(tl.int64)[None, :] * padded + b[:, None]
    left_low = tl.cast(rows, tl.int64) * padded
    right_low = tl.cast(columns, tl.int64) * padded
    mine = (i < rows)[:, None]
    theirs = (j < columns)[None, :]
    for begin in range(first, tl.minimum(first + per_split, padded), DEPTH):
        x_high = tl.load(x + begin, mask=mine, other=0)
        x_low = tl.load(x + left_low + begin, mask=mine, other=0)
        y_high = tl.load(y + begin, mask=theirs, other=0)
        y_low = tl.load(y + right_low + begin, mask=theirs, other=0)
        high = tl.dot(x_high, y_high, high, out_dtype=tl.int32)
        cross = tl.dot(x_high, y_low, cross, out_dtype=tl.int32)
        cross = tl.dot(x_low, y_high, cross, out_dtype=tl.int32)
        low = tl.dot(x_low, y_low, low, out_dtype=tl.int32)
    entry = i.to(tl.int64)[:, None] * columns + j[None, :]
    total = high * 65536 + cross * 256 + low
    tl.atomic_add(out + entry, total, mask=mine & theirs, sem="relaxed")


def add_products(
    a: torch.Tensor,
    g: torch.Tensor,
    factors: torch.Tensor,
    out: torch.Tensor,
    most: float,
    longest: float,
) -> None:
    """Add the products of vectors to ``out``.

    Args:
        a, g, factors, out: as in ``ghost.linear_integer_sum``.
        most, longest: what norms of products and of vectors are cut down to.
    """
    batch, rows, columns = len(a), out.shape[0], out.shape[1]
    if not (batch and out.numel()):
        return
    padded = -(-batch // _DEPTH) * _DEPTH
    right, left = (
        torch.zeros(2, count, padded, dtype=torch.int8, device=a.device)
        for count in (columns, rows)
    )
    vectors = [(a, right, columns), (g, left, rows)]
    if columns >= rows:  # the vector of more entries is rounded last
        vectors.reverse()
    (few, few_bytes, few_count), (many, many_bytes, many_count) = vectors
    skew = max(math.sqrt(math.sqrt(few_count / many_count)), _SKEW)
    numbers = (_numbers.bits(x) for x in (skew, most * most, longest))
    launch(
        vectors_kernel,
        batch,
        out,
        *(few, many, factors, few_bytes, many_bytes),
        *(few_count, many_count, padded, *numbers),
        SUMS=tl.float64 if factors.dtype is torch.float64 else tl.float32,
        BLOCK=_BLOCK,
    )
    count = triton.cdiv(rows, _TILE) * triton.cdiv(columns, _TILE)
    splits, each = shares(count, padded // _DEPTH)
    sizes = rows, columns, padded, each * _DEPTH
    meta: dict[str, Any] = {"TILE": _TILE, "DEPTH": _DEPTH, "warps": _WARPS}
    launch(products_kernel, count * splits, out, left, right, out, *sizes, **meta)
