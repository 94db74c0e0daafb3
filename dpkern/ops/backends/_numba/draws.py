"""The integer noise laws and what they release (csrc/core/lattice.h, docs/noise.md)."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from ....base.laws import COLUMNS, ESCAPE, FINE_BITS, LAPLACE_RESTARTS, LAWS, gaussian_tail
from .chacha import BLOCK_WORDS, LANES, N0, blocks, blocks_from
from .compile import Array, Number, inlined, inner

TILE = 512
TAIL_DOMAIN = np.uint32(1 << 31)
_FINE_MASK = (1 << FINE_BITS) - 1
_MIDDLE = 1 << (FINE_BITS - 1)


@cache
def law_of(distribution: str) -> tuple[Array, Array]:
    """Return the alias table and the tail's bounds, four words each; none if the law restarts."""
    law = LAWS[distribution]
    assert len(law.table) == COLUMNS
    numbers = gaussian_tail() if law.uses_second_uniform else ()
    bounds = [number >> (32 * word) & 0xFFFFFFFF for number in numbers for word in range(4)]
    return np.array(law.table, np.uint32), np.array(bounds, np.uint32)


@inner
def room() -> Any:
    """Allocate what one thread makes tiles in: counters, states, rows of a tile, escapes."""
    return (
        np.empty(LANES, np.int64),
        np.empty(BLOCK_WORDS, np.uint32),
        np.empty(3 * BLOCK_WORDS, np.uint32),
        np.empty(LANES, np.int64),
        np.empty(BLOCK_WORDS, np.uint32),
    )


@inner
def gaussian_magnitude(bounds: Array, block: Array, i: int) -> Number:
    """Return ``255 + #{t : R < N_t}``, R the first 128 bits of lane i's block: N is decreasing."""
    low, high = 0, len(bounds) // 4
    while low < high:
        middle = (low + high) // 2
        below = False
        for word in (3, 2, 1, 0):
            if block[16 * word + i] != bounds[4 * middle + word]:
                below = block[16 * word + i] < bounds[4 * middle + word]
                break
        if below:
            low = middle + 1
        else:
            high = middle
    return ESCAPE + low


@inner
def laplace_magnitude(table: Array, block: Array, i: int) -> Number:
    """Return a magnitude of the law without memory: each escape restarts it 255 further out."""
    base = ESCAPE
    for restart in range(LAPLACE_RESTARTS):
        word = block[16 * restart + i]
        entry = table[(word >> 16) & 0xFF]
        k = (word >> 16) & 0xFF if (word & 0xFFFF) < (entry & 0xFFFF) else entry >> 16
        if k != ESCAPE:
            return base + np.int64(k)
        base += ESCAPE
    return base


@inner
def extend_escapes(stream: Array, law: Any, tile: Number, work: Any, x: Array) -> None:
    """Replace the magnitudes 255 of a tile by the tail's, sixteen at a time."""
    table, bounds = law
    counters, start, _, escaped, block = work
    n0 = np.uint32(stream[N0] ^ TAIL_DOMAIN)
    found = 0
    for j in range(TILE):
        if x[j] == ESCAPE:
            escaped[found] = j
            found += 1
        if found == LANES or (found > 0 and j == TILE - 1):
            for i in range(LANES):
                counters[i] = tile * TILE + escaped[min(i, found - 1)]
            blocks(stream, n0, counters, start, block)
            for i in range(found):
                if len(bounds) > 0:
                    x[escaped[i]] = gaussian_magnitude(bounds, block, i)
                else:
                    x[escaped[i]] = laplace_magnitude(table, block, i)
            found = 0


@inner
def law_tile(stream: Array, law: Any, tile: Number, work: Any, x: Array) -> None:
    """Make the tile's 512 draws, six rows of lanes for 64 of them; ``x`` holds magnitudes first."""
    table, bounds = law
    counters, start, rows, _, _ = work
    for group in range(3):
        part = rows[BLOCK_WORDS * group : BLOCK_WORDS * (group + 1)]
        blocks_from(stream, 48 * tile + LANES * group, counters, start, part)
    escapes = 0
    for at in range(0, TILE, 64):
        w = rows[at // 64 * 96 : at // 64 * 96 + 96]
        for b in range(4):
            for i in range(LANES):
                threshold = (w[16 * (b >> 1) + i] >> np.uint32(16 * (b & 1))) & 0xFFFF
                column = (w[64 + i] >> np.uint32(8 * b)) & 0xFF
                entry = table[column]
                magnitude = column if threshold < (entry & 0xFFFF) else entry >> 16
                escapes += 1 if magnitude == ESCAPE else 0
                x[at + 16 * b + i] = magnitude
    if escapes > 0:
        extend_escapes(stream, law, tile, work, x)
    assemble(rows, len(counters), len(bounds) > 0, x)


@inner
def assemble(rows: Array, lanes: int, second_uniform: bool, x: Array) -> None:
    """Make ``X = K 2^14 + U1 + offset`` from the magnitudes in ``x``.

    Everything is int32: LLVM vectorizes it if it does not know the number of lanes. Otherwise it
    unrolls the loop.
    """
    for at in range(0, TILE, 64):
        first = at // 64 * 96
        for b in range(4):
            word, half = first + 32 + 16 * (b >> 1), np.uint32(16 * (b & 1))
            for i in range(lanes):
                bits = np.int32((rows[word + i] >> half) & np.uint32(0xFFFF))
                second = np.int32((rows[first + 80 + i] >> np.uint32(8 * b)) & np.uint32(0xFF))
                offset = np.int32(64 * second + 32) if second_uniform else np.int32(_MIDDLE)
                magnitude = x[at + 16 * b + i]
                k = magnitude if bits < 0x8000 else np.int32(-1 - magnitude)
                fine = np.int32((bits & _FINE_MASK) + offset)
                x[at + 16 * b + i] = np.int32(k << FINE_BITS) + fine


@inner
def rounding_tile(stream: Array, tile: Number, work: Any, bits: Array) -> None:
    """Make 16 bits per coordinate: lane j mod 16, half j div 16 (low first) of its block."""
    counters, start, rows, _, _ = work
    words = rows[:BLOCK_WORDS]
    blocks_from(stream, LANES * tile, counters, start, words)
    lanes = len(counters)  # as in `assemble`
    for half in range(TILE // LANES):
        for i in range(lanes):
            word = words[16 * (half >> 1) + i]
            bits[16 * half + i] = (word >> np.uint32(16 * (half & 1))) & np.uint32(0xFFFF)


@inlined
def release_integer(v: Number, x: Number) -> Number:
    """Return ``floor((v + X) / 2^14)`` without overflow: v's integer part moves past the carry."""
    return (v >> FINE_BITS) + (((v & _FINE_MASK) + x) >> FINE_BITS)


@inlined
def release_float(units: Number, bits: Number, x: Number, number: Any) -> Number:
    """Round ``v / u = units`` stochastically, then release; ``number`` is the float type."""
    below = np.floor(units)
    fraction = np.int32((units - below) * number(65536))
    carry = 1 if fraction + bits >= 65536 else 0
    cells = np.floor(below * number(1 / (1 << FINE_BITS)))
    low = np.int32(below - cells * number(1 << FINE_BITS)) + carry
    return cells + number((low + x) >> FINE_BITS)
