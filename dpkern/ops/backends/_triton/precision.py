"""Bound the rounding of tiles of sums: the numbers behind norms that never under-report.

``docs/ghost.md``, "On GPUs", states the model of the arithmetic and derives these bounds. They are
rounded up to single precision, in which Triton passes floats.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil, sqrt
from typing import NamedTuple

import numpy as np
import torch

SIXTEEN = (torch.bfloat16, torch.float16)
CHUNK, LEAST_CHUNK = 64, 16
"""Positions in a chunk of 16-bit products, at most and at least."""
CHAIN, SAMPLES = 320, 64
"""Positions of a sample, and samples, that go through one accumulator, at most."""
_TINY = 2.0**-126
_SUMS = 1e-12
"""Relative error of the float64 sums of a tile's squares, up to 4000 additions in a chain."""
_LONGEST = 2**17
"""Chunks."""


class SumPrecision(NamedTuple):
    """The rounding of sums in one pass.

    Attributes:
        unit: unit roundoff of an addition.
        per_term: roundings, in units, that a product in a chunk meets per term of the chunk.
        tiny: what one operation can lose to underflow.
        tolerance: how far the upper end of a sample's interval may lie above the lower one.
    """

    unit: float
    per_term: int
    tiny: float
    tolerance: float

    def gamma(self, roundings: float) -> float:
        """Return the relative error of sums in which a product meets that many roundings."""
        return 1.01 * roundings * self.unit

    def chunk(self, depth: int) -> float:
        """Return the error of a chunk's products, relative to the sum of their sizes."""
        return self.gamma(self.per_term * depth + 1)


WIDE = SumPrecision(unit=2.0**-53, per_term=3, tiny=0.0, tolerance=0.0)
"""float64, whose result always counts. Products of narrower numbers are exact in it."""
_SINGLE = SumPrecision(unit=2.0**-24, per_term=1, tiny=_TINY, tolerance=0.99e-4)
_TENSOR_CORES = SumPrecision(unit=2.0**-24, per_term=3, tiny=_TINY, tolerance=0.99 * 5e-3)


def first(dtype: torch.dtype) -> SumPrecision:
    """Return the type that operands of this type are tried in first; float64 has no such try."""
    return _TENSOR_CORES if dtype in SIXTEEN else _SINGLE


def up(x: float) -> float:
    """Return at least ``x``, and a number of single precision."""
    near = np.float32(x)
    return float(near if float(near) >= x else np.nextafter(near, np.float32(np.inf)))


def longest(depth: int) -> int:
    """Return the most positions, in chunks of ``depth``, whose bounds hold in single precision."""
    return _LONGEST * depth


def lost_in_sums(kind: SumPrecision, positions: int, chained: bool) -> float:
    """Return what a weighted sum may lose of a sample, relative to the sizes of all its products.

    That is a share of each chunk of positions and a rounding for every chunk. In one accumulator
    (``chained``) it is a share of all positions, and two roundings for every sample that follows.
    """
    if chained:
        return kind.chunk(positions) + kind.gamma(2 * SAMPLES)
    return kind.chunk(CHUNK) + kind.gamma(ceil(positions / LEAST_CHUNK))


@lru_cache(maxsize=4096)
def direct_numbers(
    kind: SumPrecision,
    positions: int,
    rows: int,
    columns: int,
    depth: int,
    tile_columns: int,
    chained: bool = False,
) -> tuple[float, ...]:
    """Return the numbers that ``bound_kernel`` needs, in its order.

    Args:
        kind: the pass's arithmetic.
        positions, rows, columns: T, p and d of one gradient.
        depth: positions in a chunk.
        tile_columns: columns of a tile, whose squares are added in the pass's arithmetic.
        chained: whether a weighted sum may keep samples in one accumulator.
    """
    chunks, entries = ceil(positions / depth), rows * columns
    products = kind.chunk(depth)
    if chained:  # else a sum makes the same products and loses the same
        products += lost_in_sums(kind, positions, chained)
    return tuple(
        up(x)
        for x in (
            products,
            kind.gamma(sqrt(chunks)),
            kind.gamma(tile_columns + 1) + _SUMS,
            kind.gamma(depth + 1) + 1e-9,
            2 * kind.tiny * entries,
            2 * kind.tiny * entries * chunks,
            2 * kind.tiny * positions * columns,
            2 * kind.tiny * positions * rows,
            kind.tiny * 3 * positions * sqrt(entries),
            kind.tolerance,
        )
    )


@lru_cache(maxsize=4096)
def gram_numbers(
    kind: SumPrecision, positions: int, rows: int, columns: int, depth: int, chained: bool = False
) -> tuple[float, ...]:
    """Return the numbers that Gram kernels need, in their order.

    The last is what a weighted sum of 16-bit products may lose of the sizes of all products.
    """
    longest = max(rows, columns)
    return (
        up(kind.gamma(kind.per_term * depth + ceil(longest / depth) + 1)),
        up(kind.tiny * 3 * longest),
        up(kind.tolerance),
        up(lost_in_sums(kind, positions, chained)) if kind is _TENSOR_CORES else 0.0,
    )
