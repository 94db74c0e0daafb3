"""Exact masses of the two noise distributions, and the Gaussian's path ``s -> P_s``.

``docs/noise.md`` has the mathematics. Everything here is integers; ``Profile.as_float`` gives the
same in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import InvalidInput
from .laws import COLUMNS, ESCAPE, LAPLACE_RESTARTS, TOTAL

FINE = 256
"""Values of the Gaussian's second uniform: the path ``s -> P_s`` is linear on 1/256 of a cell."""

TAIL_BITS = 128
GAUSSIAN_UNIT_BITS = 25 + TAIL_BITS
"""Signed Gaussian masses are integers in units of 2^-153."""

CUT_BITS = 110
"""The tail beyond the first magnitude with one-sided mass < 2^-110 is made geometric."""


def checked_counts(counts: Sequence[int]) -> tuple[int, ...]:
    """Return counts that are 256 positive integers with sum 2^24; else raise ``InvalidInput``."""
    if len(counts) != COLUMNS or min(counts) < 1 or sum(counts) != TOTAL:
        raise InvalidInput(
            "counts",
            expected=f"{COLUMNS} positive integers with sum {TOTAL}",
            got=f"{len(counts)} with sum {sum(counts)}, least {min(counts, default=0)}",
            remedy="Pass the magnitude counts of a law, the escape last.",
        )
    return tuple(counts)


def gaussian_masses(counts: Sequence[int], tail: Sequence[int]) -> list[int]:
    """Return ``P(K = k) = P(K = -1 - k)``, k = 0, 1, ..., in units of 2^-153; they add to 2^152."""
    counts = checked_counts(counts)
    survival = [1 << TAIL_BITS, *tail, 0]
    if any(after >= before for before, after in pairwise(survival)):
        raise InvalidInput(
            "tail",
            expected=f"integers strictly decreasing from below 2^{TAIL_BITS} to above 0",
            got=f"{len(tail)} integers that are not",
            remedy="Pass the table of dpkern.base.laws.gaussian_tail().",
        )
    body = [count << TAIL_BITS for count in counts[:ESCAPE]]
    return body + [counts[ESCAPE] * (before - after) for before, after in pairwise(survival)]


def laplace_masses(counts: Sequence[int], restarts: int = LAPLACE_RESTARTS) -> list[int]:
    """Return ``P(K = k) = P(K = -1 - k)``, k = 0 .. 255 (restarts + 1).

    The unit is 2^-(24 (restarts + 1) + 1).

    The last magnitude holds all that escapes from the last restart.
    """
    counts = checked_counts(counts)
    escape = counts[ESCAPE]
    rounds = [
        [escape**r * count * TOTAL ** (restarts - r) for count in counts[:ESCAPE]]
        for r in range(restarts + 1)
    ]
    return [*(mass for turn in rounds for mass in turn), escape ** (restarts + 1)]


def sd_cells(masses: Sequence[int], carry_variance: Fraction) -> float:
    """Return the standard deviation in cells of ``y = K + carry``, ``K`` symmetric about -1/2."""
    second = sum(mass * (2 * k + 1) ** 2 for k, mass in enumerate(masses))
    return math.sqrt(Fraction(second, 4 * sum(masses)) + carry_variance)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The Gaussian's idealised law of ``K``: exact to the cut, geometric beyond.

    Attributes:
        cells: ``p(k)`` for k = -cut-1 .. cut; the two last magnitudes on each side, ``cut - 1``
            and ``cut``, already stand in the ratio of the geometric tail.
        tails: one-sided masses of the magnitudes >= cut-1, >= cut, >= cut+1.
        total: the mass of everything, in the unit of the other fields.
        cut_log2: see ``Certificate``.
    """

    cells: npt.NDArray[Any]
    tails: tuple[Any, Any, Any]
    total: Any
    cut_log2: float

    def as_float(self) -> Profile:
        """Return the same as probabilities, each correctly rounded to float64."""
        return Profile(
            cells=np.array([mass / self.total for mass in self.cells.tolist()]),
            tails=(
                self.tails[0] / self.total,
                self.tails[1] / self.total,
                self.tails[2] / self.total,
            ),
            total=1.0,
            cut_log2=self.cut_log2,
        )


def idealise(masses: Sequence[int]) -> Profile:
    """Replace the tail beyond the cut by a geometric one of the same mass, in integers.

    With ``a = p(cut - 1)`` and ``R`` the mass from ``cut`` on, the ratio is ``R / (a + R)``:
    then ``p(cut) = R a / (a + R)`` and the three tail masses are ``a + R, R, R^2 / (a + R)``.
    Everything is scaled by ``a + R`` to stay an integer.
    """
    survival = list(accumulate(reversed(masses)))[::-1]
    limit = 1 << (GAUSSIAN_UNIT_BITS - CUT_BITS)
    cut = next((k for k, mass in enumerate(survival) if mass < limit), len(masses))
    if cut == len(masses):
        raise InvalidInput(
            "tail",
            expected=f"a tail that reaches one-sided mass 2^-{CUT_BITS}",
            got=f"one that ends at 2^{math.log2(survival[-1]) - GAUSSIAN_UNIT_BITS:.1f}",
            remedy="Continue the tail table further out.",
        )
    last, rest = masses[cut - 1], survival[cut]
    scale = last + rest
    half = [mass * scale for mass in masses[:cut]] + [rest * last]
    return Profile(
        cells=np.array(half[::-1] + half, dtype=object),
        tails=(scale * scale, scale * rest, rest * rest),
        total=scale << GAUSSIAN_UNIT_BITS,
        cut_log2=math.log2(2 * rest) - GAUSSIAN_UNIT_BITS,
    )


def path_cells(
    profile: Profile, interval: int, end: int
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return masses of ``P_s`` at one end of a phase interval, and their derivatives inside it.

    ``P_s`` mixes ``p`` shifted by 0, 1 and 2 cells. At the end ``end`` (0 left, 1 right) of
    interval ``k`` of 0 .. 255 the weights times 256^2 are ``w0 = (256-k)(257-k-2 end)/2``,
    ``w2 = k(k-1+2 end)/2`` and the rest. Inside, ``dP_s(j)/ds`` is constant.

    Returns:
        ``(mass, slope)``, both in units of ``profile.total * 256^2``; the first two entries are
        the infinite tails to the left and to the right, each with constant ``slope / mass``.
    """
    p, k = profile.cells, interval
    w0 = (FINE - k) * (FINE - k + 1 - 2 * end) // 2
    w2 = k * (k - 1 + 2 * end) // 2
    w1 = FINE * FINE - w0 - w2
    here, back, back2 = p[2:], p[1:-1], p[:-2]
    mass = w0 * here + w1 * back + w2 * back2
    slope = FINE * ((FINE - k) * (back - here) + k * (back2 - back))

    inner, outer = p[-2], p[-1]
    wide, middle, narrow = profile.tails
    left = w0 * wide + w1 * middle + w2 * narrow
    right = w0 * narrow + w1 * middle + w2 * wide
    left_slope = -FINE * ((FINE - k) * inner + k * outer)
    right_slope = FINE * ((FINE - k) * outer + k * inner)
    return (
        np.concatenate([np.array([left, right], dtype=p.dtype), mass]),
        np.concatenate([np.array([left_slope, right_slope], dtype=p.dtype), slope]),
    )
