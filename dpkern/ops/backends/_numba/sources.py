"""Draws of noise sources, written to memory (csrc/core/cdt.h, csrc/cpu/noise_sources.cpp)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.autograd.graph import increment_version

from ....base.laws import FINE_BITS, LAWS
from ... import _cdt
from ..._draws import CdtDraws, Draws, SampleReads
from .. import _ahead
from .chacha import BLOCK_WORDS, LANES, N0, blocks, blocks_from, words_of
from .compile import Array, Number, inner, kernel
from .draws import TAIL_DOMAIN, TILE, room
from .parallel import in_parts, team_of

GRAIN = 16 * TILE  # coordinates worth a thread
_GUIDE, _EDGE_BITS = _cdt.GUIDE, _cdt.EDGE_BITS
_EDGES = (1 << _EDGE_BITS) - 1
_MANY = 1 << 31
_FINE_MASK = (1 << FINE_BITS) - 1
_MIDDLE = 1 << (FINE_BITS - 1)


@kernel
def _samples(table: Array, start: int, shift: int, out: Array, begin: int, end: int) -> None:
    at = (start + begin) % len(table)
    for i in range(begin, end):
        out[i] = np.int32(table[at]) << np.int32(shift)
        at = at + 1 if at + 1 < len(table) else 0


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


@kernel
def _look_ups(
    stream: Array, words: Array, second: Any, first: int, out: Array, begin: int, end: int
) -> None:
    work, x = room(), np.empty(TILE, np.int32)
    count = (len(words) - _GUIDE) // 4
    at = begin
    while at < end:
        tile, offset = (first + at) // TILE, (first + at) % TILE
        some = min(TILE - offset, end - at)
        _cdt_tile(stream, words, count, second, tile, work, x)
        out[at : at + some] = x[offset : offset + some]
        at += some


def source_draws(
    draws: Draws,
    *,
    position: int,
    count: int,
    device: torch.device | str = "cpu",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    if draws.in_memory:
        values = draws.at(position, count)
        return values.to(device, copy=True) if out is None else out.copy_(values)
    made = torch.empty(count, dtype=torch.int32, device="cpu") if out is None else out
    target, team = made.numpy(), team_of(count, GRAIN)
    if isinstance(draws, SampleReads):
        table, read = draws.values.numpy(), _ahead.reads(draws, position)
        start, shift = read["start"], read["shift"]
        in_parts(count, team, lambda _, *part: _samples(table, start, shift, target, *part))
    else:
        assert isinstance(draws, CdtDraws)
        stream, law, _ = _ahead.look_ups(draws)
        given = words_of(stream), draws.values.numpy().view(np.uint32)
        second = LAWS[law].uses_second_uniform
        in_parts(count, team, lambda _, *part: _look_ups(*given, second, position, target, *part))
    increment_version(made)
    return made.to(device)


def _refuse(draws: Draws, **_: Any) -> str | None:
    place = draws.values.device
    return None if place.type == "cpu" else f"runs on the CPU, got draws on {place}"


KERNELS: tuple[tuple[str, Any, Any], ...] = (("noise.source_draws", source_draws, _refuse),)
"""``(op, run, refuse)``."""
