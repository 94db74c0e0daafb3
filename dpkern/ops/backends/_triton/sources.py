"""Draws in registers: by the law itself, or read from a noise source's table where they are needed.

As in ``lattice``, an element is one lane of one tile and has 32 coordinates. A cumulative table is
read as ``csrc/core/cdt.h`` says: a cipher block serves eight of them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ....base.rng import Stream
from ... import _cdt
from ..._draws import CdtDraws, Draws, SampleReads
from .. import _ahead
from . import chacha, lattice
from .launch import INTERPRETED

GUIDE, EDGE_BITS = tl.constexpr(_cdt.GUIDE), tl.constexpr(_cdt.EDGE_BITS)
EDGES = tl.constexpr((1 << _cdt.EDGE_BITS) - 1)
MANY = tl.constexpr(0x7FFFFFFF)
"""All bits of a guide's entry but the one that says that its bucket has several boundaries."""
INLINE, SAMPLES, BOUNDARIES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Tables of a kernel: the law's, ready-made samples, cumulative probabilities."""
READ = ("entries", "start", "shift")
"""The numbers by which a table is read: its samples or boundaries, where position 0 reads."""

BLOCK = (1 << 16) if INTERPRETED else 1024
"""Values of a program that reads memory only."""


@triton.jit
def _samples(table, entries, start, shift, tile, lane):
    """Read round and round: 16 coordinates further is 16 entries further."""
    at = (start + tile * lattice.TILE + lane) % entries
    step = lattice.LANES % entries
    x = ()
    for _ in tl.static_range(32):
        x += (tl.load(table + at).to(tl.int32) << shift,)
        at += step
        at = tl.where(at < entries, at, at - entries)
    return x


@triton.jit
def _word(words, at, mask):
    return tl.load(words + at, mask=mask, other=0).to(tl.uint32, bitcast=True)


@triton.jit
def _search(words, count, stream, position, head, searched):
    """Return k where ``searched``, whatever the guide says of the bucket."""
    entry = _word(words, (head >> EDGE_BITS).to(tl.int64), searched)
    k = ((entry & MANY) >> EDGE_BITS).to(tl.int64)
    heads = words + GUIDE
    tails = heads + count
    below = searched & (k < count)
    below = below & (_word(heads, k, below) < head)
    while tl.max(below.to(tl.int32)) != 0:
        k += below.to(tl.int64)
        below = below & (k < count)
        below = below & (_word(heads, k, below) < head)
    b = chacha.blocks(stream, position, True)
    tied = searched & (k < count)
    while tl.max(tied.to(tl.int32)) != 0:
        tied = tied & (_word(heads, k, tied) == head)
        t0, t1, t2 = (
            _word(tails, 3 * k, tied),
            _word(tails, 3 * k + 1, tied),
            _word(tails, 3 * k + 2, tied),
        )
        above = t0 > b[0]
        above = (t1 > b[1]) | ((t1 == b[1]) & above)
        above = (t2 > b[2]) | ((t2 == b[2]) & above)
        tied = tied & (above == 0)
        k += tied.to(tl.int64)
        tied = tied & (k < count)
    return k.to(tl.uint32)


@triton.jit
def _value(magnitude, own, LAW: tl.constexpr):
    """Return X of a magnitude and a draw's first word."""
    negative = (own << 16).to(tl.int32, bitcast=True) >> 31  # all bits, or none
    if LAW == lattice.GAUSSIAN:
        offset = (((own >> 16) & 0xFF) << 6) + 32
    else:
        offset = 1 << 13
    cell = (magnitude.to(tl.int32) ^ negative) << lattice.FINE_BITS
    return cell + ((own & 0x3FFF) + offset).to(tl.int32)


@triton.jit
def _eight(words, count, stream, tile, lane, GROUP: tl.constexpr, LAW: tl.constexpr):
    """Return X at the eight coordinates ``128 GROUP + 16 k + lane``, of one cipher block."""
    w = chacha.blocks(stream, tile * 64 + lattice.LANES * GROUP + lane)
    magnitudes = ()
    undecided = tl.zeros(lane.shape, tl.uint32)  # bit k: coordinate k
    for k in tl.static_range(8):
        head = w[2 * k + 1]
        entry = tl.load(words + (head >> EDGE_BITS).to(tl.int32)).to(tl.uint32, bitcast=True)
        low, edge = head & EDGES, entry & EDGES
        beyond = (low > edge).to(tl.uint32)
        magnitudes += (((entry & MANY) >> EDGE_BITS) + beyond,)  # type: ignore[assignment]
        undecided |= tl.where((low == edge) | (entry > MANY), 1 << k, 0).to(tl.uint32)
    # One of each block at a time: as rare as two boundaries within a millionth of all words.
    while tl.max(undecided) != 0:
        lowest = undecided & (~undecided + 1)
        head, place = tl.zeros(lane.shape, tl.uint32), tl.zeros(lane.shape, tl.int32)
        for k in tl.static_range(8):
            head = tl.where(lowest == (1 << k), w[2 * k + 1], head)
            place = tl.where(lowest == (1 << k), k, place)
        position = tile * lattice.TILE + 128 * GROUP + 16 * place + lane
        found = _search(words, count, stream, position, head, lowest != 0)
        moved = ()
        for k in tl.static_range(8):
            moved += (tl.where(lowest == (1 << k), found, magnitudes[k]),)  # type: ignore[assignment]
        magnitudes = moved
        undecided ^= lowest
    x = ()
    for k in tl.static_range(8):
        x += (_value(magnitudes[k], w[2 * k], LAW),)  # type: ignore[assignment]
    return x


@triton.jit
def draws(
    stream, table, entries, start, shift, tile, lane, SOURCE: tl.constexpr, LAW: tl.constexpr
):
    """Return X at the 32 coordinates of these lanes (absolute tile numbers), int32."""
    if SOURCE == SAMPLES:
        return _samples(table, entries, start, shift, tile, lane)
    elif SOURCE == BOUNDARIES:
        return (
            _eight(table, entries, stream, tile, lane, 0, LAW)
            + _eight(table, entries, stream, tile, lane, 1, LAW)
            + _eight(table, entries, stream, tile, lane, 2, LAW)
            + _eight(table, entries, stream, tile, lane, 3, LAW)
        )
    else:
        return lattice.draws(stream, table, tile, lane, LAW)


def drawn(
    draws: Draws | None, stream: Stream | None, distribution: str, device: torch.device
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a kernel's table, stream and numbers of its draws, and its constants for them.

    Draws that are in memory already are read by other kernels.
    """
    source, of, read = INLINE, stream, [0, 0, 0]
    if draws is None:
        table = lattice.tables(distribution, device)
    elif isinstance(draws, SampleReads):
        source, of, distribution = SAMPLES, None, "gaussian"  # the table knows no law
        table, read = draws.values.to(device), [*_ahead.reads(draws, 0).values()]
    else:
        assert isinstance(draws, CdtDraws)
        of, distribution, boundaries = _ahead.look_ups(draws)
        source, table, read = BOUNDARIES, draws.values.to(device), [boundaries, 0, 0]
    constants = {"SOURCE": source, "LAW": lattice.LAW_CODES[distribution]}
    return (table, *chacha.arguments(of), *read), constants
