"""The integer noise distributions (``docs/noise.md``) on tiles of 512 coordinates.

An element of every tensor here is one lane of one tile. Its three cipher blocks are 48 words, eight
groups of six; a group makes four coordinates. So a lane has 32, the k-th of which stands at
``16 k + lane`` in its tile: tuples of 32 tensors. Nothing moves between elements.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from ....base.codes import DISTRIBUTIONS, words
from ....base.laws import LAWS, gaussian_tail
from .chacha import blocks
from .launch import INTERPRETED

GAUSSIAN = tl.constexpr(DISTRIBUTIONS.code("gaussian"))
LAPLACE = tl.constexpr(DISTRIBUTIONS.code("laplace"))
LAW_CODES = words(DISTRIBUTIONS)
TAIL_SIZE = tl.constexpr(len(gaussian_tail()))

LANES = tl.constexpr(16)
TILE = tl.constexpr(512)
FINE_BITS = tl.constexpr(14)
ESCAPE = tl.constexpr(255)


_MOST_TILES = 1024


def tiles_of(position: int, count: int) -> tuple[int, int, int]:
    """Return the first tile, how many coordinates precede these in it, and how many tiles they
    meet.
    """
    first, skip = divmod(position, 512)
    return first, skip, -(-(skip + count) // 512)


def tiles_per_program(tiles: int) -> int:
    """Return how many tiles a program takes.

    The interpreter takes about as long for a thousand tiles as for one.
    """
    return min(_MOST_TILES, triton.next_power_of_2(tiles)) if INTERPRETED else 8


def programs(tiles: int) -> int:
    """Return how many programs share these tiles."""
    return -(-tiles // tiles_per_program(tiles)) if tiles else 0


@cache
def tables(distribution: str, device: torch.device) -> torch.Tensor:
    """Return the tables on the device, int32.

    These are the alias table's 256 entries, then the Gaussian tail's bounds of four words each,
    lowest first.
    """
    words = [*LAWS[distribution].table]
    for bound in gaussian_tail():
        words += [bound >> (32 * i) & 0xFFFFFFFF for i in range(4)]
    return torch.tensor(words, dtype=torch.int64, device="cpu").to(torch.int32).to(device)


@triton.jit
def lanes_of_program(TILES: tl.constexpr):
    """Return this program's tiles, counted from the first, and their lanes ``[16 TILES]``."""
    lanes = tl.arange(0, LANES * TILES)
    return tl.program_id(0).to(tl.int64) * TILES + lanes // LANES, lanes % LANES


@triton.jit
def first_index(tile, lane, skip):
    """Return the index of a lane's coordinate 0 in a tensor; coordinate k is 16 k further.

    Element 0 of the tensor is the ``skip``-th coordinate of tile 0 (below 0: before it).
    """
    return tile * TILE + lane - skip


@triton.jit
def _entry(table, column):
    return tl.load(table + column.to(tl.int32)).to(tl.uint32, bitcast=True)


@triton.jit
def _look_up(table, column, threshold):
    """Look up the column or its alias by the low 8 and 16 bits: Walker's alias method."""
    column = column & 0xFF
    entry = tl.load(table + column.to(tl.int32)).to(tl.uint32, bitcast=True)
    return tl.where((threshold & 0xFFFF) < (entry & 0xFFFF), column, entry >> 16)


