"""Make a certified noise law a cumulative table of short words, and bound the difference."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, pairwise

import torch

from ...base import validate as check
from ...base.laws import GAUSSIAN, LAPLACE, LAWS, gaussian_tail
from ...base.masses import gaussian_masses, laplace_masses

HIGH_BITS = 62
"""Bits of an index that are compared as one int64; the others decide ties."""


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
        check.integer(8, 2 * HIGH_BITS, word_bits=self.word_bits)

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

    def magnitude(self, high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
        """Return k for ``W = high 2^(w - h) + low``, int64; ``high`` has h = min(w, 62) bits."""
        rest = max(0, self.word_bits - HIGH_BITS)
        table = self.cumulative[:-1]
        heads = torch.tensor([entry >> rest for entry in table], dtype=torch.int64)
        k = torch.searchsorted(heads, high, right=True)
        if rest:
            first = torch.searchsorted(heads, high, right=False)
            for i in (k != first).nonzero().flatten().tolist():  # as rare as 2^-62
                word = (int(high[i]) << rest) | int(low[i])
                k[i] = bisect_right(table, word)
        return k


__all__ = ["HIGH_BITS", "CdtLaw", "magnitudes"]
