"""Draws looked up in a cumulative table of a law: the table in memory, and the reference.

Two words of a keystream make one draw. The first one is sign (bit 15), first uniform (bits 0 to 13)
and second uniform (bits 16 to 23), the second one the first 32 bits of the index W. Its other bits
come from the tail's keystream at the draw's position; they matter only where the first 32 are those
of a boundary, so that an index of any length costs the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..base import layouts
from ..base.laws import FINE_BITS, LAWS
from ..base.rng import Stream
from . import _lattice

GUIDE = int(layouts.GUIDE)
WORDS_PER_DRAW = 2
EDGE_BITS = 20
_INDEX_BITS, _TAIL_BITS = 32, 96
_EDGES, _MANY = (1 << EDGE_BITS) - 1, 1 << 31
WORDS_PER_BOUNDARY = 1 + _TAIL_BITS // 32


def packed(boundaries: Sequence[int], word_bits: int) -> torch.Tensor:
    """Return a cumulative table as kernels read it, int32 (``csrc/core/cdt.h``).

    Args:
        boundaries: C_0 <= C_1 <= ..., below 2^word_bits; k is the number of those that an index of
            ``word_bits`` bits is not below.
        word_bits: at most 128.
    """
    whole = _INDEX_BITS + _TAIL_BITS
    aligned = [boundary << (whole - word_bits) for boundary in boundaries]
    heads = [boundary >> _TAIL_BITS for boundary in aligned]
    tails = [(boundary >> at) & 0xFFFFFFFF for boundary in aligned for at in (0, 32, 64)]
    buckets: list[list[int]] = [[] for _ in range(GUIDE)]
    for head in heads:
        buckets[head >> EDGE_BITS].append(head & _EDGES)
    guide, k = [], 0  # k stays below 2^11: the last bucket has all of the law's far boundaries
    for edges in buckets:
        alone = edges[0] if len(edges) == 1 else _EDGES
        guide.append((_MANY if len(edges) > 1 else 0) | k << EDGE_BITS | alone)
        k += len(edges)
    words = [_lattice.signed_word(word) for word in (*guide, *heads, *tails)]
    return torch.tensor(words, dtype=torch.int32, device="cpu")


def boundaries_in(table: torch.Tensor) -> int:
    """Return how many boundaries a packed table has."""
    return (table.numel() - GUIDE) // WORDS_PER_BOUNDARY


def draws(
    stream: Stream, table: torch.Tensor, distribution: str, position: int, count: int
) -> torch.Tensor:
    """Return X at ``position .. position + count - 1``, int32, without the guide."""

    def tiles(first: int, n: int) -> torch.Tensor:
        rows = _lattice.tile_rows(stream, first, n, 4)
        index = rows[:, 1::2].reshape(-1).to(torch.int64) & 0xFFFFFFFF
        magnitude = _magnitudes(stream, table.cpu(), index, first * _lattice.TILE)
        return _values(magnitude, rows[:, 0::2].reshape(-1), distribution)

    return _lattice.by_tiles(position, count, tiles)


def _magnitudes(
    stream: Stream, table: torch.Tensor, index: torch.Tensor, position: int
) -> torch.Tensor:
    n = boundaries_in(table)
    unsigned = table[GUIDE:].to(torch.int64) & 0xFFFFFFFF
    heads, tails = unsigned[:n].contiguous(), unsigned[n:].view(n, 3)
    k = torch.searchsorted(heads, index, right=False)
    above = torch.searchsorted(heads, index, right=True)
    tied = (k != above).nonzero().flatten()
    if len(tied):
        blocks = _lattice.chacha_blocks(stream, tied + position, tail=True)[:3].t()
        low = (blocks.to(torch.int64) & 0xFFFFFFFF).tolist()
        for at, mine in zip(tied.tolist(), low, strict=True):
            same = tails[int(k[at]) : int(above[at])].tolist()
            k[at] += sum(tail[::-1] <= mine[::-1] for tail in same)
    return k.to(torch.int32)


def _values(magnitude: torch.Tensor, word: torch.Tensor, distribution: str) -> torch.Tensor:
    if LAWS[distribution].uses_second_uniform:
        offset = (((word >> 16) & 0xFF) << 6) + 32
    else:
        offset = torch.full_like(word, 1 << (FINE_BITS - 1))
    sign = -((word >> 15) & 1)
    return ((magnitude ^ sign) << FINE_BITS) + (word & ((1 << FINE_BITS) - 1)) + offset


__all__ = [
    "EDGE_BITS",
    "GUIDE",
    "WORDS_PER_BOUNDARY",
    "WORDS_PER_DRAW",
    "boundaries_in",
    "draws",
    "packed",
]
