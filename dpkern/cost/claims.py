"""The epsilon of the work that is counted, claimed and certified, by the source of its noise.

A cost without its epsilon says nothing: the cheapest noise is a table of samples that are read
again and again, which protects nobody.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..privacy import accounting
from ..privacy.accounting.tails import variation_cost
from ..privacy.mechanisms import LabelMechanism, Mechanism, ObjectivePerturbation
from ..privacy.mechanisms.objective import near_law
from ..step.noise_tables.named import source_of

DELTA = 1e-5
"""The delta of releases of sums."""


@dataclass(frozen=True, kw_only=True)
class EpsilonFact:
    """The epsilon of what is counted.

    Attributes:
        claimed: epsilon that the mechanism's source claims; infinite with noise that repeats.
        certified: proved epsilon.
        delta: the delta of both; of a record, what the noise's table takes of the claim.
        of: what it is the epsilon of.
    """

    claimed: float
    certified: float
    delta: float
    of: str

    @property
    def words(self) -> str:
        """The epsilon beside a bar: claimed / certified, or once if they are equal."""
        both = dict.fromkeys(map(accounting.shown_bound, (self.claimed, self.certified)))
        return f"ε {' / '.join(both)}".replace("inf", "∞")


def of_record(mechanism: ObjectivePerturbation, draws: int, source: str) -> EpsilonFact:
    """Return the epsilon of one visit of one record.

    Args:
        mechanism: the mechanism, with the epsilon that it claims.
        draws: noisy numbers of the record.
        source: source of the noise.
    """
    made = source_of(source)
    unprotected = made is not None and made.warning
    of = "one visit of one record"
    if unprotected:
        return EpsilonFact(claimed=math.inf, certified=math.inf, delta=1.0, of=of)
    variation = 0.0 if made is None else made.variation
    secret = mechanism.certificate(visits=1, seeded=False, coordinates=draws)
    found = near_law(secret, variation=variation, draws=draws)
    claimed = mechanism.epsilon_claimed()
    delta = max(found.delta, variation_cost(claimed) * draws * variation)
    return EpsilonFact(claimed=claimed, certified=found.epsilon, delta=delta, of=of)


def of_release(mechanism: Mechanism, shapes: Sequence[tuple[int, ...]], source: str) -> EpsilonFact:
    """Return the epsilon of one release in which the record takes part, at ``DELTA``.

    Args:
        mechanism: the mechanism.
        shapes: shapes of the parameters.
        source: source of the noise.
    """
    made, plan = source_of(source), mechanism.plan(shapes)
    given: dict[str, Any] = {"sampling": "poisson", "sample_rate": 1.0, **mechanism.sampling}
    given |= {"steps": 1, "delta": DELTA}
    found = accounting.certify(plan if made is None else made.covered(plan), **given)
    unprotected = made is not None and made.warning
    claimed = math.inf
    if not unprotected:
        dimension = plan.dimension
        claimed = accounting.claimed_epsilon(mechanism, dimension=dimension, **given)
        if mechanism.mode != "published":
            claimed = found.epsilon
    return EpsilonFact(claimed=claimed, certified=found.epsilon, delta=DELTA, of="one release")


def of_label(mechanism: LabelMechanism) -> EpsilonFact:
    """Return the epsilon of one response."""
    proved = mechanism.ldp_epsilon
    claimed = mechanism.epsilon if mechanism.mode == "published" else proved
    return EpsilonFact(claimed=claimed, certified=proved, delta=0.0, of="one response")


__all__ = ["DELTA", "EpsilonFact", "of_label", "of_record", "of_release"]
