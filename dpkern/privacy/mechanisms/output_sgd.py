"""DP-SGD for the autoencoder as SPOF describes it, and a form of it that can be certified.

    published   gbar_i = clip(dL/dz, C)_i + Lap(D_SGD / epsilon), propagated back to the weights
    corrected   clip of the whole gradient of a record, noise of constant scale on every weight

D_SGD (24)-(27) switches on the private gradient's norm, and codes and inputs enter the gradients
without noise: the published form certifies nothing. The corrected form is Laplace SGD with L1 norms
(scale ``2 C / epsilon``), or DP-SGD with L2 norms, of one record at a time; each visit costs.

Reference: SPOF, equations (14), (15), (24)-(27), algorithm 2.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

from torch import Tensor

from ...base.errors import InvalidInput
from ...base.laws import Distribution
from ...base.validate import choice, integer, open_unit, positive
from ..accounting import Certificate, calibrate, certify, events
from ..accounting.events import EventSpec
from ..accounting.history import NOTHING, REAL_SUMS
from ..theory import spof_sensitivity
from ..theory.spof_sensitivity import OUTPUT_GRADIENTS
from ._statement import MODES
from .dpsgd import DPSGD
from .examples import FEATURE, Audit
from .laplace_sgd import LaplaceSGD
from .notes import Note, notes
from .objective import (
    COORDINATES,
    MOST_TAIL,
    ObjectivePerturbation,
    checked_epsilon,
    cut_tail,
)

DISTRIBUTIONS = ("laplace", "gaussian")

_OF_ONE: dict[str, Any] = {"sampling": "fixed", "sample_rate": 1.0, "dataset_size": 1}
"""A record's own view: it is in every release that it is visited for."""


