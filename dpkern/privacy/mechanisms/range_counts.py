"""Noisy counts of a table's numbers by order of magnitude, from which ranges of columns are read.

Every column has the same public bins: zero (magnitudes up to 2^-41), and for each sign and each
exponent k = -40 .. 63 the magnitudes in (2^(k-1), 2^k]; what is larger is counted in the last bin.
A record adds s lattice units to one bin of each of the d columns, or to none where its cell is
blank. So the norm of its contribution is at most ``s sqrt(d)``, in integers, and is attained. All
counts of all columns are released once, with Gaussian lattice noise of 2^20 on every bin: one
Gaussian release of multiplier ``2^20 / (s sqrt(d))``, certified for released bits. The ranges that
are read from the counts are post-processing.

Reference: Dwork and Lei, Differential Privacy and Robust Statistics, 2009 (scales from noisy counts
of bins). Smith, Privacy-preserving Statistical Estimation with Optimal Convergence Rates, 2011,
chooses quantiles by the exponential mechanism; here counts are noised instead, because d Gaussian
releases compose with each other and with the steps of a training run without loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...base.laws import SCALE_UNITS
from ...base.validate import choice, integer, that
from ..accounting import RELATIONS, calibrate
from .certify import exact_multiplier
from .gaussian_sums import GaussianSums

MIN_EXPONENT, MAX_EXPONENT = -40, 63
EXPONENTS = MAX_EXPONENT - MIN_EXPONENT + 1
BINS = 2 * EXPONENTS + 1
"""The bins of a column: negative numbers, the largest magnitude first; zero; positive numbers."""

ZERO = EXPONENTS
"""The bin of zero."""


@dataclass(frozen=True, kw_only=True)
class RangeCounts:
    """The release of noisy counts of a table's columns.

    Args:
        columns: d, number of columns.
        unit: s, lattice units by which one number raises its bin's count.
        neighbouring: the relation under which it is accounted.

    Raises:
        InvalidInput: a field out of its range.
    """

    columns: int
    unit: int
    neighbouring: str = "add_remove"

    def __post_init__(self) -> None:
        integer(1, columns=self.columns)
        integer(1, unit=self.unit)
        choice(RELATIONS, neighbouring=self.neighbouring)

    @classmethod
    def for_epsilon(
        cls, epsilon: float, delta: float, *, columns: int, neighbouring: str = "add_remove"
    ) -> RangeCounts:
        """Return the release with the least noise that is (epsilon, delta)-private by itself.

        Raises:
            InvalidInput: more columns than integers of this size can count.
            PrivacyError: an epsilon that no certified noise meets.
        """
        wanted = calibrate(
            GaussianSums(1.0, columns * BINS, neighbouring),
            target_epsilon=epsilon,
            sample_rate=1.0,
            steps=1,
            delta=delta,
        )
        unit = int(SCALE_UNITS / (wanted.noise_multiplier * math.sqrt(columns)))
        while unit and _multiplier(columns, unit) < wanted.noise_multiplier:
            unit -= 1
        that(
            unit >= 1,
            "columns",
            "so few that each still counts under this epsilon",
            columns,
            "Give more columns a public range, or raise the epsilon.",
        )
        return cls(columns=columns, unit=unit, neighbouring=neighbouring)

    @property
    def noise_multiplier(self) -> float:
        """Noise scale over the norm of one record's contribution, rounded down."""
        return _multiplier(self.columns, self.unit)

    @property
    def sd(self) -> float:
        """The standard deviation of the noise of one count, in records."""
        return SCALE_UNITS / self.unit

    @property
    def sums(self) -> GaussianSums:
        """The release as the accounting takes it."""
        return GaussianSums(self.noise_multiplier, self.columns * BINS, self.neighbouring)


def _multiplier(columns: int, unit: int) -> float:
    return exact_multiplier([math.isqrt(columns * unit * unit - 1) + 1])
