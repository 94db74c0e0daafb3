"""Norms from Gram matrices, where a program owns a sample of one of several layers.

Tiles of 128 x 128 (``gram.py``) of 197 positions are two fifths full, and load rows of the operands
twice. Here the positions fall into ranges of 128, 64 and 8, and a matrix into the six tiles of
their products, so that each chunk of features is loaded once for all of them:

    first first^T   first second^T    first third^T
                    second second^T   second third^T
                                      third third^T

One matrix fills the registers: both go to memory as they are completed, 512 KB for a program, and
are read again for the sum over all pairs. A batch of 64 samples would leave half of an H200 idle:
layers share a launch. Not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .. import _gram_shares as shares
from . import chained
from .gram_interval import interval, row_lengths
from .launch import INTERPRETED, capability, launch
from .operands import Operands, product
from .precision import CHUNK, first, gram_numbers

LANES = 256
"""Positions of a sample, whose lengths one vector holds."""
SLAB = 16
"""Rows of a tile that are read again at a time."""
WARPS = 8
_ARCH = 9
"""Compute capability from which on rows are copied by hardware; before, the kernel spills."""


def here(operands: Operands) -> bool:
    """Whether this device has the kernel, for these tensors: chunks of features are full."""
    full = operands.columns % CHUNK == 0 and operands.sizes[5] % CHUNK == 0
    if not (full and shares.fits(operands.positions, operands.a.dtype)):
        return False
    aligned = all(x.data_ptr() % 16 == 0 for x in (operands.a, operands.g))
    return aligned and (INTERPRETED or capability(operands.a) >= _ARCH)


@triton.jit
def _chunk(x, sample, t: tl.constexpr, k, POSITIONS: tl.constexpr, DEPTH: tl.constexpr):
    """Load ``[positions, features]``; positions that are none are zeros."""
    return x.load([sample, t, k]).reshape(POSITIONS, DEPTH)


@triton.jit
def _put(matrix, tile, row: tl.constexpr, column: tl.constexpr, stride):
    r = row + tl.arange(0, tile.shape[0])
    s = column + tl.arange(0, tile.shape[1])
    tl.store(matrix + r[:, None] * stride + s[None, :], tile)


@triton.jit
def _put_matrix(
    matrix, stride, x, sample, features,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Store the tiles of ``x x^T`` at their places.

    In an order of products and tiles that leaves no spills: the assembler keeps several products
    before it adds them to their totals.
    """
    LAST: tl.constexpr = FIRST + SECOND
    rr = tl.zeros([FIRST, FIRST], tl.float32)
    rs = tl.zeros([FIRST, SECOND], tl.float32)
    rt = tl.zeros([FIRST, THIRD], tl.float32)
    ss = tl.zeros([SECOND, SECOND], tl.float32)
    st = tl.zeros([SECOND, THIRD], tl.float32)
    tt = tl.zeros([THIRD, THIRD], tl.float32)
    for begin in range(0, features, DEPTH):
        first = _chunk(x[0], sample, 0, begin, FIRST, DEPTH)
        second = _chunk(x[1], sample, FIRST, begin, SECOND, DEPTH)
        third = _chunk(x[2], sample, LAST, begin, THIRD, DEPTH)
        rs += product(first, tl.trans(second), tl.float32, "ieee")
        tt += product(third, tl.trans(third), tl.float32, "ieee")
        rt += product(first, tl.trans(third), tl.float32, "ieee")
        ss += product(second, tl.trans(second), tl.float32, "ieee")
        rr += product(first, tl.trans(first), tl.float32, "ieee")
        st += product(second, tl.trans(third), tl.float32, "ieee")
    _put(matrix, tt, LAST, LAST, stride)
    _put(matrix, rs, 0, FIRST, stride)
    _put(matrix, rt, 0, LAST, stride)
    _put(matrix, ss, FIRST, FIRST, stride)
    _put(matrix, st, FIRST, LAST, stride)
    _put(matrix, rr, 0, 0, stride)


@triton.jit
def _put_lengths(lengths, matrix, positions, numbers, LANES: tl.constexpr):
    """Store the lengths of the rows behind a matrix, in float32 from above, and return them."""
    t = tl.arange(0, LANES)
    live = t < positions
    squares = tl.load(matrix + t * (LANES + 1), mask=live, other=0.0)
    gamma = tl.cast(numbers[0], tl.float64)
    long = row_lengths(squares, live, gamma, tl.cast(numbers[1], tl.float64)) * (1.0 + 2.0**-22)
    tl.store(lengths + t, long.to(tl.float32))
    return long.to(tl.float32).to(tl.float64)