@dataclass(frozen=True, kw_only=True)
class OutputSGD(ObjectivePerturbation):
    """The DP-SGD of SPOF's algorithm 2, for the autoencoder.

    Args:
        epsilon: of one visit; ``math.inf`` adds no noise.
        mode: ``published`` or ``corrected``.
        max_grad_norm: C.
        output_gradient: dL/dz ``exact`` (s(z) - x), of the ``polynomial`` at z, or ``at_a`` as
            printed (1/2 - x), which does not depend on the weights.
        full_parameter: corrected only, and its default: clip and noise the gradient of all
            weights. False: noise dL/dz with a constant sensitivity, which protects the target only.
        distribution: with ``full_parameter``: ``laplace`` and L1 norms, or ``gaussian`` and L2.
        delta: with ``gaussian`` only: at which ``epsilon`` holds.

    Raises:
        InvalidInput: a field out of its range, or one that this mode does not have.
        PrivacyError: with ``full_parameter`` an epsilon for which the noise law is not certified.
    """

    name: ClassVar[str] = "output_sgd"
    trained_by: ClassVar[str | None] = None
    claims_visits: ClassVar[bool] = True
    # Corrected: a bound that the gradient of one record reaches.
    audits: ClassVar[tuple[Audit, ...]] = (
        Audit(
            releases="visits",
            fields={"epsilon": 1.0, "max_grad_norm": 0.1},
            published={"max_grad_norm": 4.0},
            shapes=FEATURE,
            takes=("steps", "shapes"),
        ),
    )

    epsilon: float
    mode: str = "corrected"
    max_grad_norm: float = 4.0
    output_gradient: str = "exact"
    full_parameter: bool | None = None
    distribution: Distribution = "laplace"
    delta: float = 1e-5

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", checked_epsilon(self.epsilon))
        choice(MODES, mode=self.mode)
        object.__setattr__(self, "max_grad_norm", self._checked_norm())
        choice(OUTPUT_GRADIENTS, output_gradient=self.output_gradient)
        open_unit(delta=self.delta)
        corrected = self.mode == "corrected"
        if self.full_parameter is None:
            object.__setattr__(self, "full_parameter", corrected)
        choice((True, False), full_parameter=self.full_parameter)
        choice(DISTRIBUTIONS, distribution=self.distribution)
        if self.full_parameter and not corrected:
            raise self._refused("full_parameter", "False with mode='published'")
        if self.full_parameter and self.output_gradient == "at_a":
            raise self._refused("output_gradient", "'exact' or 'polynomial' with full_parameter")
        if self.distribution == "gaussian" and not self.full_parameter:
            raise self._refused("distribution", "'laplace' without full_parameter")
        if self.full_parameter:
            _ = self.mechanism  # refuses an epsilon that it cannot certify

    def _checked_norm(self) -> float:
        if self.max_grad_norm == math.inf and self.epsilon == math.inf:
            return math.inf
        return positive(max_grad_norm=self.max_grad_norm)

    def _refused(self, name: str, expected: str) -> InvalidInput:
        return InvalidInput(
            name,
            expected=expected,
            got=getattr(self, name),
            remedy="Leave it out, or change the mode.",
        )

    @property
    def mechanism(self) -> LaplaceSGD | DPSGD:
        """The engine's mechanism of which every visit is one release, with ``full_parameter``."""
        return _mechanism(self.distribution, self.epsilon, self.max_grad_norm, self.delta)

    @property
    def noised(self) -> bool:
        """Whether there is noise."""
        return self.epsilon < math.inf

    @property
    def certified(self) -> bool:
        """Whether the trained weights are certified."""
        return self.noised and bool(self.full_parameter)

    @property
    def certified_for(self) -> str:
        """``real-number sums`` or ``nothing``."""
        return REAL_SUMS if self.certified else NOTHING

    def scale(self, features: int, norm: Tensor, total: Tensor | float = 1.0) -> float | Tensor:
        """Return the Laplace scale on dL/dz; 0 without noise.

        Args:
            features: n.
            norm: of each record's gradient before clipping; only the published scale depends on it.
            total: b_j of each record; likewise.
        """
        if not self.noised:
            return 0.0
        if self.mode == "corrected":
            bound = spof_sensitivity.sgd_bound(
                features, self.max_grad_norm, output_gradient=self.output_gradient
            )
            return bound / self.epsilon
        reach = spof_sensitivity.sgd_sensitivity(features, self.max_grad_norm, norm, total)
        return reach / self.epsilon

    def event_spec(self, *, visits: int = 1, coordinates: int = COORDINATES) -> EventSpec:
        """Return as many releases as visits; non-private without ``full_parameter``."""
        if integer(visits=visits) == 0:
            return events.no_op()
        if math.isinf(self.epsilon_certified(visits=visits, coordinates=coordinates)):
            return events.non_private()
        return events.repeated(self.mechanism.event_spec(coordinates), visits)

    def epsilon_certified(self, *, visits: int = 1, coordinates: int = COORDINATES) -> float:
        """Return epsilon of all visits: their pure sum for Laplace, at ``delta`` for Gaussian."""
        if integer(visits=visits) == 0:
            return 0.0
        if not self.certified:
            return math.inf
        if self.distribution == "laplace":
            total = self._pure(visits, coordinates)
            tail = cut_tail(total, coordinates, releases=visits)
            return math.inf if tail > MOST_TAIL else total
        given: dict[str, Any] = {"delta": self.delta, "dimension": coordinates}
        return certify(self.mechanism, steps=visits, **given, **_OF_ONE).epsilon

    @property
    def accountant(self) -> str:
        """The accountant of the certified epsilon."""
        if self.distribution == "gaussian":
            return "Gaussian releases composed, by dpkern.accounting"
        return super().accountant

    @property
    def claim_text(self) -> str:
        """The source of the claim ``epsilon_claimed``, in words."""
        if self.mode == "published":
            return "the source's claim for one visit of one record"
        return "what is certified of one visit, if the key stays secret"

    def certified_delta(self, *, visits: int = 1, coordinates: int = COORDINATES) -> float:
        """Return ``delta`` of all visits together for Gaussian noise; else the cut tails."""
        if self.distribution == "gaussian":
            return self.delta if visits and self.certified else 0.0
        epsilon = self.epsilon_certified(visits=visits, coordinates=coordinates)
        return cut_tail(epsilon, coordinates, releases=visits)

    def certificate(
        self, *, visits: int = 1, seeded: bool, coordinates: int = COORDINATES
    ) -> Certificate:
        """Return the base's certificate, for so many coordinates in all of its numbers."""
        epsilon = self.epsilon_certified(visits=visits, coordinates=coordinates)
        spec = self.event_spec(visits=visits, coordinates=coordinates)
        return replace(
            super().certificate(visits=visits, seeded=seeded, coordinates=coordinates),
            epsilon=math.inf if seeded else epsilon,
            event=json.dumps(spec, sort_keys=True),
            certified_for=NOTHING if math.isinf(epsilon) else self.certified_for,
        )

    def _pure(self, visits: int, coordinates: int) -> float:
        return 2 * visits / float(self.mechanism.event_spec(coordinates)["noise_multiplier"])

    @property
    def notes(self) -> tuple[Note, ...]:
        """The notes on what is wrong with the parts that this configuration uses."""
        if self.mode == "published":
            return notes("S6", "S7", "S12", "S13")
        return () if self.full_parameter else notes("S7")


@lru_cache
def _mechanism(
    distribution: str, epsilon: float, max_grad_norm: float, delta: float
) -> LaplaceSGD | DPSGD:
    kind: dict[str, Any] = {"max_grad_norm": max_grad_norm, "arithmetic": "float"}
    noised = epsilon < math.inf
    if distribution == "laplace":
        # Two records are 2 C apart: b / C = 2 / epsilon.
        return LaplaceSGD(noise_multiplier=2 / epsilon if noised else 0.0, **kind)
    if not noised:
        return DPSGD(noise_multiplier=0.0, **kind)
    start = DPSGD(noise_multiplier=1.0, **kind)
    return calibrate(start, target_epsilon=epsilon, delta=delta, steps=1, **_OF_ONE)


__all__ = ["DISTRIBUTIONS", "OUTPUT_GRADIENTS", "OutputSGD"]
