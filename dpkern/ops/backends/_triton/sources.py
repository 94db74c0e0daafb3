"""Draws of noise sources, written to memory: tables of samples, and cumulative tables.

A cumulative table is read as ``csrc/core/cdt.h`` says: a cipher block serves eight coordinates.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ... import _cdt
from ..._draws import CdtDraws, Draws, SampleReads
from .. import _ahead
from . import chacha, lattice
from .launch import INTERPRETED, at, launch

GUIDE, EDGE_BITS = tl.constexpr(_cdt.GUIDE), tl.constexpr(_cdt.EDGE_BITS)
EDGES = tl.constexpr((1 << _cdt.EDGE_BITS) - 1)
MANY = tl.constexpr(0x7FFFFFFF)
"""All bits of a guide's entry but the one that says that its bucket has several boundaries."""

BLOCK = (1 << 16) if INTERPRETED else 1024
"""Values of a program that reads memory only."""


@triton.jit(do_not_specialize=["entries", "start", "shift", "n"])
def samples_kernel(
    table,
    out,
    entries: tl.int64,
    start: tl.int64,
    shift: tl.int32,
    n: tl.int64,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < n
    x = tl.load(table + (start + index) % entries, mask=inside, other=0).to(tl.int32)
    tl.store(out + index, x << shift, mask=inside)


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


@triton.jit(do_not_specialize=["count", "first", "skip", "n", *chacha.STREAM])
def cdt_kernel(
    words,
    out,
    key0: tl.int64, key1: tl.int64, key2: tl.int64, key3: tl.int64, nonce: tl.int64,
    rounds: tl.int32,
    count: tl.int64,
    first: tl.int64,
    skip: tl.int32,
    n: tl.int64,
    LAW: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """Write the draws of these tiles, 64 cipher blocks each."""
    stream = chacha.unpack(key0, key1, key2, key3, nonce, rounds)
    element = tl.arange(0, 64 * TILES)
    tile, block = tl.program_id(0).to(tl.int64) * TILES + element // 64, element % 64
    w = chacha.blocks(stream, (first + tile) * 64 + block)
    in_tile = 128 * (block // 16) + block % 16  # its coordinate 0; coordinate k is 16 k further
    start = lattice.first_index(tile, in_tile, skip)
    magnitudes = ()
    undecided = tl.zeros(block.shape, tl.uint32)  # bit k: coordinate k
    for k in tl.static_range(8):
        head = w[2 * k + 1]
        entry = _word(words, (head >> EDGE_BITS).to(tl.int32), block < 64)
        low, edge = head & EDGES, entry & EDGES
        beyond = (low > edge).to(tl.uint32)
        magnitudes += (((entry & MANY) >> EDGE_BITS) + beyond,)  # type: ignore[assignment]
        undecided |= tl.where((low == edge) | (entry > MANY), 1 << k, 0).to(tl.uint32)
    # One of each block at a time: as rare as two boundaries within a millionth of all words.
    while tl.max(undecided) != 0:
        lowest = undecided & (~undecided + 1)
        head, place = tl.zeros(block.shape, tl.uint32), tl.zeros(block.shape, tl.int32)
        for k in tl.static_range(8):
            head = tl.where(lowest == (1 << k), w[2 * k + 1], head)
            place = tl.where(lowest == (1 << k), k, place)
        position = (first + tile) * lattice.TILE + in_tile + 16 * place
        found = _search(words, count, stream, position, head, lowest != 0)
        moved = ()
        for k in tl.static_range(8):
            moved += (tl.where(lowest == (1 << k), found, magnitudes[k]),)  # type: ignore[assignment]
        magnitudes = moved
        undecided ^= lowest
    for k in tl.static_range(8):
        index = start + 16 * k
        x = _value(magnitudes[k], w[2 * k], LAW)
        tl.store(out + index, x, mask=(index >= 0) & (index < n))


def source_draws(
    draws: Draws,
    *,
    position: int,
    count: int,
    device: torch.device | str = "cpu",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    place = at(device)
    if draws.in_memory:
        made = draws.at(position, count).to(place)
        return made.to(device) if out is None else out.copy_(made)
    made = torch.empty(count, dtype=torch.int32, device=place)
    held = draws.values.to(place)
    if isinstance(draws, SampleReads):
        read = _ahead.reads(draws, position).values()
        launch(samples_kernel, -(-count // BLOCK), made, held, made, *read, count, BLOCK=BLOCK)
    else:
        assert isinstance(draws, CdtDraws)
        stream, law, boundaries = _ahead.look_ups(draws)
        first, skip, tiles = lattice.tiles_of(position, count)
        launch(
            cdt_kernel,
            lattice.programs(tiles) if count else 0,
            made,
            held,
            made,
            *chacha.arguments(stream),
            boundaries,
            first,
            skip,
            count,
            LAW=lattice.LAW_CODES[law],
            TILES=lattice.tiles_per_program(tiles),
        )
    return made.to(device) if out is None else out.copy_(made)


def _never(*_: Any, **__: Any) -> None:
    return None


KERNELS: tuple[tuple[str, Any, Any], ...] = (("noise.source_draws", source_draws, _never),)
"""``(op, run, refuse)``."""
