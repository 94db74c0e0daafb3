"""Divide transforms of maps among blocks of device kernels, and make the tables that they read.

Lines of at most 64 values take one level of products (``spectral.cu``), longer ones two
(``spectral_long.cu``). Volumes take one level of up to 256 values (``spectral_volume.cu``).
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ...base import layouts
from ..spectral import _plan
from ..spectral._lines import LONGEST, LONGEST_WHOLE, PART, FrequencyLine, LongLine, circle
from ..spectral._plan import LongPlaces, Places, sides_of
from ..spectral._spectra import Grid, of_one_sample

CHANNELS = 32
"""Channels whose powers a block adds up; sums of more are made in float64."""

assert layouts.SPECTRAL_PART == PART


def reaches(grid: Grid, dtype: torch.dtype) -> bool:
    """Whether blocks hold the maps of this grid, with sums of this dtype."""
    return _plan.reaches(grid) and _fits(of_one_sample(grid), dtype)


@lru_cache(maxsize=1024)
def _fits(grid: Grid, dtype: torch.dtype) -> bool:
    # Long lines are read at 32-bit distances from a block's first map.
    if max(grid.size) > LONGEST and math.prod(grid.layer.input) * layouts.SPECTRAL_TILE >= 2**31:
        return False
    return all(_shape(side, dtype) is not None for side in sides_of(grid, shared=False))


def _shape(side: Places | LongPlaces, dtype: torch.dtype) -> dict[str, int] | None:
    if isinstance(side, Places):
        return block_shape(side, dtype)
    of_volumes = len(side.lines) == 3
    return volume_shape(side, dtype) if of_volumes else long_shape(side, CHANNELS, dtype)


def _padded(count: int, dtype: torch.dtype) -> int:
    """Return folded indices of so many values, to whole packs of 16 bytes."""
    pack = 16 // dtype.itemsize
    return -(-(count // 2 + 1) // pack) * pack


@lru_cache(maxsize=1024)
def block_shape(side: Places, dtype: torch.dtype) -> dict[str, int]:
    """Return how many frequencies, threads for each, and maps a block of transforms has."""
    wide = dtype is torch.float64
    lines = int(layouts.SPECTRAL_LINES_WIDE if wide else layouts.SPECTRAL_LINES)
    folded = int(layouts.SPECTRAL_FOLDED_WIDE if wide else layouts.SPECTRAL_FOLDED)
    rows, columns = _padded(side.rows.count, dtype), _padded(side.columns.count, dtype)
    across, down = side.columns.n // 2 + 1, side.rows.n // 2 + 1
    lanes = -(-down // layouts.SPECTRAL_EACH)
    most = min(lines // (4 * rows), layouts.SPECTRAL_THREADS // lanes)
    together = -(-across // -(-across // most))
    teams = min(
        layouts.SPECTRAL_THREADS // (together * lanes),
        folded // (4 * (side.rows.count // 2 + 1) * columns),
        lines // (4 * rows * together),
    )
    return {
        "across": across,
        "down": down,
        "together": together,
        "lanes": lanes,
        "teams": teams,
    }


def row_turns(line: FrequencyLine, dtype: torch.dtype) -> Tensor:
    """Return cosines and sines ``[2, folded index, k]``, of no index beyond the last zeros."""
    half, count = line.count // 2 + 1, line.n // 2 + 1
    turns = np.outer(np.arange(half) * line.step, np.arange(count)) % line.n
    made = np.zeros((2, _padded(line.count, dtype), count))
    made[:, :half] = circle(line.n)[:, turns]
    return torch.from_numpy(made).to(dtype)


def column_turns(line: FrequencyLine, dtype: torch.dtype) -> Tensor:
    """Return cosines and sines ``[2, k, folded index]``."""
    return row_turns(line, dtype).mT.contiguous()


def _step(n2: int) -> int:
    """Return the numbers between two k1 behind the first level, as ``SpectralLevels`` has them."""
    return n2 + (n2 % 4 == 0)


@lru_cache(maxsize=1024)
def long_shape(side: LongPlaces, channels: int, dtype: torch.dtype) -> dict[str, int] | None:
    """Return how ``SpectralLong`` divides maps; None where a block cannot hold one frequency.

    Args:
        side: their frequencies.
        channels: at most, of a block.
        dtype: of the sums.
    """
    tile = int(layouts.SPECTRAL_TILE if dtype is torch.float32 else layouts.SPECTRAL_TILE_WIDE)
    room = tile * layouts.SPECTRAL_LONG_THREADS
    across, down = side.columns, side.rows
    maps = max(1, min(tile // down.count, channels))

    def fits(lines: int, each: int) -> bool:
        slots = lines * each
        tiles = -(-slots * down.first // tile)
        between = ((maps - 1) * slots * down.first + tiles * tile) * _step(down.second)
        return (
            maps * slots * (down.count | 1) <= room
            and tiles * down.second <= layouts.SPECTRAL_LONG_THREADS
            and between <= room
            and tile * lines * _step(across.second) <= room
        )

    half, n2 = across.first // 2 + 1, across.second
    parts, lines = 1, next((n for n in range(half, 0, -1) if fits(n, n2)), 0)
    if lines:
        lines = -(-half // -(-half // lines))
    else:
        parts, lines = next((p for p in range(2, n2 + 1) if fits(1, -(-n2 // p))), 0), 1
        if not parts:
            return None
        parts = -(-n2 // -(-n2 // parts))  # none of them is empty
    rows = min(room // (lines * _step(n2)), maps * down.count + tile - 1) // tile * tile
    return {"lines": lines, "parts": parts, "maps": maps, "rows": rows}


@lru_cache(maxsize=1024)
def volume_shape(side: LongPlaces, dtype: torch.dtype) -> dict[str, int] | None:
    """Return how ``SpectralVolume`` divides volumes; None where a block cannot hold one kx."""
    wide = dtype is torch.float64
    room = int(layouts.SPECTRAL_VOLUME_WIDE if wide else layouts.SPECTRAL_VOLUME)
    depth, rows, columns = side.lines
    across = columns.n // 2 + 1
    most = min(across, room // (depth.count * (rows.count + rows.n)))
    if not most or max(line.n for line in side.lines) > LONGEST_WHOLE:
        return None
    return {
        "across": across,
        "down": rows.n,
        "deep": depth.n,
        "planes": depth.count,
        "rows": rows.count,
        "together": -(-across // -(-across // most)),
    }


def whole_turns(line: LongLine, frequencies: int, dtype: torch.dtype) -> Tensor:
    """Return pairs of cosine and sine ``[values, frequencies]`` of a line of one level."""
    turns = np.outer(np.arange(line.count), np.arange(frequencies)) % line.n
    return torch.from_numpy(np.stack(list(circle(line.n)[:, turns]), -1)).to(dtype).contiguous()


def level_turns(line: LongLine, name: str, dtype: torch.dtype) -> Tensor:
    """Return a table of ``SpectralLine``: ``first``, ``phases`` or ``second``."""
    k1, b = np.arange(line.first), np.arange(line.second)
    if name == "phases":
        n, turns = line.n, np.outer(k1, b)
    elif name == "second":
        n, turns = line.second, np.outer(b, b)
    else:
        tile = int(layouts.SPECTRAL_TILE)
        n, turns = line.first, np.outer(k1, np.arange(-(-line.first // tile) * tile))
    return torch.from_numpy(np.stack(list(circle(n)[:, turns % n]), -1)).to(dtype).contiguous()
