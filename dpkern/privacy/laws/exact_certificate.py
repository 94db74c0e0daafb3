"""Prove the Gaussian certificate without rounding: integers and ball arithmetic.

Masses and derivatives are integers, events are sorted by exact comparison, sums are integer sums.
Only ``I(b) = phi(Phi^-1(b))`` is not rational: for each event a float64 guess ``z`` is *verified*
to satisfy ``Phi(-z) <= b`` with balls (Arb through python-flint, an extra of development); then
``I(b) >= phi(z)`` because I increases on [0, 1/2], and ``64 d / phi(z)`` bounds the ratio from
above. No float64 value enters a conclusion.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cmp_to_key
from itertools import accumulate
from statistics import NormalDist
from typing import Any

from ...base.laws import GAUSSIAN, SCALE_CELLS, gaussian_tail
from ...base.masses import FINE, Profile, gaussian_masses, idealise, path_cells
from ...base.validate import require
from .certificate import LawCheck, gaussian_certificate

PRECISION_BITS = 128
_SLACK = 2.0**-40
_ATTEMPTS = 8


def _steeper(first: tuple[float, int, int], second: tuple[float, int, int]) -> int:
    """Compare ``slope / mass`` of two cells exactly, the steeper first; masses are positive."""
    left, right = first[2] * second[1], second[2] * first[1]
    return (right > left) - (right < left)


def envelope(profile: Profile, interval: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield vertices ``(b, d, side)`` of the largest derivative over events of each mass.

    Sorting the cells by ``slope / mass`` and accumulating gives the vertices of the concave
    envelope of ``(P(A), dP(A)/ds)`` over all (randomised) events A. Those with mass above 1/2 are
    given by their complement: ``b`` is the smaller mass and ``side`` is -1.

    Yields:
        integers in units of ``profile.total * 256^2``; ``0 < 2 b <= total``. The empty and the
        full event, where both sides of the inequality are 0, are left out.
    """
    mass, slope = path_cells(profile, interval, end)
    cells = [(g / q, q, g) for q, g in zip(mass.tolist(), slope.tolist(), strict=True)]
    # int / int rounds correctly and is therefore monotone, so this order is right except inside
    # ties; the exact sort confirms it in one linear pass and settles the ties.
    cells.sort(key=lambda cell: -cell[0])
    cells.sort(key=cmp_to_key(_steeper))
    total = profile.total * FINE**2
    below = list(accumulate(cell[1] for cell in cells))
    slopes = list(accumulate(cell[2] for cell in cells))
    if below[-1] != total or slopes[-1] != 0:
        raise AssertionError("the masses of P_s do not sum to 1 or its derivatives not to 0")
    for b, d in zip(below[:-1], slopes[:-1], strict=True):
        yield (b, d, 1) if 2 * b <= total else (total - b, d, -1)


class _Prover:
    """A prover of upper bounds of ``64 d / I(b)`` by balls."""

    def __init__(self, flint: Any, total: int) -> None:
        self.arb = flint.arb
        self.total = self.arb(total)
        self.root_half = self.arb(0.5).sqrt()
        self.to_density = self.arb(SCALE_CELLS) * (2 * self.arb.pi()).sqrt() / self.total
        self.denominator = total

    def ratio(self, b: int, d: int) -> tuple[float, float]:
        """Return ``(r, z)`` with ``64 (d / total) <= r I(b / total)``, r rounded up."""
        guess = -NormalDist().inv_cdf(b / self.denominator)
        slack = _SLACK
        for _ in range(_ATTEMPTS):
            z = self.arb(guess * (1 + slack) + slack)
            # Phi(-z) total <= b, certainly: a ball comparison is true only if it holds everywhere.
            if (z * self.root_half).erfc() * self.total <= 2 * self.arb(b):
                bound = self.arb(d) * self.to_density * (z * z / 2).exp()
                if not bound.is_finite():
                    break
                return math.nextafter(float(bound.upper()), math.inf), guess
            slack *= 4
        return math.inf, guess


def gaussian(
    counts: Sequence[int] = GAUSSIAN.counts,
    tail: Sequence[int] | None = None,
    *,
    intervals: Iterable[int] = range(FINE),
) -> LawCheck:
    """Prove the isoperimetric test of a Gaussian law; ``worst_ratio`` is a rigorous upper bound.

    Args:
        counts: the 256 magnitude counts.
        tail: ``N_1, N_2, ...`` of ``laws.gaussian_tail``; ``None`` for the committed tail.
        intervals: which of the 256 phase intervals to test; only all of them are a proof.

    Raises:
        InvalidInput: for numbers that are no law.
        MissingDependency: python-flint is not installed.
    """
    flint = require("flint")
    tail = gaussian_tail() if tail is None else tail
    profile = idealise(gaussian_masses(counts, tail))
    tested = sorted(set(intervals))
    worst, worst_at, vertices = 0.0, math.nan, 0
    with flint.ctx.workprec(PRECISION_BITS):
        prover = _Prover(flint, profile.total * FINE**2)
        for interval in tested:
            for end in (0, 1):
                for b, d, side in envelope(profile, interval, end):
                    ratio, z = prover.ratio(b, d)
                    vertices += 1
                    if ratio > worst:
                        worst, worst_at = ratio, -side * z
    return gaussian_certificate(
        counts,
        tail,
        method="interval",
        cut_log2=profile.cut_log2,
        worst=worst,
        worst_at=worst_at,
        intervals=len(tested),
        vertices=vertices,
    )
