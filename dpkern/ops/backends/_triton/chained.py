"""Weighted sums of 16-bit gradients that stay in one accumulator from sample to sample.

``weighted.samples_kernel`` holds a chunk's product and the total, which is why its tiles end at 128
x 128. Here a tile has one accumulator, in units of the factor of the sample at hand: before a
sample's products are added, what is there is multiplied by the last factor over its own,

    S <- S f_{b-1} / f_b + sum_t g_t a_t^T,     at last S f_last.

Samples come by the size of their factors, so that no quotient is above 1 and nothing overflows that
would not in any order. 256 x 192 numbers then fit the registers of two warp groups, and what a tile
loads is multiplied 1.7 times as often. ``docs/ghost.md`` has the rounding. Only for compute
capability 9: elsewhere the kernel spills. Not yet run on a GPU.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .launch import INTERPRETED, capability, launch
from .operands import MULTIPLE, Operands
from .precision import CHAIN, SAMPLES, SIXTEEN

ROWS, COLUMNS, DEPTH = 256, 192, 64
"""A tile, and positions in a chunk."""
_WIDE = 128
"""Columns of the first of a tile's two accumulators: their widths must be powers of two."""
_OLDER = 128
"""Rows and columns of the tiles of ``weighted.samples_kernel``, at most."""
_ARCH = 9
_PROCESSORS = 132
"""Programs that run at a time on an H200, one on a multiprocessor; bits must not depend on what
there is."""
_STORED = 480
"""Positions that a tile could multiply in the time that storing it and adding it up takes."""
_INTERPRETED = tl.constexpr(INTERPRETED)


