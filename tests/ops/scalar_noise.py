"""The noise of docs/noise.md a second time: one coordinate at a time, in plain Python integers.

Slow, and on purpose without any code of dpkern: only the 256 counts of each law and the tail's
numbers, which define the laws, are read from ``dpkern.base.laws``. Floats are NumPy scalars.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from dpkern.base.laws import GAUSSIAN, LAPLACE, gaussian_tail

MASK = 0xFFFFFFFF
CELL = 1 << 14
ESCAPE = 255
TAIL_NONCE = 1 << 31


@dataclass(frozen=True)
class Nonce:
    """A keystream: 32 key bytes, two nonce words, rounds."""

    key: bytes
    n0: int
    n1: int
    rounds: int


@lru_cache(maxsize=4096)
def block(nonce: Nonce, counter: int) -> bytes:
    """64 bytes of RFC 8439 section 2.3, with a 64-bit counter in words 12 and 13."""
    start = [*struct.unpack("<4I", b"expand 32-byte k"), *struct.unpack("<8I", nonce.key)]
    start += [counter & MASK, counter >> 32, nonce.n0, nonce.n1]
    x = list(start)

    def quarter(a: int, b: int, c: int, d: int) -> None:
        for p, q, r, left in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            x[p] = (x[p] + x[q]) & MASK
            mixed = x[r] ^ x[p]
            x[r] = (mixed << left | mixed >> (32 - left)) & MASK

    for _ in range(nonce.rounds // 2):
        for column in range(4):
            quarter(*(column + 4 * row for row in range(4)))
        for column in range(4):
            quarter(*((column + row) % 4 + 4 * row for row in range(4)))
    return struct.pack("<16I", *((a + b) & MASK for a, b in zip(x, start, strict=True)))


def words(nonce: Nonce, counter: int) -> tuple[int, ...]:
    return struct.unpack("<16I", block(nonce, counter))


def alias(counts: Sequence[int]) -> list[tuple[int, int]]:
    """``(threshold, alias)`` of each column, by the queues of Walker's method."""
    rest = list(counts)
    table = [(0, column) for column in range(256)]
    poor = deque(c for c in range(256) if rest[c] < 1 << 16)
    rich = deque(c for c in range(256) if rest[c] >= 1 << 16)
    while poor:
        column = poor.popleft()
        table[column] = (rest[column], rich[0])
        rest[rich[0]] -= (1 << 16) - rest[column]
        if rest[rich[0]] < 1 << 16:
            poor.append(rich.popleft())
    return table


TABLES = {law.name: alias(law.counts) for law in (GAUSSIAN, LAPLACE)}
TAIL = gaussian_tail()


def look_up(law: str, column: int, threshold: int) -> int:
    limit, other = TABLES[law][column]
    return column if threshold < limit else other


def tail_magnitude(law: str, tail: Sequence[int]) -> int:
    """The magnitude of an escape from the words of its own block."""
    if law == "gaussian":
        r = sum(word << (32 * i) for i, word in enumerate(tail[:4]))
        return ESCAPE + sum(r < bound for bound in TAIL)
    base = ESCAPE
    for word in tail:
        k = look_up(law, word >> 16 & 0xFF, word & 0xFFFF)
        if k != ESCAPE:
            return base + k
        base += ESCAPE
    return base


def draw(nonce: Nonce, law: str, position: int) -> tuple[int, int]:
    """``(X, signed magnitude K)`` at one position."""
    tile, j = divmod(position, 512)
    group, b, lane = j // 64, j % 64 // 16, j % 16
    w = []
    for row in range(6 * group, 6 * group + 6):
        w.append(words(nonce, 48 * tile + 16 * (row // 16) + lane)[row % 16])
    shift = 16 * (b % 2)
    threshold, bits = w[b // 2] >> shift & 0xFFFF, w[2 + b // 2] >> shift & 0xFFFF
    k = look_up(law, w[4] >> 8 * b & 0xFF, threshold)
    if k == ESCAPE:
        k = tail_magnitude(law, words(replace(nonce, n0=nonce.n0 ^ TAIL_NONCE), position))
    signed = -1 - k if bits >> 15 else k
    offset = 64 * (w[5] >> 8 * b & 0xFF) + 32 if law == "gaussian" else CELL // 2
    return signed * CELL + (bits & 0x3FFF) + offset, signed


def rounding_bits(nonce: Nonce, position: int) -> int:
    """The 16 bits that round a float sum."""
    tile, j = divmod(position, 512)
    word = words(nonce, 16 * tile + j % 16)[j // 32]
    return word >> 16 * (j // 16 % 2) & 0xFFFF


def release_integer(nonce: Nonce, law: str, position: int, v: int) -> int:
    return (v + draw(nonce, law, position)[0]) // CELL


def release_float(
    nonce: Nonce,
    rounding: Nonce,
    law: str,
    position: int,
    x: np.floating,
    scale: float,
) -> np.floating:
    """``y g`` in x's type: ``fl(x / u)`` rounded with 16 bits, noised exactly, floored."""
    kind = type(x)
    exact = 2.0**20 / scale
    per_unit = kind(exact)
    if float(per_unit) > exact:
        per_unit = np.nextafter(per_unit, kind(0))
    with np.errstate(over="ignore", invalid="ignore"):
        units = float(x * per_unit)
    if not math.isfinite(units):
        units = 0.0
    v = math.floor(units)
    fraction = math.floor((units - v) * 65536)
    v += fraction + rounding_bits(rounding, position) >= 65536
    y = release_integer(nonce, law, position, v)
    with np.errstate(over="ignore"):
        return kind(y) * kind(scale / 64)
