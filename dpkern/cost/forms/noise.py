"""Closed forms of noise: drawing whole tiles, rounding stochastically and releasing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ...base.counts import Counts, Item, Itemised
from ...ops import noise
from ...ops._draws import CdtDraws, Draws, SampleReads
from ...ops.noise import TILE, tiles
from ._form import Form
from ._layers import moved

NOISE_WORDS, ROUNDING_WORDS, CDT_WORDS = 768, 256, 1024
"""Keystream words of a tile: 48, 16 and 64 cipher blocks."""

_DRAW = Counts(ADD=2, AND=4, XOR=1, OR=1, SHIFT=4, MUX=1, CMP=2)
"""The operations of one draw.

Threshold, column and entry of the alias table (whose reads are free), the choice, the mask of
escapes, sign, 14 uniform bits, sum.
"""
_FOUR_DRAWS = 4 * _DRAW + Counts(SHIFT=5)
"""Four draws: shifts by 0, 16, 0, 16 and 0, 8, 16, 24 bits, of which those by 0 cost nothing."""
_SECOND_UNIFORM = Counts(ADD=1, AND=1, SHIFT=1)
_CDT_DRAW = Counts(ADD=2, SUB=1, AND=5, XOR=1, OR=2, SHIFT=6, CMP=2)
"""A draw from a cumulative table.

