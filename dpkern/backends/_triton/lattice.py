"""The integer noise laws (``docs/noise.md``, ``csrc/core/lattice.h``) on tiles of 512 coordinates.

An element of the first dimension is one lane of one tile. Its three cipher blocks are 48 words,
eight groups of six; a group makes four coordinates. So a lane has 32, the k-th of which stands at
``16 k + lane`` in its tile, and everything about coordinates is ``[lanes, 32]``.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from ...laws import LAWS, gaussian_tail
from .chacha import blocks, columns8, columns16, stack2, stack4

GAUSSIAN = tl.constexpr(0)
LAPLACE = tl.constexpr(1)
LAW_CODES = {name: code for code, name in enumerate(LAWS)}
TAIL_SIZE = tl.constexpr(len(gaussian_tail()))

LANES = tl.constexpr(16)
TILE = tl.constexpr(512)
FINE_BITS = tl.constexpr(14)
ESCAPE = tl.constexpr(255)


@cache
def tables(distribution: str, device: torch.device) -> torch.Tensor:
    """On the device, int32: the alias table's 256 entries, then the Gaussian tail's bounds of four
    words each, lowest first."""
    words = [*LAWS[distribution].table]
    for bound in gaussian_tail():
        words += [bound >> (32 * i) & 0xFFFFFFFF for i in range(4)]
    return torch.tensor(words, dtype=torch.int64).to(torch.int32).to(device)


@triton.jit
def lanes_of_program(TILES: tl.constexpr):
    """This program's tiles, counted from the first of all, and their lanes: ``[16 TILES]``."""
    lanes = tl.arange(0, LANES * TILES)
    return tl.program_id(0).to(tl.int64) * TILES + lanes // LANES, lanes % LANES


@triton.jit
def indices(tile, lane, skip):
    """Where a lane's coordinates stand in a tensor whose element 0 is the ``skip``-th coordinate of
    tile 0; below 0 before it."""
    k = tl.arange(0, 32)[None, :]
    return (tile * TILE + lane - skip)[:, None] + LANES * k


@triton.jit
def _entry(table, column):
    return tl.load(table + column.to(tl.int32)).to(tl.uint32, bitcast=True)


@triton.jit
def _look_up(table, column, threshold):
    """Walker's alias method: the column or its alias."""
    entry = _entry(table, column)
    return tl.where(threshold < (entry & 0xFFFF), column, entry >> 16)


@triton.jit
def _coordinate(
    threshold,
    column,
    uniform,
    second,
    table,
    LAW: tl.constexpr,
):
    """X and whether its magnitude is the escape, from 16, 8, 16 and 8 random bits."""
    magnitude = _look_up(table, column, threshold)
    negative = (uniform << 16).to(tl.int32, bitcast=True) >> 31  # all bits, or none
    if LAW == GAUSSIAN:
        offset = (second << 6) + 32
    else:
        offset = tl.full(second.shape, 1 << 13, tl.uint32)
    cell = (magnitude.to(tl.int32) ^ negative) << FINE_BITS
    return cell + ((uniform & 0x3FFF) + offset).to(tl.int32), (magnitude == ESCAPE).to(tl.int32)


@triton.jit
def _below(a0, a1, a2, a3, b0, b1, b2, b3):
    """Whether the 128-bit number a is below b, words from the lowest."""
    less = a0 < b0
    less = (a1 < b1) | ((a1 == b1) & less)
    less = (a2 < b2) | ((a2 == b2) & less)
    return (a3 < b3) | ((a3 == b3) & less)


@triton.jit
def _gaussian_beyond(table, b0, b1, b2, b3):
    """``#{t : R < N_t}`` with R the block's first 128 bits: N is decreasing."""
    low = tl.zeros_like(b0).to(tl.int32)
    high = low + TAIL_SIZE
    for _ in range(10):  # 2^10 > TAIL_SIZE
        middle = (low + high) // 2
        open_ = low < high
        at = 256 + 4 * tl.minimum(middle, TAIL_SIZE - 1)
        n0, n1, n2, n3 = (
            _entry(table, at),
            _entry(table, at + 1),
            _entry(table, at + 2),
            _entry(table, at + 3),
        )
        below = _below(b0, b1, b2, b3, n0, n1, n2, n3)
        low = tl.where(open_ & below, middle + 1, low)
        high = tl.where(open_ & (below == 0), middle, high)
    return low


@triton.jit
def _restart(table, word, total, running):
    """One more try of the Laplace law; it runs on while it escapes."""
    k = _look_up(table, (word >> 16) & 0xFF, word & 0xFFFF).to(tl.int32)
    total = tl.where(running, total + k, total)
    return total, running & (k == ESCAPE)


