"""Bound the leak of a coordinate whose noise has finitely many values of finite precision.

For neighbours that differ by ``shift`` cells the outputs have masses p(x) and p(x - shift):

    delta(epsilon) = sum max(p(x) - e^epsilon p(x - shift), 0)      (the larger of both directions)
    floor          = sum of p(x) where p(x - shift) = 0             (no epsilon gets below)

Everything is done in integers, so a floor of 1e-13 is one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from statistics import NormalDist

from ._cdt_law import CdtLaw, magnitudes


@dataclass(frozen=True)
class Masses:
    """A law on the integers.

    Attributes:
        mass: positive integers by value.
        total: their sum.
    """

    mass: dict[int, int]
    total: int

    @classmethod
    def of(cls, items: Iterable[tuple[int, int]]) -> Masses:
        """Make the law of ``(value, mass)``; values may come more than once."""
        found: Counter[int] = Counter()
        for value, mass in items:
            found[value] += mass
        kept = {value: mass for value, mass in sorted(found.items()) if mass}
        return cls(kept, sum(kept.values()))

    def delta(self, shift: int, epsilon: float) -> float:
        """Return the smallest delta at this epsilon for neighbours ``shift`` apart."""
        factor = Fraction(math.exp(epsilon))
        top, bottom = factor.numerator, factor.denominator
        return max(
            float(
                Fraction(
                    sum(
                        max(0, p * bottom - self.mass.get(x - step, 0) * top)
                        for x, p in self.mass.items()
                    ),
                    self.total * bottom,
                )
            )
            for step in (shift, -shift)
        )

    def floor(self, shift: int) -> float:
        """Return the mass that only one of the neighbours can give: delta as epsilon grows."""
        return max(
            float(
                Fraction(
                    sum(p for x, p in self.mass.items() if x - step not in self.mass), self.total
                )
            )
            for step in (shift, -shift)
        )

    def worst_ratio(self, shift: int) -> tuple[float, float]:
        """Return the largest p(x) / p(x - shift): of all x, and of those that both can give."""
        ratios = [
            self.mass[x] / self.mass[x - step]
            for step in (shift, -shift)
            for x in self.mass
            if x - step in self.mass
        ]
        both = max(ratios, default=0.0)
        return (math.inf if self.floor(shift) > 0 else both), both

    def moments(self) -> tuple[float, float]:
        """Return mean and variance."""
        mean = Fraction(sum(x * p for x, p in self.mass.items()), self.total)
        square = Fraction(sum(x * x * p for x, p in self.mass.items()), self.total)
        return float(mean), float(square - mean * mean)

    def entropy(self) -> float:
        """Return the entropy in bits."""
        return -sum(p / self.total * math.log2(p / self.total) for p in self.mass.values())


def certified(law: str) -> Masses:
    """Return the certified law's released integer for a sum on a cell's edge."""
    return _released(magnitudes(law)[0])


def table(law: CdtLaw) -> Masses:
    """Return the same by a cumulative table of short words."""
    return _released(law.masses)


def _released(masses: Iterable[int]) -> Masses:
    """Return ``floor((K 2^14 + U1 + offset) / 2^14)``, K = k or -1 - k.

    U1 + offset carries with probability 1/2 (Laplace: half a cell), or with 64 U2 + 32 for the
    Gaussian with the mean of (64 u + 32) / 2^14 over u = 0 .. 255: 1/2 again.
    """
    return Masses.of(
        (value + carry, mass)
        for k, mass in enumerate(masses)
        for value in (k, -1 - k)
        for carry in (0, 1)
    )


def rounded_gaussian(word_bits: int, cells: int = 16) -> Masses:
    """Return a Gaussian of ``cells`` cells with cumulative probabilities of ``word_bits`` bits."""
    words, half = 1 << word_bits, []
    k = 0
    while True:
        # The upper tail is the lower one, which float64 holds to its last digit.
        beyond = 0.5 * math.erfc((k + 0.5) / cells / math.sqrt(2))
        half.append(math.floor(words * Fraction(beyond) + Fraction(1, 2)))
        if not half[-1]:
            break
        k += 1
    items = [(0, words - 2 * half[0])]
    for value, (inner, outer) in enumerate(pairwise(half), start=1):
        items += [(value, inner - outer), (-value, inner - outer)]
    return Masses.of(items)


def quantiles(entries: int, cells: int = 16) -> Masses:
    """Return a table of a Gaussian's equally likely quantiles, rounded to its cells."""
    normal = NormalDist()
    return Masses.of(
        (round(cells * normal.inv_cdf((i + 0.5) / entries)), 1) for i in range(entries)
    )


__all__ = ["Masses", "certified", "quantiles", "rounded_gaussian", "table"]
