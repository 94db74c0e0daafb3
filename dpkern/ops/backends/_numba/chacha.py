"""ChaCha, sixteen blocks side by side (csrc/core/chacha.h).

One flat array per state, ``state[16 word + lane]``: LLVM makes vectors of the loops over lanes,
which it does not with two indices.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ....base.rng import Stream
from .compile import Array, Number, inlined, inner, kernel

LANES = 16
BLOCK_WORDS = 16 * LANES
CONSTANTS = np.array([0x61707865, 0x3320646E, 0x79622D32, 0x6B206574], np.uint32)
N0, N1, ROUNDS = 8, 9, 10
"""Their offsets behind the key's eight words."""


def words_of(stream: Stream) -> Array:
    """Return a stream in the form that kernels take."""
    key, n0, n1, rounds = stream.packed()
    return np.array([*np.frombuffer(key, "<u4"), n0, n1, rounds], np.uint32)


@inlined
def rotate_left(x: Number, bits: int) -> Number:
    """Return 32 bits, rotated.

    Every operation on uint32 widens, every conversion takes the low half again.
    """
    return np.uint32((x << np.uint32(bits)) | (x >> np.uint32(32 - bits)))


@inlined
def quarter_round(a: Number, b: Number, c: Number, d: Number) -> Any:
    a = np.uint32(a + b)
    d = rotate_left(np.uint32(d ^ a), 16)
    c = np.uint32(c + d)
    b = rotate_left(np.uint32(b ^ c), 12)
    a = np.uint32(a + b)
    d = rotate_left(np.uint32(d ^ a), 8)
    c = np.uint32(c + d)
    b = rotate_left(np.uint32(b ^ c), 7)
    return a, b, c, d


@inner
def double_round(x: Array) -> None:
    for i in range(LANES):
        x0, x1, x2, x3 = x[i], x[16 + i], x[32 + i], x[48 + i]
        x4, x5, x6, x7 = x[64 + i], x[80 + i], x[96 + i], x[112 + i]
        x8, x9, x10, x11 = x[128 + i], x[144 + i], x[160 + i], x[176 + i]
        x12, x13, x14, x15 = x[192 + i], x[208 + i], x[224 + i], x[240 + i]
        x0, x4, x8, x12 = quarter_round(x0, x4, x8, x12)
        x1, x5, x9, x13 = quarter_round(x1, x5, x9, x13)
        x2, x6, x10, x14 = quarter_round(x2, x6, x10, x14)
        x3, x7, x11, x15 = quarter_round(x3, x7, x11, x15)
        x0, x5, x10, x15 = quarter_round(x0, x5, x10, x15)
        x1, x6, x11, x12 = quarter_round(x1, x6, x11, x12)
        x2, x7, x8, x13 = quarter_round(x2, x7, x8, x13)
        x3, x4, x9, x14 = quarter_round(x3, x4, x9, x14)
        x[i], x[16 + i], x[32 + i], x[48 + i] = x0, x1, x2, x3
        x[64 + i], x[80 + i], x[96 + i], x[112 + i] = x4, x5, x6, x7
        x[128 + i], x[144 + i], x[160 + i], x[176 + i] = x8, x9, x10, x11
        x[192 + i], x[208 + i], x[224 + i], x[240 + i] = x12, x13, x14, x15


@inner
def blocks(stream: Array, n0: Number, counters: Array, start: Array, out: Array) -> None:
    """Fill ``out[16 word + lane]`` with the blocks of 16 counters of 64 bits; ``start`` is room."""
    for i in range(LANES):
        for word in range(4):
            start[16 * word + i] = CONSTANTS[word]
        for word in range(8):
            start[64 + 16 * word + i] = stream[word]
        start[192 + i] = np.uint32(counters[i])
        start[208 + i] = np.uint32(counters[i] >> 32)
        start[224 + i] = n0
        start[240 + i] = stream[N1]
    for i in range(BLOCK_WORDS):
        out[i] = start[i]
    for _ in range(np.int64(stream[ROUNDS]) // 2):
        double_round(out)
    for i in range(BLOCK_WORDS):
        out[i] += start[i]


@inner
def blocks_from(stream: Array, first: Number, counters: Array, start: Array, out: Array) -> None:
    """Compute the sixteen blocks from counter ``first`` on."""
    for i in range(LANES):
        counters[i] = first + i
    blocks(stream, stream[N0], counters, start, out)


@kernel
def keystream(stream: Array, first: int, out: Array, begin: int, end: int) -> None:
    """Fill blocks ``begin .. end - 1`` after block ``first``, words in the order of RFC 8439."""
    counters = np.empty(LANES, np.int64)
    start = np.empty(BLOCK_WORDS, np.uint32)
    rows = np.empty(BLOCK_WORDS, np.uint32)
    for block in range(begin, end, LANES):
        blocks_from(stream, first + block, counters, start, rows)
        for i in range(min(LANES, end - block)):
            for word in range(16):
                out[16 * (block + i) + word] = rows[16 * word + i]