@triton.jit(do_not_specialize=["samples", "lanes"])
def gram_samples_kernel(
    a, g, columns, rows, matrices, lengths, highs, done, positions, samples, lanes, numbers,
    LAYERS: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
    DEPTH: tl.constexpr,
    SLAB: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Write the upper end of a sample's interval, and whether it is tight.

    ``lanes`` is ``LANES``, which the compiler does not know of the second matrix: it would keep the
    first one's addresses in registers until then.
    """
    layer = tl.program_id(0) // samples
    sample = tl.program_id(0) % samples
    program = tl.program_id(0).to(tl.int64)
    matrix_a = matrices + program * 2 * LANES * LANES
    matrix_g = matrix_a + LANES * LANES
    for n in tl.static_range(LAYERS):
        if layer == n:
            _put_matrix(matrix_a, LANES, a[n], sample, columns, FIRST, SECOND, THIRD, DEPTH)
            _put_matrix(matrix_g, lanes, g[n], sample, rows, FIRST, SECOND, THIRD, DEPTH)

    tl.debug_barrier()  # what others of this program have put
    lengths_a = lengths + program * 2 * LANES
    lengths_g = lengths_a + LANES
    columns_a = _put_lengths(lengths_a, matrix_a, positions, numbers, LANES)
    columns_g = _put_lengths(lengths_g, matrix_g, positions, numbers, LANES)
    tl.debug_barrier()
    s = tl.arange(0, LANES)
    range_s = (s >= FIRST).to(tl.int32) + (s >= FIRST + SECOND).to(tl.int32)
    value = tl.zeros([SLAB], tl.float64)
    pairs = tl.zeros([SLAB], tl.float64)
    for begin in range(0, positions, SLAB):
        r = begin + tl.arange(0, SLAB)
        range_r = (r >= FIRST).to(tl.int32) + (r >= FIRST + SECOND).to(tl.int32)
        live = (r < positions)[:, None] & (s < positions)[None, :]
        live &= range_s[None, :] >= range_r[:, None]
        entry = r[:, None] * LANES + s[None, :]
        # Tiles beside the diagonal stand for those below it too.
        twice = tl.where(range_s[None, :] == range_r[:, None], 1.0, 2.0).to(tl.float64)
        u = tl.load(matrix_a + entry, mask=live, other=0.0).to(tl.float64)
        v = tl.load(matrix_g + entry, mask=live, other=0.0).to(tl.float64)
        value += tl.sum(u * v * twice, 1)
        row_a = tl.load(lengths_a + r).to(tl.float64)
        row_g = tl.load(lengths_g + r).to(tl.float64)
        pairs += tl.sum(tl.abs(v) * columns_a[None, :] * twice, 1) * row_a
        pairs += tl.sum(tl.abs(u) * columns_g[None, :] * twice, 1) * row_g
    high, tight = interval(
        tl.sum(value),
        tl.sum(pairs),
        tl.sum(columns_a * columns_g),
        tl.sum(columns_a),
        tl.sum(columns_g),
        positions,
        numbers,
    )
    tl.store(highs + program, high)
    tl.store(done + program, tight)


def grams(layers: Sequence[Operands], highs: torch.Tensor) -> torch.Tensor:
    """Fill ``highs [layers, B, 1]`` with squares from above; int32: which of them are tight.

    All layers have one shape. How many share a launch depends on the batch, a result does not.
    """
    done = torch.empty_like(highs, dtype=torch.int32)
    one = layers[0]
    sizes = one.positions, one.rows, one.columns
    numbers = gram_numbers(first(one.a.dtype), *sizes, CHUNK, chained.possible(one))
    together = shares.together(one.batch)
    for at in range(0, len(layers), together):
        some = slice(at, at + together)
        _launch(layers[some], highs[some], done[some], numbers)
    return done


def _launch(
    layers: Sequence[Operands],
    highs: torch.Tensor,
    done: torch.Tensor,
    numbers: tuple[float, ...],
) -> None:
    """Bound the norms of these layers, whose samples are ``shares.PROGRAMS`` at a time."""
    one = layers[0]
    most = shares.PROGRAMS // len(layers)
    for begin in range(0, one.batch, most):
        some = slice(begin, begin + most)
        high, tight = highs[:, some].contiguous(), done[:, some].contiguous()
        samples = high.shape[1]
        programs = samples * len(layers)
        matrices = highs.new_empty(programs, 2, LANES, LANES, dtype=torch.float32)
        lengths = highs.new_empty(programs, 2, LANES, dtype=torch.float32)
        launch(
            gram_samples_kernel,
            programs,
            one.a,
            tuple(_described(each.a[some]) for each in layers),
            tuple(_described(each.g[some]) for each in layers),
            *(one.columns, one.sizes[5], matrices, lengths, high, tight),
            *(one.positions, samples, LANES, numbers),
            LAYERS=len(layers),
            FIRST=shares.FIRST,
            SECOND=shares.SECOND,
            THIRD=shares.THIRD,
            DEPTH=CHUNK,
            SLAB=SLAB,
            LANES=LANES,
            warps=WARPS,
            fused=True,
            maxnreg=255,
        )
        if high.data_ptr() != highs[:, some].data_ptr():
            highs[:, some], done[:, some] = high, tight


def _described(x: torch.Tensor) -> tuple[TensorDescriptor, ...]:
    """Return a tensor ``[samples, positions, features]`` whose ranges are copied by hardware."""
    _, positions, features = x.shape
    strides = [positions * features, features, 1]
    return tuple(
        TensorDescriptor(x.detach(), list(x.shape), strides, [1, each, CHUNK])
        for each in (shares.FIRST, shares.SECOND, shares.THIRD)
    )