@triton.jit
def _laplace_beyond(table, b0, b1, b2, b3, b4, b5, b6, b7, b8, b9, b10, b11, b12, b13, b14, b15):
    total = tl.zeros_like(b0).to(tl.int32)
    running = total == 0
    total, running = _restart(table, b0, total, running)
    total, running = _restart(table, b1, total, running)
    total, running = _restart(table, b2, total, running)
    total, running = _restart(table, b3, total, running)
    total, running = _restart(table, b4, total, running)
    total, running = _restart(table, b5, total, running)
    total, running = _restart(table, b6, total, running)
    total, running = _restart(table, b7, total, running)
    total, running = _restart(table, b8, total, running)
    total, running = _restart(table, b9, total, running)
    total, running = _restart(table, b10, total, running)
    total, running = _restart(table, b11, total, running)
    total, running = _restart(table, b12, total, running)
    total, running = _restart(table, b13, total, running)
    total, running = _restart(table, b14, total, running)
    total, running = _restart(table, b15, total, running)
    return total


@triton.jit
def _beyond(stream, table, position, LAW: tl.constexpr):
    """How far beyond the escape the tail's own keystream puts the draws at these positions."""
    block = blocks(stream, position, True)
    if LAW == GAUSSIAN:
        return _gaussian_beyond(table, block[0], block[1], block[2], block[3])
    else:
        return _laplace_beyond(table, *block)


@triton.jit
def draws(stream, table, tile, lane, LAW: tl.constexpr):
    """X at all coordinates of these lanes (absolute tile numbers), int32 ``[lanes, 32]``."""
    counter = tile * 48 + lane
    a = blocks(stream, counter)
    b = blocks(stream, counter + 16)
    c = blocks(stream, counter + 32)
    # Word i of the eight groups: i, 6 + i, ... of the lane's 48.
    w0 = columns8(a[0], a[6], a[12], b[2], b[8], b[14], c[4], c[10])
    w1 = columns8(a[1], a[7], a[13], b[3], b[9], b[15], c[5], c[11])
    w2 = columns8(a[2], a[8], a[14], b[4], b[10], c[0], c[6], c[12])
    w3 = columns8(a[3], a[9], a[15], b[5], b[11], c[1], c[7], c[13])
    w4 = columns8(a[4], a[10], b[0], b[6], b[12], c[2], c[8], c[14])
    w5 = columns8(a[5], a[11], b[1], b[7], b[13], c[3], c[9], c[15])
    threshold = stack4(w0 & 0xFFFF, w0 >> 16, w1 & 0xFFFF, w1 >> 16)
    uniform = stack4(w2 & 0xFFFF, w2 >> 16, w3 & 0xFFFF, w3 >> 16)
    column = stack4(w4 & 0xFF, (w4 >> 8) & 0xFF, (w4 >> 16) & 0xFF, w4 >> 24)
    second = stack4(w5 & 0xFF, (w5 >> 8) & 0xFF, (w5 >> 16) & 0xFF, w5 >> 24)
    x, escaped = _coordinate(threshold, column, uniform, second, table, LAW)
    k = tl.arange(0, 32)[None, :]
    # One escape per lane at a time: its magnitude is 255, which the tail moves outward.
    while tl.max(escaped) != 0:
        first = tl.min(tl.where(escaped != 0, k, 32), axis=1)
        position = tile * TILE + LANES * first + lane
        distance = (_beyond(stream, table, position, LAW) << FINE_BITS)[:, None]
        here = k == first[:, None]
        x = tl.where(here, tl.where(x < 0, x - distance, x + distance), x)
        escaped = tl.where(here, 0, escaped)
    return x


@triton.jit
def rounding_bits(stream, tile, lane):
    """16 bits at all coordinates of these lanes, int32 ``[lanes, 32]``: two for each word."""
    words = columns16(blocks(stream, tile * LANES + lane))
    return stack2(words & 0xFFFF, words >> 16).to(tl.int32)


@triton.jit
def release_integers(v, x):
    """``floor((v + X) / 2^14)`` without overflow: the integer part of v moves past the carry."""
    low = (v & 0x3FFF).to(tl.int32)
    return (v >> FINE_BITS) + ((low + x) >> FINE_BITS).to(v.dtype)


@triton.jit
def finite(x):
    """Neither NaN nor infinite."""
    return (x - x) == 0


@triton.jit
def release_floats(units, bits, x):
    """Rounds ``units`` stochastically, then releases: whole numbers in the dtype of ``units``."""
    below = tl.floor(units)
    fraction = ((units - below) * 65536).to(tl.int32)
    carry = (fraction + bits >= 65536).to(tl.int32)
    cells = tl.floor(below * (1.0 / 16384))
    low = (below - cells * 16384).to(tl.int32) + carry
    return cells + ((low + x) >> FINE_BITS).to(units.dtype)