def possible(operands: Operands) -> bool:
    """Whether such sums could be made on some device, by sizes and layout alone.

    Norms then cover what they may lose. Chunks must be two thirds full.
    """
    return (
        operands.a.dtype in SIXTEEN
        and operands.dense
        and operands.groups == 1
        and operands.positions <= CHAIN
        and 2 * DEPTH * -(-operands.positions // DEPTH) <= 3 * operands.positions
        and operands.a_strides[1] == operands.g_strides[1] == 1
        and operands.columns % MULTIPLE == 0
        and operands.sizes[5] % MULTIPLE == 0
        and _loads(operands, ROWS, COLUMNS) < _loads(operands, _OLDER, _OLDER)
    )


def _loads(operands: Operands, rows: int, columns: int) -> int:
    """Return how many numbers all tiles load for each position."""
    tiles = triton.cdiv(operands.rows, rows) * triton.cdiv(operands.columns, columns)
    return int(tiles) * (rows + columns)


def here(operands: Operands) -> bool:
    """Whether this device makes them, of these tensors."""
    aligned = all(x.data_ptr() % 16 == 0 for x in (operands.a, operands.g))
    return possible(operands) and aligned and (INTERPRETED or capability(operands.a) == _ARCH)


@lru_cache(maxsize=4096)
def share(tiles: int, samples: int, positions: int) -> int:
    """Return how many samples a program adds, by the sizes alone.

    As many as end together soonest: programs run at most ``_PROCESSORS`` at a time, and each costs
    what storing its tile takes.
    """

    def time(each: int) -> float:
        turns = -(-tiles * -(-samples // each) // _PROCESSORS)
        return turns * (each + _STORED / positions)

    return min(range(1, min(samples, SAMPLES) + 1), key=lambda each: (time(each), -each))


@triton.jit(do_not_specialize=["positions", "last", "each"])
def chained_kernel(
    a, a_rest, g, factors, order, scales, parts, positions, rows, columns, last, each,
    MOST: tl.constexpr,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
    REST: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Store a tile's sum over a range of samples, in a place of its own."""
    column_tiles = tl.cdiv(columns, WIDE + REST)
    tiles = tl.cdiv(rows, ROWS) * column_tiles
    split = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    row = tile // column_tiles * ROWS
    column = tile % column_tiles * (WIDE + REST)
    first = split * each
    count = tl.minimum(each, last - first)

    order += tl.program_id(0) * MOST
    scales += tl.program_id(0) * 2 * MOST
    zeros = _put_order(factors + first, count, order, scales, MOST)

    total = tl.zeros([ROWS, WIDE], tl.float32)
    rest = tl.zeros([ROWS, REST], tl.float32)
    chunks = tl.cdiv(positions, DEPTH)
    # One loop over all samples' chunks, so that the next are on their way while one is multiplied.
    for step in range(zeros * chunks, count * chunks):
        place = step // chunks
        t = step % chunks * DEPTH
        sample = first + tl.load(order + place)
        left = g.load([sample, t, row]).reshape(DEPTH, ROWS)
        right = a.load([sample, t, column]).reshape(DEPTH, WIDE)
        right_rest = a_rest.load([sample, t, column + WIDE]).reshape(DEPTH, REST)
        if t == 0:
            scale = tl.load(scales + MOST + place)
            total = total * scale
            rest = rest * scale
        total = _added(left, right, total)
        rest = _added(left, right_rest, rest)

    scale = tl.load(scales + count - 1)
    parts += (split.to(tl.int64) * rows + row) * columns + column
    _put(parts, total * scale, rows - row, columns - column, columns)
    _put(parts + WIDE, rest * scale, rows - row, columns - column - WIDE, columns)


@triton.jit
def _put_order(factors, count, order, scales, MOST: tl.constexpr):
    """Store which sample comes when, the factors in this order, and what each does to the total.

    Return how many are zero: they come first. NaN comes last and makes the total NaN.
    """
    k = tl.arange(0, MOST)
    factor = tl.load(factors + k, mask=k < count, other=0.0)
    size = tl.where(k < count, tl.abs(factor).to(tl.int32, bitcast=True), 0x7FFFFFFF)
    less = size[None, :] < size[:, None]
    tie = (size[None, :] == size[:, None]) & (k[None, :] < k[:, None])
    place = tl.sum((less | tie).to(tl.int32), 1)
    tl.store(order + place, k)
    tl.store(scales + place, factor)
    tl.debug_barrier()  # what others of this program have put
    now = tl.load(scales + k).to(tl.float64)
    before = tl.load(scales + k - 1, mask=k > 0, other=0.0).to(tl.float64)
    quotient = (before / now).to(tl.float32)
    # What has no place among normal numbers would be rounded by more than they are, also upwards.
    tiny = tl.abs(quotient) < 1.1754943508222875e-38
    tl.store(scales + MOST + k, tl.where(tiny, 0.0, quotient))
    tl.debug_barrier()
    return tl.sum(((factor == 0.0) & (k < count)).to(tl.int32))


@triton.jit
def _added(left, right, total):
    """Return ``total + left^T right``, in the accumulator of the total."""
    left = tl.trans(left)
    if _INTERPRETED:  # the interpreter multiplies the bits of bfloat16 numbers
        return tl.dot(left.to(tl.float32), right.to(tl.float32), total, input_precision="ieee")
    return tl.dot(left, right, total)


@triton.jit
def _put(out, total, rows, columns, stride):
    i = tl.arange(0, total.shape[0])
    j = tl.arange(0, total.shape[1])
    mask = (i < rows)[:, None] & (j < columns)[None, :]
    tl.store(out + i[:, None] * stride + j[None, :], total, mask=mask)


def parts(operands: Operands, factors: torch.Tensor) -> torch.Tensor:
    """Return sums over ranges of samples, ``[ranges, rows, columns]``."""
    tiles = int(triton.cdiv(operands.rows, ROWS) * triton.cdiv(operands.columns, COLUMNS))
    each = share(tiles, operands.batch, operands.positions)
    ranges = -(-operands.batch // each)
    found = factors.new_empty(ranges, operands.rows, operands.columns)
    order = factors.new_empty(tiles * ranges, SAMPLES, dtype=torch.int32)
    scales = factors.new_empty(tiles * ranges, 2, SAMPLES)
    read = (
        _described(operands.a, _WIDE),
        _described(operands.a, COLUMNS - _WIDE),
        _described(operands.g, ROWS),
    )
    launch(
        chained_kernel,
        tiles * ranges,
        found,
        *(*read, factors, order, scales, found),
        *(operands.positions, operands.rows, operands.columns, operands.batch, each),
        MOST=SAMPLES,
        ROWS=ROWS,
        WIDE=_WIDE,
        REST=COLUMNS - _WIDE,
        DEPTH=DEPTH,
        warps=8,
        stages=5,
        maxnreg=255,
    )
    return found


def _described(x: torch.Tensor, width: int) -> TensorDescriptor:
    """Return a tensor ``[samples, positions, features]`` whose parts are copied by hardware."""
    _, positions, features = x.shape
    strides = [positions * features, features, 1]
    return TensorDescriptor(x.detach(), list(x.shape), strides, [1, DEPTH, width])