@triton.jit
def _coordinate(w, k: tl.constexpr, table, LAW: tl.constexpr):
    """Return X of a lane's coordinate k from its 48 words, and bit k of two masks.

    The masks say whether its magnitude is the escape and whether it is negative.
    """
    b: tl.constexpr = k % 4
    i: tl.constexpr = 6 * (k // 4)
    half: tl.constexpr = 16 * (k % 2)
    threshold = w[i + b // 2] >> half
    uniform = w[i + 2 + b // 2] >> half
    magnitude = _look_up(table, w[i + 4] >> (8 * b), threshold)
    negative = (uniform << 16).to(tl.int32, bitcast=True) >> 31  # all bits, or none
    if LAW == GAUSSIAN:
        offset = (((w[i + 5] >> (8 * b)) & 0xFF) << 6) + 32
    else:
        offset = 1 << 13
    cell = (magnitude.to(tl.int32) ^ negative) << FINE_BITS
    x = cell + ((uniform & 0x3FFF) + offset).to(tl.int32)
    escaped = tl.where(magnitude == ESCAPE, 1 << k, 0).to(tl.uint32)
    return x, escaped, negative.to(tl.uint32, bitcast=True) & (1 << k)


@triton.jit
def _below(a0, a1, a2, a3, b0, b1, b2, b3):
    """Return whether the 128-bit number a is below b, words from the lowest."""
    less = a0 < b0
    less = (a1 < b1) | ((a1 == b1) & less)
    less = (a2 < b2) | ((a2 == b2) & less)
    return (a3 < b3) | ((a3 == b3) & less)


@triton.jit
def _gaussian_beyond(table, b0, b1, b2, b3):
    """Return ``#{t : R < N_t}`` with R the block's first 128 bits: N is decreasing."""
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
    """Try the Laplace law once more; it runs on while it escapes."""
    k = _look_up(table, word >> 16, word).to(tl.int32)
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
    """Return how far beyond the escape the tail's own keystream puts these draws."""
    block = blocks(stream, position, True)
    if LAW == GAUSSIAN:
        return _gaussian_beyond(table, block[0], block[1], block[2], block[3])
    else:
        return _laplace_beyond(table, *block)


@triton.jit
def draws(stream, table, tile, lane, LAW: tl.constexpr):
    """Return X at the 32 coordinates of these lanes (absolute tile numbers), int32."""
    counter = tile * 48 + lane
    w = blocks(stream, counter) + blocks(stream, counter + 16) + blocks(stream, counter + 32)
    x = ()
    escapes = tl.zeros(lane.shape, tl.uint32)  # bit k: coordinate k
    negatives = tl.zeros(lane.shape, tl.uint32)
    for k in tl.static_range(32):
        one, escaped, negative = _coordinate(w, k, table, LAW)
        x += (one,)  # type: ignore[assignment]
        escapes |= escaped
        negatives |= negative
    # One escape per lane at a time: its magnitude is 255, which the tail moves outward.
    while tl.max(escapes) != 0:
        lowest = escapes & (~escapes + 1)
        place = (lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127  # of the only bit
        position = tile * TILE + LANES * place + lane
        distance = _beyond(stream, table, position, LAW) << FINE_BITS
        distance = tl.where((negatives & lowest) != 0, -distance, distance)
        moved = ()
        for j in tl.static_range(32):
            moved += (x[j] + tl.where(lowest == (1 << j), distance, 0),)  # type: ignore[assignment]
        x = moved
        escapes ^= lowest
    return x


@triton.jit
def rounding_bits(stream, tile, lane):
    """Return 16 bits at the 32 coordinates of these lanes, int32: two for each word."""
    w = blocks(stream, tile * LANES + lane)
    bits = ()
    for k in tl.static_range(32):
        bits += (((w[k // 2] >> (16 * (k % 2))) & 0xFFFF).to(tl.int32),)
    return bits


@triton.jit
def _joined(x, FIRST: tl.constexpr, HALF: tl.constexpr):
    joined = ()
    for k in tl.static_range(HALF):
        joined += (tl.join(x[FIRST + k], x[FIRST + k + HALF]),)  # type: ignore[assignment]
    return joined


@triton.jit
def side_by_side(x, FIRST: tl.constexpr):
    """Return the tensors of 8 of a lane's coordinates as one, ``[lanes, 8]``.

    Nothing moves between threads, and the compiler, which for every access looks at all others,
    sees one access where there were 8.
    """
    whole = _joined(_joined(_joined(x, FIRST, 4), 0, 2), 0, 1)
    return tl.reshape(whole[0], (x[0].shape[0], 8))


@triton.jit
def release_integers(v, x):
    """Return ``floor((v + X) / 2^14)`` without overflow: v's integer part moves past the carry."""
    low = (v & 0x3FFF).to(tl.int32)
    return (v >> FINE_BITS) + ((low + x) >> FINE_BITS).to(v.dtype)


@triton.jit
def finite(x):
    """Return whether numbers are neither NaN nor infinite."""
    return (x - x) == 0


@triton.jit
def release_floats(units, bits, x):
    """Round ``units`` stochastically, then release whole numbers in the dtype of ``units``.

    On a device ``floor`` takes subnormal numbers for 0. Below 0 they would give -1 and a fraction
    that rounds to 1, always carried: 0 as well.
    """
    below = tl.floor(units)
    fraction = ((units - below) * 65536).to(tl.int32)
    carry = (fraction + bits >= 65536).to(tl.int32)
    cells = tl.floor(below * (1.0 / 16384))
    low = (below - cells * 16384).to(tl.int32) + carry
    return cells + ((low + x) >> FINE_BITS).to(units.dtype)
