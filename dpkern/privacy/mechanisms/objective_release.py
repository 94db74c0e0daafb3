"""Objective release: one noisy release of the sums that a loss of degree 2 consists of.

A record is a vector of integers p (public features of a row, ``||p||_2 <= R``) and a label y of K
classes. The sum over all records of

    u(p, y) = (5 p_j^2 for all j;  7 p_j p_k for all j < k;  t_k(y) p_j for all j, k),
    t_k(y)  = on if k = y, else off,

is released once, with Gaussian lattice noise of 2^20 on every coordinate. Ridge regression and the
logistic loss to second order see the data through these sums alone, so every training on them is
post-processing: epochs, regularisation and trials cost nothing.

Sensitivity, add or remove one record, in integers:

    ||u||^2 = 25 sum p_j^4 + 49 sum_{j<k} p_j^2 p_k^2 + ||t||^2 ||p||^2 <= 25 R^4 + T^2 R^2,

*Proof.* ``49 <= 2 * 25``, and ``sum p_j^4 + 2 sum_{j<k} p_j^2 p_k^2 = ||p||^4``; t(y) has the same
norm T for every label. Both terms grow with ``||p||``. It is attained by ``p = R e_j``.

7 / 5 stands for sqrt(2): with it the noise of the symmetric matrix ``sum p p^T`` is as good as
isotropic, off the diagonal with 1 / sqrt(2) of its standard deviation on it.

References: Zhang et al., Functional Mechanism, 2012 (noise on a loss's coefficients); Balle and
Wang, Improving the Gaussian Mechanism, 2018.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from ...base.errors import InvalidInput
from ...base.laws import SCALE_UNITS
from ...base.validate import choice, integer, open_unit, positive, that
from ..accounting import Certificate, calibrate, certify, events
from ..accounting.events import EventSpec
from ..accounting.history import NOTHING
from ._statement import MODES
from .certify import exact_multiplier
from .examples import FEATURE, Audit
from .gaussian_sums import GaussianSums
from .notes import Note
from .objective import SEEDED, ObjectivePerturbation, checked_epsilon

DIAGONAL, ACROSS = 5, 7
"""Factors of squares and of products of two features."""

MAX_WEIGHT = 1024.0
"""The largest weight: above it one sum has no noise to speak of, the other nothing else."""

MAX_LENGTH = 1 << 14
MAX_CLASSES = 1 << 16
"""The largest sizes; a matrix of 2^14 features takes 2 GiB."""


@dataclass(frozen=True, kw_only=True)
class ObjectiveRelease(ObjectivePerturbation):
    """The objective release mechanism: noisy sums of features' moments, once, for any training.

    Args:
        epsilon: of the whole release; the noise is calibrated so that no more is certified.
            Infinity adds no noise.
        delta: of (epsilon, delta).
        length: D, number of features of a record.
        classes: K, public number of labels.
        weight: largest contribution to the first moments (features by class) over that to the
            second; 1.5 was best on public digits.
        mode: both do the same; there is no paper whose claim could differ.

    Raises:
        InvalidInput: a field out of its range, or so little noise or so many features that
            integers of this size cannot hold them.
    """

    name: ClassVar[str] = "objective-release"
    trained_by: ClassVar[str | None] = "sums of rows"
    audits: ClassVar[tuple[Audit, ...]] = (
        Audit(
            releases="sums",
            fields={"epsilon": 1.0, "length": 4, "classes": 2},
            shapes=FEATURE,
            takes=(),
        ),
    )

    epsilon: float
    delta: float = 1e-5
    length: int
    classes: int
    weight: float = 1.5
    mode: str = "corrected"

    def __post_init__(self) -> None:
        choice(MODES, mode=self.mode)
        object.__setattr__(self, "epsilon", checked_epsilon(self.epsilon))
        open_unit(delta=self.delta)
        integer(1, MAX_LENGTH, length=self.length)
        integer(2, MAX_CLASSES, classes=self.classes)
        object.__setattr__(self, "weight", positive(weight=self.weight))
        that(
            1 / MAX_WEIGHT <= self.weight <= MAX_WEIGHT,
            "weight",
            f"a number in [{1 / MAX_WEIGHT:g}, {MAX_WEIGHT:g}]",
            self.weight,
            "Start with 1.5: it divides the noise between the two sums.",
        )
        if self.radius**2 < self.length or self.targets[0] == self.targets[1]:
            raise InvalidInput(
                "epsilon",
                expected=f"more, or fewer features: {self.length} need integers up to "
                f"{math.isqrt(self.length - 1) + 1}, and the noise allows {max(self.radius, 0)}",
                got=self.epsilon,
                remedy="Raise epsilon or delta, bring weight near 1.5, or take fewer features.",
            )

    @property
    def claim_text(self) -> str:
        """The source of the claim, in words; the same in both modes."""
        return "what is certified, if the key stays secret"

    @property
    def noisy(self) -> bool:
        """Whether there is any noise."""
        return math.isfinite(self.epsilon)

    @property
    def coordinates(self) -> int:
        """The number of released numbers, ``D (D + 1) / 2 + D K``."""
        return self.length * (self.length + 1) // 2 + self.length * self.classes

    @cached_property
    def reach(self) -> int:
        """M, the largest norm that a record's contribution may have, in lattice units."""
        if not self.noisy:
            return SCALE_UNITS
        wanted = calibrate(
            GaussianSums(1.0, self.coordinates),
            target_epsilon=self.epsilon,
            sample_rate=1.0,
            steps=1,
            delta=self.delta,
        )
        return int(SCALE_UNITS / wanted.noise_multiplier)

    @cached_property
    def radius(self) -> int:
        """R, the largest integer for which ``25 R^4 + T^2 R^2 <= M^2``."""
        spread = math.sqrt(1 + self.weight**2)
        radius = math.isqrt(int(self.reach / (DIAGONAL * spread))) + 2
        while radius > 0 and self._squared(radius) > self.reach**2:
            radius -= 1
        return radius

    @property
    def targets(self) -> tuple[int, int]:
        """``(on, off)``: a label's entry of t, and the others'; their mean is nearly 0."""
        return self._targets(self.radius)

    def _targets(self, radius: int) -> tuple[int, int]:
        k = self.classes
        size = self.weight * DIAGONAL * radius / math.sqrt(1 - 1 / k)  # on - off
        return round(size * (1 - 1 / k)), -round(size / k)

    def _squared(self, radius: int) -> int:
        on, off = self._targets(radius)
        norm = on * on + (self.classes - 1) * off * off
        return DIAGONAL**2 * radius**4 + norm * radius**2

    @property
    def squared_sensitivity(self) -> int:
        """The square of the largest contribution, ``25 R^4 + T^2 R^2``, at most ``M^2``."""
        return self._squared(self.radius)

    @property
    def noise_multiplier(self) -> float:
        """Noise scale over sensitivity, rounded down."""
        if not self.noisy:
            return 0.0
        squared = self.squared_sensitivity
        bound = math.isqrt(squared - 1) + 1
        return exact_multiplier([bound])

    def event_spec(self, *, visits: int = 1) -> EventSpec:
        """Return the one Gaussian release; trainings on it are no visits."""
        del visits
        return events.gaussian(self.noise_multiplier)

    @cached_property
    def _found(self) -> Certificate:
        return certify(
            GaussianSums(self.noise_multiplier, self.coordinates),
            sample_rate=1.0,
            steps=1,
            delta=self.delta,
        )

    def epsilon_certified(self, *, visits: int = 1) -> float:
        """Return the proved epsilon at ``delta``, for any number of trainings."""
        integer(0, visits=visits)
        return self._found.epsilon

    def certificate(
        self, *, visits: int = 1, seeded: bool, coordinates: int | None = None
    ) -> Certificate:
        """Return the certificate of the release; infinite with a known seed.

        Args:
            visits: trainings; they cost nothing.
            seeded: whether the noise comes from a known seed.
            coordinates: the released numbers, which the mechanism knows.
        """
        del visits, coordinates
        if seeded:
            notes = (*self._found.notes, SEEDED)
            return replace(self._found, epsilon=math.inf, certified_for=NOTHING, notes=notes)
        return self._found

    def certified_delta(self, *, visits: int = 1, coordinates: int = 0) -> float:
        """Return ``delta``, which the noise's cut tails are part of."""
        del visits, coordinates
        return self.delta

    @property
    def relation(self) -> str:
        """The neighbouring relation: add or remove one record; the number of records is secret."""
        return self._found.relation

    @property
    def accountant(self) -> str:
        """The accountant of the certified epsilon."""
        return self._found.accountant

    @property
    def certified_for(self) -> str:
        """``released bits``: sums of integers, and integer noise."""
        return self._found.certified_for

    @property
    def notes(self) -> tuple[Note, ...]:
        """No notes: no source is known to err in this."""
        return ()

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as JSON values, with what follows from it."""
        on, off = self.targets
        derived: Mapping[str, Any] = {
            "radius": self.radius,
            "targets": [on, off],
            "noise_multiplier": self.noise_multiplier,
            "released_numbers": self.coordinates,
        }
        return {**super().to_dict(), **derived}
