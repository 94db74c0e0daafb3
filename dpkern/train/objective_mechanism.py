"""Make the mechanism that perturbs a run's loss from its options, and state its privacy."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..engine.named import read_settings
from ..objective.records import Records
from ..privacy.accounting import Certificate, events
from ..privacy.accounting.history import NOTHING
from ..privacy.mechanisms import ObjectivePerturbation
from ..privacy.mechanisms.functional import Functional
from ..privacy.mechanisms.objective import COORDINATES, near_law
from ..step.noise_tables import NoiseSource
from .options import required

DECIDED = ("epsilon", "mode")
"""Fields with an option of their own."""


def make(name: str, *, mode: str, settings: Sequence[str], epsilon: float | None) -> Functional:
    """Make the mechanism of this name.

    Raises:
        InvalidInput: no epsilon, or settings that the mechanism does not know or take.
    """
    kind = Functional.named(name)
    epsilon = required(epsilon, what="one release of a record")
    fields = read_settings(kind, settings, decided=DECIDED)
    return kind(epsilon=epsilon, mode=mode, **fields)


def certificate(
    mechanism: ObjectivePerturbation,
    *,
    visits: int,
    seeded: bool,
    unproved: str = "",
    variation: float = 0.0,
) -> Certificate:
    """Return the mechanism's certificate, infinite where it does not cover how the run is made.

    Args:
        mechanism: mechanism that releases the records.
        visits: number of visits of each record.
        seeded: the noise comes from a known seed.
        unproved: why nothing can be certified of these records.
        variation: total variation distance of a coordinate's noise from its law.
    """
    found = near_law(
        mechanism.certificate(visits=visits, seeded=seeded),
        variation=variation,
        draws=visits * COORDINATES,
    )
    if not unproved:
        return found
    return _of_nothing(found, unproved)


def of_nothing(found: Certificate, warning: str) -> Certificate:
    """Return the certificate of a run whose noise protects nobody, which ``warning`` says."""
    return replace(_of_nothing(found, warning), event=json.dumps(events.non_private()))


def _of_nothing(found: Certificate, why: str) -> Certificate:
    return replace(found, epsilon=math.inf, certified_for=NOTHING, notes=(*found.notes, why))


def facts(
    mechanism: Functional,
    *,
    visits: int,
    seeded: bool,
    records: Records | None = None,
    source: NoiseSource | None = None,
) -> dict[str, Any]:
    """Return what a report says about the privacy of a run, certificate included.

    Args:
        mechanism: mechanism that releases the records.
        visits: number of visits of each record.
        seeded: the noise comes from a known seed.
        records: prepared records. None stands for a planned run with public bounds.
        source: source of the noise. None draws it from the key.

    ``epsilon_of_target_alone`` is what the noisy coefficients would cost at most if the record
    entered nothing else and the scale were public: it certifies nothing.
    """
    unprotected = "" if source is None else source.warning
    unproved = "" if records is None else records.unproved
    given: dict[str, Any] = {"visits": visits, "unproved": "" if unprotected else unproved}
    given["variation"] = 0.0 if source is None or unprotected else source.variation
    secret = certificate(mechanism, seeded=False, **given)
    found = certificate(mechanism, seeded=seeded, **given)
    if unprotected:
        secret = found = of_nothing(found, unprotected)
    said = stated(
        mechanism,
        found,
        non_private=unprotected or _reason(mechanism, found, seeded, unproved),
        visits=visits,
        settings=mechanism.to_dict(),
    )
    if unprotected:
        said["epsilon_claimed"] = math.inf  # whatever the source says of noise that is fresh
    elif not mechanism.certified and mechanism.noised:
        # Samples that are one record are visits of it too.
        paid = visits * (1 if records is None else records.copies)
        said["epsilon_of_target_alone"] = mechanism.epsilon_audited(visits=paid)
    if seeded:
        said["epsilon_if_seed_secret"] = secret.epsilon
    proved = math.isfinite(mechanism.epsilon_certified(visits=visits))
    if unproved and proved and not unprotected:
        said["epsilon_if_bounds_public"] = mechanism.epsilon_certified(visits=visits)
    return said


def stated(mechanism: ObjectivePerturbation, found: Certificate, **more: Any) -> dict[str, Any]:
    """Return what every such mechanism states of its privacy, and ``more``."""
    return {
        "mechanism": mechanism.name,
        "mode": mechanism.mode,
        "epsilon_claimed": mechanism.epsilon_claimed(),
        "claim": mechanism.claim_text,
        "epsilon_certified": found.epsilon,
        "notes": [{"id": note.id, "text": note.text} for note in mechanism.notes],
        **more,
        "certificate": found.to_dict(),
    }


def _reason(
    mechanism: ObjectivePerturbation, found: Certificate, seeded: bool, unproved: str
) -> str | None:
    """Return the reason, in words, that nothing is certified; None where something is."""
    if math.isfinite(found.epsilon):
        return None
    if math.isinf(mechanism.epsilon):
        return "no noise is added"
    if math.isinf(mechanism.epsilon_certified(visits=1)):
        return "the record enters what is trained without noise"
    return unproved or ("the noise comes from a known seed" if seeded else None)
