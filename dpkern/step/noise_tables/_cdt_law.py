"""Make a certified noise law a cumulative table of short words, and bound the difference."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, pairwise

import torch

from ...base import validate as check
from ...base.laws import GAUSSIAN, LAPLACE, LAWS, gaussian_tail
from ...base.masses import gaussian_masses, laplace_masses
from ...ops import _cdt

MOST_BITS = 124
"""The longest words: kernels compare 32 bits of an index, and 96 more where these do not decide."""


def magnitudes(law: str) -> tuple[list[int], int]:
    """Return ``P(k)`` of the certified law, k = 0, 1, ..., as integers, and their sum."""
    check.choice(LAWS, law=law)
    if law == "gaussian":
        masses = gaussian_masses(GAUSSIAN.counts, gaussian_tail())
    else:
        masses = laplace_masses(LAPLACE.counts)
    return masses, sum(masses)


@dataclass(frozen=True)
class CdtLaw:
    """The law that a table of ``word_bits``-bit words realises.

    ``C_k = round(2^w P(magnitude <= k))`` for the certified law's magnitudes; a fresh word
    ``W < 2^w`` gives the k with ``C_(k-1) <= W < C_k``. Sign and position inside the cell have bits
    of their own, as in the certified law, so the two laws differ in the magnitude alone.

    Args:
        law: ``gaussian`` or ``laplace``.
        word_bits: w, from 8 to 124.

    Raises:
        InvalidInput: numbers out of range.
    """

    law: str
    word_bits: int

    def __post_init__(self) -> None:
        check.choice(LAWS, law=self.law)
        check.integer(8, MOST_BITS, word_bits=self.word_bits)

    @cached_property
    def cumulative(self) -> tuple[int, ...]:
        """Cumulative counts C_0, C_1, ... up to the first that is 2^w."""
        masses, total = magnitudes(self.law)
        words = 1 << self.word_bits
        table: list[int] = []
        for below in accumulate(masses):
            table.append((2 * words * below + total) // (2 * total))
            if table[-1] == words:
                break
        return tuple(table)

    @cached_property
    def masses(self) -> tuple[int, ...]:
        """P(k) of the table in units of 2^-w."""
        return tuple(after - before for before, after in pairwise((0, *self.cumulative)))

    @cached_property
    def variation(self) -> Fraction:
        """Total variation distance of one coordinate from the certified law, exactly."""
        law, total = magnitudes(self.law)
        words = 1 << self.word_bits
        mine = [*self.masses, *([0] * (len(law) - len(self.masses)))]
        apart = sum(abs(m * total - p * words) for m, p in zip(mine, law, strict=True))
        return Fraction(apart, 2 * total * words)

    @property
    def variation_bound(self) -> float:
        """``variation`` as a float, rounded up."""
        return math.nextafter(float(self.variation), math.inf) if self.variation else 0.0

    @property
    def bits(self) -> int:
        """Memory of the table in bits: one word for each entry but the last."""
        return self.word_bits * (len(self.cumulative) - 1)

    @cached_property
    def table(self) -> torch.Tensor:
        """The table as kernels read it, int32: the boundaries below 2^w, and a guide to them."""
        return _cdt.packed(self.cumulative[:-1], self.word_bits)


__all__ = ["MOST_BITS", "CdtLaw", "magnitudes"]
