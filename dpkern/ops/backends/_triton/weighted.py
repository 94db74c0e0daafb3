"""Weighted sums of gradients, ``out += sum_b c_b grad_b``.

A program owns a tile of the output and a range of samples.

A clip factor must not be rounded together with a 16-bit operand: ``fl(c g)`` in bfloat16 is up to
2^-8 longer than ``c g``, and the sample's part up to 2^-8 above the clipping bound. So 16-bit
operands are multiplied as they are and factors act on the float32 sum of a chunk of positions.
Where samples have hardly any, and for wider operands, the factor goes into a float32 copy of g. In
the larger tiles of ``chained`` it acts on the total, between samples.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import chained, tuned
from .direct import constants, tile_of, tiles
from .launch import launch
from .operands import Operands, inputs, outputs, product, tile_at
from .precision import SIXTEEN
from .tuned import Tile

_PROGRAMS = 512  # that keep any device busy; a range of samples for each beyond the tiles
_LEAST = 16  # chunks of positions worth a program
_SHORT = 4  # positions; fewer leave a chunk of 16-bit products nearly empty
_WIDENED = 32
"""Rows of a tile, at most, where 16-bit operands are multiplied in float32. For compute capability
10.0 Triton 3.6 takes tf32 for larger ones, although it is told not to."""
BLOCK = 1024


@triton.jit
def positions_kernel(
    a, g, factors, out, sizes, a_strides, g_strides, geometry, last, per_split,
    WHOLE: tl.constexpr,
    DENSE: tl.constexpr,
    LAST: tl.constexpr,
    SUMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Sum over the positions of all samples in a row: factors times g in the type of the sums."""
    positions = sizes[0]
    rows = sizes[1]
    columns = sizes[2]
    i, j, part = tile_at(rows, columns, ROWS, COLUMNS)
    split = part // sizes[3]
    group = (part % sizes[3]).to(tl.int64)
    a += group * sizes[4] * a_strides[1]
    g += group * rows * g_strides[1]
    total = tl.zeros([ROWS, COLUMNS], SUMS)
    first = split * per_split
    end = tl.minimum(first + per_split, last)
    for begin in range(first, end, DEPTH):
        place = begin + tl.arange(0, DEPTH)
        live = place < end
        sample = (place // positions).to(tl.int64)
        t = place % positions
        factor = tl.load(factors + sample, mask=live, other=0.0)
        live &= factor != 0.0  # what is not read cannot be NaN
        starts = sample * g_strides[0] + t * g_strides[2]
        left = outputs(g, i, starts, live, sizes[5], g_strides[1]).to(SUMS) * factor[None, :]
        starts = sample * a_strides[0]
        right = inputs(a, j, t, starts, live, columns, a_strides, geometry, DENSE, LAST)
        right = right.to(SUMS)
        total += product(left, right, SUMS, "ieee")
    _put(out, total, split, group, i, j, rows, columns, sizes[3], WHOLE)


@triton.jit
def samples_kernel(
    a, g, factors, out, sizes, a_strides, g_strides, geometry, last, per_split,
    WHOLE: tl.constexpr,
    DENSE: tl.constexpr,
    LAST: tl.constexpr,
    SUMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Sum chunk by chunk: its product, then its sample's factor times that."""
    positions = sizes[0]
    rows = sizes[1]
    columns = sizes[2]
    i, j, part = tile_at(rows, columns, ROWS, COLUMNS)
    split = part // sizes[3]
    group = (part % sizes[3]).to(tl.int64)
    a += group * sizes[4] * a_strides[1]
    g += group * rows * g_strides[1]
    total = tl.zeros([ROWS, COLUMNS], SUMS)
    chunks = tl.cdiv(positions, DEPTH)
    first = split * per_split
    count = tl.minimum(per_split, last - first) * chunks
    # One loop over all samples' chunks, so that the next are on their way while one is multiplied.
    for step in range(count):
        sample = first + step // chunks
        t = step % chunks * DEPTH + tl.arange(0, DEPTH)
        factor = tl.load(factors + sample)
        live = t < tl.where(factor != 0.0, positions, 0)  # what is not read cannot be NaN
        x = a + tl.cast(sample, tl.int64) * a_strides[0]
        y = g + tl.cast(sample, tl.int64) * g_strides[0]
        left = outputs(y, i, t * g_strides[2], live, sizes[5], g_strides[1])
        right = inputs(x, j, t, t * 0, live, columns, a_strides, geometry, DENSE, LAST)
        total += factor * product(left, right, SUMS, "ieee")
    _put(out, total, split, group, i, j, rows, columns, sizes[3], WHOLE)


@triton.jit
def _put(out, total, split, group, i, j, rows, columns, groups, WHOLE: tl.constexpr):
    """Add a complete sum; store a part of one, in a place of its own."""
    entry = (group * rows + i)[:, None] * columns + j[None, :]
    mask = (i < rows)[:, None] & (j < columns)[None, :]
    if WHOLE:
        tl.store(out + entry, tl.load(out + entry, mask=mask) + total, mask=mask)
    else:
        entry += split.to(tl.int64) * groups * rows * columns
        tl.store(out + entry, total, mask=mask)


@triton.jit
def combine_kernel(parts, out, splits, entries, BLOCK: tl.constexpr):
    """Add ``out += sum_s parts[s]``, in the order of the parts."""
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = entry < entries
    total = tl.load(parts + entry, mask=mask)
    for _ in range(1, splits):
        parts += entries
        total += tl.load(parts + entry, mask=mask)
    tl.store(out + entry, tl.load(out + entry, mask=mask) + total, mask=mask)


def by_samples(operands: Operands) -> bool:
    """Whether the factors act on whole samples."""
    return operands.a.dtype in SIXTEEN and operands.positions >= _SHORT


def shares(operands: Operands, tile: Tile) -> tuple[int, int]:
    """Return into how many parts the samples (or positions) are split, and how many one takes.

    This follows from the sizes and the tile that ships, so that results depend neither on the
    device nor on the tile that was found to be fastest there.
    """
    m, n = tiles(operands, tile)
    room = max(1, _PROGRAMS // (m * n * operands.groups))
    if by_samples(operands):
        count, least = operands.batch, 1
    else:
        count, least = operands.batch * operands.positions, _LEAST * tile.depth
    each = max(least, -(-count // room))
    return -(-count // each), each


def weighted_sum(operands: Operands, factors: torch.Tensor, out: torch.Tensor) -> None:
    """Add ``out += sum_b factors[b] grad_b``; ``out`` is a matrix of the operands' columns."""
    if chained.here(operands):
        _combine(chained.parts(operands, factors), out)
        return
    dtype = operands.a.dtype if by_samples(operands) else operands.sums
    shipped = tile_of(operands, dtype)
    if dtype is not operands.a.dtype and shipped.rows > _WIDENED:
        shipped = shipped._replace(rows=_WIDENED, warps=4)
    share = shares(operands, shipped)

    def attempt(tile: Tile) -> torch.Tensor:
        tried = torch.zeros_like(out)
        _add(operands, factors, tried, dtype, tile, share)
        return tried

    tile = tuned.tile("sum", operands, dtype, shipped, attempt)
    _add(operands, factors, out, dtype, tile, share)


def _add(
    operands: Operands,
    factors: torch.Tensor,
    out: torch.Tensor,
    dtype: torch.dtype,
    tile: Tile,
    share: tuple[int, int],
) -> None:
    whole_samples = by_samples(operands)
    kernel = samples_kernel if whole_samples else positions_kernel
    m, n = tiles(operands, tile)
    splits, each = share
    parts = out if splits == 1 else out.new_empty(splits, out.numel())
    last = operands.batch if whole_samples else operands.batch * operands.positions
    launch(
        kernel,
        m * n * operands.groups * splits,
        out,
        *(operands.a, operands.g, factors, parts),
        *(operands.sizes, operands.a_strides, operands.g_strides, operands.geometry),
        *(last, each),
        WHOLE=splits == 1,
        **constants(operands, dtype, tile, registers=operands.dense or whole_samples),
    )
    if splits > 1:
        _combine(parts, out)


def _combine(parts: torch.Tensor, out: torch.Tensor) -> None:
    blocks = -(-out.numel() // BLOCK)
    launch(combine_kernel, blocks, out, parts, out, len(parts), out.numel(), BLOCK=BLOCK)
