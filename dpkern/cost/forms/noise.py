"""Noise: closed forms of drawing whole tiles, rounding stochastically and releasing."""

from __future__ import annotations

from typing import Any

import torch

from ...ops import noise
from ...ops.noise import TILE, tiles
from ..primitives import Counts, Item, Itemised
from ._form import Form

NOISE_WORDS, ROUNDING_WORDS = 768, 256
"""Words of a tile: 48 and 16 cipher blocks."""

_DRAW = Counts(ADD=2, AND=4, XOR=1, OR=1, SHIFT=4, MUX=1, CMP=2)
"""Threshold, column and entry of the alias table (whose reads are free), the choice, the mask of
escapes, sign, 14 uniform bits, sum."""
_FOUR_DRAWS = 4 * _DRAW + Counts(SHIFT=5)
"""Their thresholds and columns lie at 0, 16, 0, 16 and 0, 8, 16, 24 bits; none is shifted by 0."""
_SECOND_UNIFORM = Counts(ADD=1, AND=1, SHIFT=1)
_RELEASE_INTEGER = Counts(ADD=2, AND=1, SHIFT=2)
_RELEASE_FLOAT = Counts(ADD=4, SUB=2, MUL=3, CVT=5, CMP=1, SHIFT=1)
"""Floor, fraction of 16 bits, carry, whole cells, the rest below them, and their sum with X."""
_FINITE = Counts(CMP=1, MUX=1)


def draws(position: int, count: int, distribution: str) -> Itemised:
    """``count`` draws from ``position`` on: every tile that they touch, as a whole."""
    tile = (TILE // 4) * _FOUR_DRAWS + Counts(CMP=1)
    if distribution == "gaussian":
        tile += TILE * _SECOND_UNIFORM
    n = tiles(position, count)
    return Itemised(
        (
            Item(name="noise words", counts=Counts(RNG=NOISE_WORDS * n)),
            Item(name="draws", counts=n * tile, note="whole tiles of 512; tails apart"),
        )
    )


def roundings(position: int, count: int) -> Itemised:
    """16 bits of each coordinate, tile by tile."""
    n = tiles(position, count)
    return Itemised(
        (
            Item(name="rounding words", counts=Counts(RNG=ROUNDING_WORDS * n)),
            Item(name="rounding bits", counts=n * Counts(AND=TILE, SHIFT=TILE // 2)),
        )
    )


def released(count: int, dtype: torch.dtype) -> Counts:
    """``floor((v + X) / 2^14)`` of integers, or of floats that are multiples of 1 / u first."""
    if dtype in noise.INTEGERS:
        return count * _RELEASE_INTEGER
    return released_finite(count) + count * _FINITE


def released_finite(count: int) -> Counts:
    """The same of floats that are finite whatever the data is."""
    return count * (Counts(MUL=1) + _RELEASE_FLOAT)


def keystream(*args: Any, blocks: int, **_: Any) -> Itemised:
    """``noise.keystream``."""
    words = 16 * blocks
    return Itemised((Item(name="keystream", counts=Counts(RNG=words, STORE=words)),))


def lattice_draws(
    *args: Any, position: int, count: int, distribution: str = "gaussian", **_: Any
) -> Itemised:
    """``noise.lattice_draws``."""
    written = Item(name="written", counts=Counts(STORE=count))
    return draws(position, count, distribution) + Itemised((written,))


def rounding_bits(*args: Any, position: int, count: int, **_: Any) -> Itemised:
    """``noise.rounding_bits``."""
    return roundings(position, count) + Itemised(
        (Item(name="written", counts=Counts(STORE=count)),)
    )


def add_noise(
    x: torch.Tensor,
    *,
    position: int = 0,
    distribution: str = "gaussian",
    scale: float | torch.Tensor | None = None,
    **_: Any,
) -> Itemised:
    """``noise.add_noise``."""
    n = x.numel()
    moved = Item(name="read and written", counts=Counts(LOAD=n, STORE=n))
    release = Item(name="release", counts=released(n, x.dtype))
    if x.dtype in noise.INTEGERS:
        return draws(position, n, distribution) + Itemised((moved, release))
    items = [moved, release, Item(name="times the cell", counts=Counts(MUL=n))]
    if isinstance(scale, torch.Tensor):
        items.append(
            Item(name="scale of each coordinate", counts=n * scale_counts(x.dtype, scale.dtype))
        )
    return draws(position, n, distribution) + roundings(position, n) + Itemised(tuple(items))


def scale_counts(dtype: torch.dtype, scale: torch.dtype) -> Counts:
    """1 / u rounded down and the cell, for numbers and from a scale of these dtypes."""
    each = Counts(DIV=2, LOAD=1, CVT=int(scale is torch.float32))
    if dtype is torch.float32:
        each += Counts(CVT=3, CMP=1, SUB=1, MUX=1)
    return each


FORMS: dict[str, Form] = {
    "noise.keystream": keystream,
    "noise.lattice_draws": lattice_draws,
    "noise.rounding_bits": rounding_bits,
    "noise.add_noise": add_noise,
}
