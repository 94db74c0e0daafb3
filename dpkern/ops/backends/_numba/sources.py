"""Tiles of draws: by the law, or read from a noise source's table (csrc/core/cdt.h)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ....base.laws import FINE_BITS
from ....base.rng import Stream
from ... import _cdt
from ..._draws import CdtDraws, Draws, SampleReads
from .. import _ahead
from .chacha import BLOCK_WORDS, LANES, N0, blocks, blocks_from, words_of
from .compile import Array, Number, entries, inner
from .draws import TAIL_DOMAIN, TILE, law_of, law_tile

INLINE, BOUNDARIES, NARROW, WIDE = range(4)
"""The law itself, a cumulative table, samples of 16 and of 32 bits."""
KIND, ENTRIES, START, SHIFT, TABLE = range(5)
"""The numbers by which a table is read; START: where position 0 reads."""
NO_STREAM = np.zeros(11, np.uint32)
_GUIDE, _EDGE_BITS = _cdt.GUIDE, _cdt.EDGE_BITS
_EDGES = (1 << _EDGE_BITS) - 1
_MANY = 1 << 31
_FINE_MASK = (1 << FINE_BITS) - 1
_MIDDLE = 1 << (FINE_BITS - 1)


@inner
def _samples_tile(table: Array, read: Array, tile: Number, x: Array) -> None:
    count, shift = read[ENTRIES], np.int32(read[SHIFT])
    at = (read[START] + tile * TILE) % count
    for i in range(TILE):
        x[i] = np.int32(table[at]) << shift
        at = at + 1 if at + 1 < count else 0


@inner
def _search(
    words: Array, count: Number, stream: Array, position: Number, head: Number, work: Any
) -> Number:
    """Return k of the draw at ``position``, whatever the guide says of its bucket."""
    counters, start, _, _, block = work
    k = (np.int64(words[head >> _EDGE_BITS]) & (_MANY - 1)) >> _EDGE_BITS
    while k < count and np.int64(words[_GUIDE + k]) < head:
        k += 1
    if k == count or np.int64(words[_GUIDE + k]) != head:
        return k
    for i in range(LANES):
        counters[i] = position
    blocks(stream, np.uint32(stream[N0] ^ TAIL_DOMAIN), counters, start, block)
    while k < count and np.int64(words[_GUIDE + k]) == head:
        above = False
        for word in (2, 1, 0):
            tail = words[_GUIDE + count + 3 * k + word]
            if tail != block[16 * word]:
                above = tail > block[16 * word]
                break
        if above:
            return k
        k += 1
    return k


@inner
def _cdt_tile(
    stream: Array, words: Array, count: Number, second: Any, tile: Number, work: Any, x: Array
) -> None:
    """Make the tile's 512 draws: a cipher block serves eight of one lane."""
    counters, start, rows, _, _ = work
    made = rows[:BLOCK_WORDS]
    for group in range(4):
        blocks_from(stream, 64 * tile + LANES * group, counters, start, made)
        for pair in range(8):
            for i in range(LANES):
                own = np.int64(made[32 * pair + i])
                head = np.int64(made[32 * pair + 16 + i])
                entry = np.int64(words[head >> _EDGE_BITS])
                low, edge = head & _EDGES, entry & _EDGES
                j = 128 * group + 16 * pair + i
                if low == edge or entry >= _MANY:
                    k = _search(words, count, stream, tile * TILE + j, head, work)
                else:
                    k = (entry >> _EDGE_BITS) + (1 if low > edge else 0)
                offset = 64 * ((own >> 16) & 0xFF) + 32 if second else _MIDDLE
                cell = k if own & 0x8000 == 0 else -1 - k
                x[j] = (cell << FINE_BITS) + (own & _FINE_MASK) + offset


@inner
def draw_tile(stream: Array, source: Any, tile: Number, work: Any, x: Array) -> None:
    """Make or read the tile's 512 draws."""
    table, bounds, read = source
    kind = read[KIND]
    if kind == INLINE:
        law_tile(stream, (table, bounds), tile, work, x)
    elif kind == BOUNDARIES:
        _cdt_tile(stream, table, read[ENTRIES], len(bounds) > 0, tile, work, x)
    elif kind == NARROW:
        _samples_tile(entries(read[TABLE], read[ENTRIES], np.empty(0, np.int16)), read, tile, x)
    else:
        _samples_tile(entries(read[TABLE], read[ENTRIES], np.empty(0, np.int32)), read, tile, x)


def source_of(draws: Draws | None, stream: Stream | None, distribution: str) -> tuple[Array, Any]:
    """Return the words of a stream, and what ``draw_tile`` makes draws of with it.

    That is a table, a law's bounds and the numbers by which the table is read. A table of samples
    is passed by its address: it must live until the kernel has returned.
    """
    read = dict.fromkeys(range(5), 0)
    if isinstance(draws, SampleReads):
        reads = _ahead.reads(draws, 0)
        read |= {KIND: NARROW if draws.values.dtype is torch.int16 else WIDE}
        read |= {ENTRIES: reads["entries"], START: reads["start"], SHIFT: reads["shift"]}
        read[TABLE], distribution, stream = draws.values.data_ptr(), "gaussian", None
    elif isinstance(draws, CdtDraws):
        stream, distribution, count = _ahead.look_ups(draws)
        read |= {KIND: BOUNDARIES, ENTRIES: count}
    table, bounds = law_of(distribution)
    if isinstance(draws, CdtDraws):
        table = draws.values.numpy().view(np.uint32)
    words = NO_STREAM if stream is None else words_of(stream)
    return words, (table, bounds, np.array([*read.values()], np.int64))
