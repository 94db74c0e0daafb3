"""The reference of the noise generator in plain torch: the same bits as every kernel.

Words are int32 tensors that wrap; logical shifts are arithmetic shifts with a mask.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import cache

import torch

from ..base import layouts
from ..base.laws import (
    ESCAPE,
    FINE_BITS,
    LAPLACE_RESTARTS,
    LAWS,
    SCALE_CELLS,
    SCALE_UNITS,
    Law,
    gaussian_tail,
)
from ..base.rng import Stream
from ._count import Count, count

TILE, LANES = int(layouts.TILE), int(layouts.LANES)
_TILES_AT_ONCE = 128
_CONSTANTS = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)
_TAIL_DOMAIN = 1 << 31


def signed_word(word: int) -> int:
    """Return 32 bits without a sign as an int32 holds them."""
    return word - (1 << 32) if word >= 1 << 31 else word


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits) & ((1 << (32 - bits)) - 1)


def _quarter_rounds(rows: list[torch.Tensor]) -> None:
    """Mix the columns of four rows of words, ``[4 columns, ...]`` each, in place."""
    a, b, c, d = rows
    for sum_, addend, mixed, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
        sum_ += addend
        mixed ^= sum_
        wrapped = _shift_right(mixed, 32 - bits)
        mixed <<= bits
        mixed |= wrapped


def chacha_blocks(stream: Stream, counters: torch.Tensor, tail: bool = False) -> torch.Tensor:
    """Return words ``[16, *counters.shape]`` of the blocks with these 64-bit counters (int64)."""
    key = [int.from_bytes(stream.key[i : i + 4], "little") for i in range(0, 32, 4)]
    n0 = stream.n0 ^ (_TAIL_DOMAIN if tail else 0)
    start = torch.empty((4, 4, *counters.shape), dtype=torch.int32, device=counters.device)
    for place, word in enumerate((*_CONSTANTS, *key, 0, 0, n0, stream.n1)):
        start[divmod(place, 4)] = signed_word(word)
    start[3, 0], start[3, 1] = counters, counters >> 32
    rows = list(start.clone())
    for _ in range(stream.rounds // 2):
        # The diagonals are the columns of rows that are turned.
        for turn in (-1, 1):
            _quarter_rounds(rows)
            rows = [row.roll(turn * i, 0) if i else row for i, row in enumerate(rows)]
    return (torch.stack(rows) + start).view(16, *counters.shape)


def keystream(stream: Stream, first_block: int, blocks: int) -> torch.Tensor:
    """Return words in the order of RFC 8439, ``[16 blocks]``."""
    counters = torch.arange(first_block, first_block + blocks, dtype=torch.int64, device="cpu")
    return chacha_blocks(stream, counters).t().reshape(-1)


def tile_rows(stream: Stream, first: int, tiles: int, groups: int) -> torch.Tensor:
    """Return rows ``[tiles, 16 groups, lanes]``: row r, lane l is word r mod 16 of one block."""
    per_tile = groups * LANES
    begin, end = first * per_tile, (first + tiles) * per_tile
    counters = torch.arange(begin, end, dtype=torch.int64, device="cpu")
    words = chacha_blocks(stream, counters.view(tiles, groups, LANES))
    return words.permute(1, 2, 0, 3).reshape(tiles, 16 * groups, LANES)


@cache
def _table(law: Law) -> torch.Tensor:
    return torch.tensor(law.table, dtype=torch.int32, device="cpu")


def _gaussian_magnitudes(block: torch.Tensor) -> torch.Tensor:
    """Return ``255 + #{t : R < N_t}``, ``[16, m]`` -> ``[m]``; R is a block's first 128 bits."""
    increasing = gaussian_tail()[::-1]
    words = (block[:4].to(torch.int64) & 0xFFFFFFFF).t().tolist()
    numbers = (sum(word << (32 * i) for i, word in enumerate(row)) for row in words)
    # N_t > R exactly for the entries of the increasing list from the first one above R on.
    above = (len(increasing) - bisect_left(increasing, number + 1) for number in numbers)
    return torch.tensor([ESCAPE + count for count in above], dtype=torch.int32, device="cpu")


def _laplace_magnitudes(block: torch.Tensor) -> torch.Tensor:
    """Return the law's magnitudes: each escape restarts 255 further out, one word a time."""
    table = _table(LAWS["laplace"])
    total = torch.full_like(block[0], ESCAPE)
    running = torch.ones_like(block[0], dtype=torch.bool)
    for restart in range(LAPLACE_RESTARTS):
        column = (block[restart] >> 16) & 0xFF
        entry = table[column.long()]
        fits = (block[restart] & 0xFFFF) < (entry & 0xFFFF)
        k = torch.where(fits, column, _shift_right(entry, 16))
        total = torch.where(running, total + k, total)
        running &= k == ESCAPE
    return total