Bucket and its entry (which is read for nothing), comparison with its boundary, mark of what the
search must decide, sign, 14 uniform bits, sum.
"""
_RELEASE_INTEGER = Counts(ADD=2, AND=1, SHIFT=2)
_RELEASE_FLOAT = Counts(ADD=4, SUB=2, MUL=3, CVT=5, CMP=1, SHIFT=1)
"""The release of a float: floor, 16-bit fraction, carry, whole cells, the rest, the sum with X."""
_FINITE = Counts(CMP=1, MUX=1)


def streamed(position: int, count: int, distribution: str) -> Itemised:
    """Count ``count`` draws from ``position`` on: every tile that they touch, as a whole."""
    tile = (TILE // 4) * _FOUR_DRAWS + Counts(CMP=1)
    if distribution == "gaussian":
        tile += TILE * _SECOND_UNIFORM
    n = tiles(position, count)
    return Itemised(
        (
            Item(name="noise words", counts=Counts(RNG=NOISE_WORDS * n)),
            Item(name="draws", counts=n * tile, note="whole tiles of 512; tails apart", flops=0),
        )
    )


def roundings(position: int, count: int) -> Itemised:
    """Count 16 rounding bits of each coordinate, tile by tile."""
    n = tiles(position, count)
    return Itemised(
        (
            Item(name="rounding words", counts=Counts(RNG=ROUNDING_WORDS * n)),
            Item(name="rounding bits", counts=n * Counts(AND=TILE, SHIFT=TILE // 2)),
        )
    )


def drawn(
    ahead: Draws | None, position: int, count: int, distribution: str, *, rounded: bool
) -> Itemised:
    """Count draws, and rounding bits of floats, from the streams or prefetched."""
    made = (
        streamed(position, count, distribution)
        if ahead is None
        else from_source(ahead, position, count)
    )
    if not rounded:
        return made
    if ahead is not None and ahead.rounding is not None:
        return made + _made_ahead(count, torch.int16)
    return made + roundings(position, count)


def from_source(source: Draws, position: int, count: int) -> Itemised:
    """Count ``count`` draws from ``position`` on, prefetched or read from a table."""
    if isinstance(source, SampleReads):
        shifted = Counts(SHIFT=TILE * tiles(position, count) if source.shift else 0)
        note = "whole tiles of 512; what a table holds is read for nothing"
        return Itemised((Item(name="table reads", counts=shifted, note=note, flops=0),))
    if isinstance(source, CdtDraws):
        tile = TILE * _CDT_DRAW + Counts(CMP=16)
        if source.distribution == "gaussian":
            tile += TILE * _SECOND_UNIFORM
        n = tiles(position, count)
        note = "whole tiles of 512; searches apart"
        return Itemised(
            (
                Item(name="index words", counts=Counts(RNG=CDT_WORDS * n)),
                Item(name="table draws", counts=n * tile, note=note, flops=0),
            )
        )
    return _made_ahead(count, torch.int32)


def _made_ahead(count: int, dtype: torch.dtype) -> Itemised:
    return Itemised((replace(moved([(count, dtype)], []), name="made ahead"),))


def released(count: int, dtype: torch.dtype) -> Counts:
    """Count ``floor((v + X) / 2^14)`` of integers, or of floats scaled to multiples of 1 / u."""
    if dtype in noise.INTEGERS:
        return count * _RELEASE_INTEGER
    return released_finite(count) + count * _FINITE


def release_flops(count: int, dtype: torch.dtype) -> int:
    """Return the flops of releasing floats: to multiples of u, fraction, whole cells, rest, sum."""
    return 0 if dtype in noise.INTEGERS else 7 * count


def released_finite(count: int) -> Counts:
    """Count the release of floats that are finite whatever the data is."""
    return count * (Counts(MUL=1) + _RELEASE_FLOAT)


def keystream(*args: Any, blocks: int, **_: Any) -> Itemised:
    """Count ``noise.keystream``."""
    words = 16 * blocks
    made = moved([], [(words, torch.int32)])
    return Itemised((replace(made, name="keystream", counts=made.counts + Counts(RNG=words)),))


def lattice_draws(
    *args: Any, position: int, count: int, distribution: str = "gaussian", **_: Any
) -> Itemised:
    """Count ``noise.lattice_draws``."""
    written = replace(moved([], [(count, torch.int32)]), name="written")
    return streamed(position, count, distribution) + Itemised((written,))


def source_draws(draws: Draws, *, position: int, count: int, **_: Any) -> Itemised:
    """Count ``noise.source_draws``."""
    written = replace(moved([], [(count, torch.int32)]), name="written")
    return from_source(draws, position, count) + Itemised((written,))


def rounding_bits(*args: Any, position: int, count: int, **_: Any) -> Itemised:
    """Count ``noise.rounding_bits``."""
    return roundings(position, count) + Itemised(
        (replace(moved([], [(count, torch.int16)]), name="written"),)
    )


def add_noise(
    x: torch.Tensor,
    *,
    position: int = 0,
    distribution: str = "gaussian",
    scale: float | torch.Tensor | None = None,
    draws: Draws | None = None,
    **_: Any,
) -> Itemised:
    """Count ``noise.add_noise``."""
    n, floats = x.numel(), x.dtype not in noise.INTEGERS
    items = [
        moved([(n, x.dtype)], [(n, x.dtype)]),
        Item(name="release", counts=released(n, x.dtype), flops=release_flops(n, x.dtype)),
    ]
    if floats:
        items.append(Item(name="times the cell", counts=Counts(MUL=n)))
    if floats and isinstance(scale, torch.Tensor):
        items.append(scaled("scale of each coordinate", n, x.dtype, scale))
    made = drawn(draws, position, n, distribution, rounded=floats)
    return made + Itemised(tuple(items))


def units_of(dtype: torch.dtype, scale: torch.dtype) -> Counts:
    """Count 1 / u, rounded down by its bits, and the cell, of one scale in this dtype."""
    each = Counts(DIV=2, CVT=int(scale is torch.float32))
    return each + Counts(CVT=3, CMP=1, SUB=1, MUX=1) if dtype is torch.float32 else each


def scaled(name: str, count: int, dtype: torch.dtype, scale: torch.Tensor) -> Item:
    """Count what ``count`` scales in memory take."""
    each = units_of(dtype, scale.dtype) + Counts(LOAD=1)
    size = count * scale.element_size()
    return Item(name=name, counts=count * each, bytes_read=size, flops=2 * count)


FORMS: dict[str, Form] = {
    "noise.keystream": keystream,
    "noise.lattice_draws": lattice_draws,
    "noise.rounding_bits": rounding_bits,
    "noise.source_draws": source_draws,
    "noise.add_noise": add_noise,
}
