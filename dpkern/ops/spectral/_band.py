"""Bands of frequencies on a P x Q grid that a mechanism keeps, and their gains.

A band is a real filter with gains Gamma(k) = Gamma(-k) on the grid of an unnormalised DFT. Shells
and rectangles are made from the integers min(i, P - i) alone: frequencies in floating point lose
the bins on the boundary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ...base import validate as check
from ...base.errors import InvalidInput

Array = NDArray[np.float64]
KINDS = ("all", "shells", "rectangle", "authors_slice")


@dataclass(frozen=True)
class Band:
    """A filter on the frequencies of a grid; compared by its three numbers.

    Args:
        size: ``(P, Q)``, ``(depth, P, Q)``, or ``(d,)`` for lines and blocks of a circulant
            matrix.
        kind: ``all`` keeps everything with gain 1. ``shells`` and ``rectangle`` keep the smallest
            union of whole shells ``r <= m`` with at least ``keep P Q`` bins, where ``r`` is

                shells     (min(i, P-i) Q)^2 + (min(j, Q-j) P)^2
                rectangle  max(min(i, P-i) Q, min(j, Q-j) P)

            ``authors_slice`` is what slicing ``[ceil(keep P):-1]`` to zero on each axis does:
            in two dimensions to the one-sided spectrum before a complex-to-real inverse, in one
            to the whole spectrum before the real part is taken; its gains are 0, 1/2 and 1.
        keep: least share of the bins, in (0, 1]; 1 with ``all``.

    Raises:
        InvalidInput: a size, kind or share out of range.
    """

    size: tuple[int, ...]
    kind: str = "shells"
    keep: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.size, (tuple, list)) or len(self.size) not in (1, 2, 3):
            raise InvalidInput(
                "size",
                expected="(P, Q), (depth, P, Q), or (d,) for circulant blocks",
                got=self.size,
                remedy="Give the number of frequencies per axis.",
            )
        object.__setattr__(self, "size", tuple(check.integer(1, size=n) for n in self.size))
        check.choice(KINDS, kind=self.kind)
        object.__setattr__(self, "keep", check.probability(keep=self.keep))
        if self.kind == "authors_slice" and len(self.size) == 3:
            raise InvalidInput(
                "kind",
                expected="'shells' or 'rectangle' on three axes",
                got=self.kind,
                remedy="The authors' code slices planes and lines alone; choose another mask.",
            )
        if self.kind == "all" and self.keep != 1:
            raise InvalidInput(
                "keep",
                expected="1 with kind='all'",
                got=self.keep,
                remedy="Choose kind='shells' or 'rectangle' to keep a part.",
            )

    @property
    def gains(self) -> Array:
        """``[*size]``, the factor of every bin of the full spectrum."""
        return _gains(self)

    @property
    def response(self) -> Array:
        """``[*size]``: h = IDFT(gains); the filter is the circular convolution with it."""
        return _inverse(self, 1)

    @property
    def correlation(self) -> Array:
        """The inverse transform ``[*size]`` of gains^2.

        White noise of variance 1 leaves the filter with covariance ``correlation[(u - v) mod
        size]``.
        """
        return _inverse(self, 2)

    @property
    def retained(self) -> tuple[NDArray[np.int64], ...]:
        """Indices of the bins of the half spectrum (last axis 0 .. Q/2) that are not zero."""
        return _retained(self)

    @property
    def weights(self) -> Array:
        """Full-spectrum bins per retained bin: 1 where the last index is 0 or Q/2, else 2."""
        last = self.size[-1]
        return half_weights(last)[self.retained[-1]]

    @property
    def count(self) -> int:
        """Number K_real of full-spectrum bins that are kept: their real degrees of freedom."""
        return int(np.count_nonzero(self.gains))

    @property
    def block(self) -> tuple[int, ...]:
        """``ceil(keep n)`` per axis: the corner that the authors' slice leaves untouched."""
        return tuple(math.ceil(_share(self.keep) * n) for n in self.size)


def half_weights(n: int) -> Array:
    """Return ``[n // 2 + 1]``: 1 for bins 0 and n/2, 2 for those whose mirror is not stored."""
    weights = np.full(n // 2 + 1, 2.0)
    weights[0] = 1.0
    if n % 2 == 0:
        weights[-1] = 1.0
    return weights


def _share(keep: float) -> Fraction:
    # The decimal that was written: 0.1 of 100 bins is 10 of them, not 11.
    return Fraction(repr(keep))


def _frozen(array: Array) -> Array:
    array.setflags(write=False)
    return array


@lru_cache(maxsize=256)
def _gains(band: Band) -> Array:
    if band.kind == "all":
        return _frozen(np.ones(band.size))
    if band.kind == "authors_slice":
        return _frozen(_sliced(band))
    radius = _radius(band)
    sizes = np.sort(radius, axis=None)
    needed = math.ceil(_share(band.keep) * sizes.size)
    return _frozen((radius <= sizes[needed - 1]).astype(np.float64))


def _radius(band: Band) -> NDArray[np.int64]:
    """Return the shell of every bin, as an integer."""
    total = math.prod(band.size)
    axes = [np.minimum(np.arange(n), n - np.arange(n)) * (total // n) for n in band.size]
    grids = np.meshgrid(*axes, indexing="ij")
    rectangle = band.kind == "rectangle"
    radius: NDArray[np.int64] = (
        np.maximum.reduce(grids) if rectangle else np.add.reduce([grid * grid for grid in grids])
    )
    return radius


def _sliced(band: Band) -> Array:
    """Return the gains of a slice after the inverse transform has made the result real.

    One axis: the real part averages bins k and -k. Two axes: the inverse reads columns 0 .. Q/2
    only, so a bin's mirror follows it, and columns 0 and Q/2 are averaged with their mirrors.
    """
    kept = []
    for axis, (n, corner) in enumerate(zip(band.size, band.block, strict=True)):
        stored = n // 2 + 1 if axis == 1 else n
        mask = np.zeros(stored, dtype=bool)
        mask[:corner] = True
        mask[-1] = True
        kept.append(mask)
    if len(band.size) == 1:
        (full,) = kept
        return (full.astype(np.float64) + _mirrored(full.astype(np.float64))) / 2
    rows, columns = (mask.astype(np.float64) for mask in kept)
    q = band.size[1]
    gains = np.zeros(band.size)
    for j, column in enumerate(columns):
        if j in (0, q - j):
            gains[:, j] = column * (rows + _mirrored(rows)) / 2
        else:
            gains[:, j] = column * rows
            gains[:, q - j] = column * _mirrored(rows)
    return gains


def _mirrored(row: Array) -> Array:
    """Return an array with entry -k mod n at k."""
    return np.roll(row[::-1], 1)


@lru_cache(maxsize=256)
def _inverse(band: Band, power: int) -> Array:
    # Gains are even, so the inverse transform is real.
    return _frozen(np.ascontiguousarray(np.fft.ifftn(band.gains**power).real))


@lru_cache(maxsize=256)
def _retained(band: Band) -> tuple[NDArray[np.int64], ...]:
    half = band.gains[..., : band.size[-1] // 2 + 1]
    indices = np.nonzero(half)
    for index in indices:
        index.setflags(write=False)
    return indices