def _draw_tiles(stream: Stream, law: Law, first: int, tiles: int) -> torch.Tensor:
    w = tile_rows(stream, first, tiles, 3).view(tiles, 8, 6, LANES)
    table = _table(law)
    magnitudes, bits, offsets = [], [], []
    for b in range(4):
        half = 16 * (b & 1)
        threshold = (
            _shift_right(w[:, :, b >> 1], half) & 0xFFFF if half else w[:, :, b >> 1] & 0xFFFF
        )
        column = (w[:, :, 4] >> (8 * b)) & 0xFF
        second_uniform = (w[:, :, 5] >> (8 * b)) & 0xFF
        entry = table[column.long()]
        magnitudes.append(
            torch.where(threshold < (entry & 0xFFFF), column, _shift_right(entry, 16))
        )
        bits.append((w[:, :, 2 + (b >> 1)] >> half) & 0xFFFF)
        constant = torch.full_like(second_uniform, 1 << (FINE_BITS - 1))
        offsets.append((second_uniform << 6) + 32 if law.uses_second_uniform else constant)
    magnitude = torch.stack(magnitudes, dim=2).reshape(-1)
    escaped = torch.nonzero(magnitude == ESCAPE).squeeze(1)
    if escaped.numel():
        block = chacha_blocks(stream, escaped + first * TILE, tail=True)
        far = _gaussian_magnitudes if law.uses_second_uniform else _laplace_magnitudes
        magnitude[escaped] = far(block)
    uniform = torch.stack(bits, dim=2).reshape(-1)
    sign = -(uniform >> 15)
    offset = torch.stack(offsets, dim=2).reshape(-1)
    return ((magnitude ^ sign) << FINE_BITS) + (uniform & 0x3FFF) + offset


def draws(stream: Stream, distribution: str, position: int, count: int) -> torch.Tensor:
    """Return ``X`` at positions ``position .. position + count - 1``, int32."""
    law = LAWS[distribution]
    return by_tiles(position, count, lambda first, n: _draw_tiles(stream, law, first, n))


def rounding_bits(stream: Stream, position: int, count: int) -> torch.Tensor:
    """Return 16 bits per coordinate, int32: half j div 16 (low first) of its lane j mod 16."""

    def tiles(first: int, n: int) -> torch.Tensor:
        words = tile_rows(stream, first, n, 1)
        return torch.stack((words & 0xFFFF, _shift_right(words, 16)), dim=2).reshape(-1)

    return by_tiles(position, count, tiles)


def by_tiles(position: int, count: int, make: Callable[[int, int], torch.Tensor]) -> torch.Tensor:
    """Return what ``make(first tile, tiles)`` makes of the tiles that these positions touch."""
    first, last = position // TILE, -(-(position + count) // TILE)
    pieces = [
        make(tile, min(_TILES_AT_ONCE, last - tile)) for tile in range(first, last, _TILES_AT_ONCE)
    ]
    if not pieces:
        return torch.empty(0, dtype=torch.int32, device="cpu")
    start = position - first * TILE
    return torch.cat(pieces)[start : start + count]


def release_integers(v: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return ``floor((v + X) / 2^14)`` without overflow, in v's dtype."""
    low = (v & ((1 << FINE_BITS) - 1)).to(torch.int32)
    return (v >> FINE_BITS) + ((low + x) >> FINE_BITS).to(v.dtype)


def round_down(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round positive float64 numbers to another dtype, never up."""
    rounded = x.to(dtype)
    below = torch.nextafter(rounded, torch.zeros_like(rounded))
    return torch.where(rounded.to(torch.float64) > x, below, rounded)


def _float64(scale: float | torch.Tensor) -> torch.Tensor:
    """Return the scale where it is; ``torch.as_tensor`` moves it to the default device."""
    if isinstance(scale, torch.Tensor):
        return scale.to(torch.float64)
    return torch.tensor(scale, dtype=torch.float64, device="cpu")


def per_unit(scale: float | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``1 / u`` rounded down, ``u = scale / 2^20``: scaled sensitivities can only shrink."""
    return round_down(SCALE_UNITS / _float64(scale), dtype)


def cell(scale: float | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``g = scale / 64``."""
    return (_float64(scale) / SCALE_CELLS).to(dtype)


def release_floats(
    v: torch.Tensor, scale: float | torch.Tensor, bits: torch.Tensor, x: torch.Tensor
) -> tuple[torch.Tensor, Count]:
    """Round ``v / u`` stochastically and add noise; return whole ``y`` and the non-finite count."""
    units = v * per_unit(scale, v.dtype)
    finite = torch.isfinite(units)
    units = torch.where(finite, units, torch.zeros_like(units))
    below = torch.floor(units)
    fraction = ((units - below) * 65536).to(torch.int32)
    carry = (fraction + bits >= 65536).to(torch.int32)
    cells = torch.floor(below * 2.0**-FINE_BITS)
    low = (below - cells * 2.0**FINE_BITS).to(torch.int32) + carry
    y = cells + ((low + x) >> FINE_BITS).to(v.dtype)
    return y, count(~finite)
