"""Lines of a map's transform as the compiled kernels take them: frequencies, costs and errors.

A ``FrequencyLine`` is one product with cosines and sines, folded about the line's centre. A
``LongLine`` is transformed in two levels of them, ``n = n1 n2`` with phases between. The proof of
the errors is in ``docs/spectral.md``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from ._band import Array, half_weights

Integers = NDArray[np.int64]
LONGEST = 64
"""Values on an axis up to which lines have one level: two take longer below."""
LONGEST_WHOLE = 256
"""Values on an axis of a volume up to which devices take one level."""
_FACTORS = 256, 128
"""The longest lines of the first and of the second level."""
PART = 16
"""Products of a long line's sums that are added up by themselves, ``kPart`` of the CPU kernel."""
_CALL = 40
"""Products that a line of the first or the second level costs besides its own."""


@dataclass(frozen=True)
class FrequencyLine:
    """``count`` values, ``step`` apart, on a circle of ``n``.

    Attributes:
        shared: whether frequencies k and n/2 - k share products where they can.
    """

    n: int
    count: int
    step: int
    shared: bool = True

    @property
    def split(self) -> bool:
        """Whether frequencies k and n/2 - k share products."""
        return self.shared and self.n % 2 == 0 and self.step % 2 == 1

    @property
    def terms(self) -> int:
        """Products in the longest sum."""
        half = self.count // 2
        return half // 2 + 1 if self.split else half + 1

    @property
    def products(self) -> int:
        """All of them."""
        return len(self.frequencies) * self.terms * 2

    @property
    def origin(self) -> int:
        """The value that has the phase 0."""
        return self.count // 2

    @property
    def frequencies(self) -> Integers:
        """Those along a column in the kernel's order, one of which may stand there twice."""
        first = np.arange((self.n // 4 if self.split else self.n // 2) + 1)
        return np.stack([first, self.n // 2 - first], 1).ravel() if self.split else first

    @property
    def weights(self) -> Array:
        """The number of frequencies that each one stands for, 0 for a second copy."""
        weights: Array = half_weights(self.n)[self.frequencies]
        if self.split and self.n % 4 == 0:
            weights[-1] = 0
        return weights

    def error(
        self, dtype: torch.dtype, part: int | None = None, products: int | None = None
    ) -> float:
        """Return the error of the sums relative to their exact norm, from above.

        ``gamma ||B||_2`` with ``B`` the absolute values of the isometry that the line is, and
        ``||B||_2^2 <= ||B||_1 ||B||_inf``.

        Args:
            dtype: of the sums.
            part: products that are added up by themselves. None means all.
            products: of the longest sum. None means ``terms``.
        """
        unit = torch.finfo(dtype).eps / 2
        terms = products or self.terms
        part = part or terms
        # A coefficient, the sum, the sum of even and odd terms, and one to spare; float64
        # coefficients are off by more than one rounding.
        roundings = min(part, terms) + -(-terms // part) - 1
        roundings += 3 if dtype is torch.float32 else 8
        gamma = roundings * unit / (1 - roundings * unit)
        turns = np.outer(np.arange(self.n // 2 + 1), np.arange(self.count) * self.step) % self.n
        scale = np.sqrt(half_weights(self.n) / self.n)[:, None]
        parts = np.abs(np.concatenate([table[turns] * scale for table in circle(self.n)]))
        return float(gamma * math.sqrt(parts.sum(0).max() * parts.sum(1).max()) * (1 + 1e-9))


@dataclass(frozen=True)
class LongLine:
    """A line of ``n = first * second`` values in two levels, ``step`` prime to ``n``.

    The kernel takes the values as if they were next to one another: the spectrum of those at
    ``step`` j is the same at ``step`` times the frequency.

    Attributes:
        first: length of the first level's lines, ``n1``.
        shared: whether the kernel folds values about an origin in the line's middle, and has
            frequencies of a line of real numbers once. Others add up values as they stand.
    """

    n: int
    count: int
    step: int
    first: int
    shared: bool = True

    @property
    def second(self) -> int:
        """``n2``."""
        return self.n // self.first

    @property
    def levels(self) -> tuple[FrequencyLine, FrequencyLine]:
        """A line of each level; a sequence of the first has zeros behind its last value."""
        terms = -(-self.count // self.second)
        first = FrequencyLine(self.first, terms, 1, self.shared)
        return first, FrequencyLine(self.second, self.second, 1, self.shared)

    @property
    def products(self) -> int:
        """Products of a line of real numbers."""
        first, second = self.levels
        half = self.first // 2 + 1
        if not self.shared:
            return half * self.second * (2 * first.count + 4 * self.second)
        turns = 4 * half * self.second
        return self.second * (first.products + _CALL) + turns + half * (2 * second.products + _CALL)

    @property
    def origin(self) -> int:
        """The value that has the phase 0."""
        return self.second * (self.levels[0].count // 2) + self.second // 2 if self.shared else 0

    @cached_property
    def frequencies(self) -> Integers:
        """All of them in the kernel's order ``[k1, m]``, ``k1 + n1 m`` of values without steps."""
        dense = np.arange(self.first)[:, None] + self.first * np.arange(self.second)
        return dense.ravel() * pow(self.step, -1, self.n) % self.n

    @cached_property
    def _kept(self) -> Integers:
        """The number of frequencies that a line of real numbers has at each ``k1 <= n1 / 2``."""
        kept = np.full(self.first // 2 + 1, self.second)
        if self.shared:
            kept[0] = self.second // 2 + 1
            if self.first % 2 == 0:
                kept[-1] = -(-self.second // 2)
        return kept

    @cached_property
    def halves(self) -> Integers:
        """Those of a line of real numbers: a frequency, its conjugate one, or both."""
        rows = self.frequencies.reshape(self.first, self.second)
        return np.concatenate([row[:k] for row, k in zip(rows, self._kept, strict=False)])

    @cached_property
    def stands(self) -> Array:
        """The number of frequencies that each of ``halves`` stands for, itself included."""
        if self.shared:
            return np.where(2 * self.halves % self.n == 0, 1.0, 2.0)
        weights: Array = np.repeat(half_weights(self.first), self._kept)
        return weights

    def error(self, dtype: torch.dtype) -> float:
        """Return the error of the spectrum relative to its exact norm, from above."""
        unit = torch.finfo(dtype).eps / 2
        roundings = 3 if dtype is torch.float32 else 8
        turn = math.sqrt(2) * roundings * unit / (1 - roundings * unit)
        both = math.sqrt(2)  # real and imaginary parts meet, each a real line's sums
        if self.shared:
            # Folding, and the meeting of both parts, in either level; a frequency that stands for
            # its conjugate counts twice in the second.
            first, second = (line.error(dtype, PART) for line in self.levels)
            folded, twice = [unit] * 4, both
        else:
            first, second = (line.error(dtype, PART, 2 * line.count) for line in self.levels)
            folded, twice = [], 1.0
        return chained(*folded, both * first, turn, both * twice * second) * (1 + 1e-9)


def chained(*errors: float) -> float:
    """Return the error of maps behind one another, ``(1 + e_1)(1 + e_2) .. - 1``.

    Errors of float64 are some of its roundings, which ``1 + e`` would round away.
    """
    return math.expm1(sum(map(math.log1p, errors)))


@lru_cache(maxsize=1024)
def long_line(n: int, count: int, step: int, shared: bool = True) -> LongLine | None:
    """Return the two levels with the fewest products; None where no kernel takes them."""
    lines = [
        LongLine(n, count, step, first, shared)
        for first in range(1, _FACTORS[0] + 1)
        if n % first == 0 and n // first <= _FACTORS[1]
    ]
    return min(lines, key=lambda line: line.products, default=None)


def whole_line(n: int, count: int, step: int) -> LongLine:
    """Return a line in one level, whose values a kernel adds up as they stand."""
    return LongLine(n, count, step, n, shared=False)


@lru_cache(maxsize=256)
def circle(n: int) -> Array:
    """Return cosines and sines of ``2 pi m / n``, ``[2, n]``, with the exact zeros and ones."""
    quarter, rest = np.divmod(4 * np.arange(n), n)  # a quarter of the circle has n steps here
    near = 2 * rest <= n
    angle = np.where(near, rest, n - rest) * (math.pi / (2 * n))
    cosine = np.where(near, np.cos(angle), np.sin(angle))
    sine = np.where(near, np.sin(angle), np.cos(angle))
    signs = [(cosine, sine), (-sine, cosine), (-cosine, -sine), (sine, -cosine)]
    table: Array = np.stack([np.choose(quarter, [pair[part] for pair in signs]) for part in (0, 1)])
    return table + 0.0


__all__ = [
    "LONGEST",
    "LONGEST_WHOLE",
    "PART",
    "FrequencyLine",
    "Integers",
    "LongLine",
    "chained",
    "circle",
    "long_line",
    "whole_line",
]
