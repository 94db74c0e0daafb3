"""The base of systems that perturb a loss: a claim, and what is certified of one record.

They release noisy coefficients, inputs or targets of single records, before or during training,
instead of noised sums of gradients: there is no plan of blocks, and no step of the engine composes.
Privacy is local: of one record against every other, by any owner. A user who contributes k records
pays k times as much.
"""

from __future__ import annotations

import json
import math
from abc import abstractmethod
from dataclasses import fields, replace
from typing import Any, ClassVar

from ...base.errors import InvalidInput
from ...base.validate import integer
from ..accounting import Certificate, shown_bound
from ..accounting.events import LAPLACE_EVENT, ElementaryEvent, EventSpec, build
from ..accounting.history import NOTHING
from ..accounting.tails import tail_delta, variation_cost
from .catalogue import CataloguedMechanism
from .notes import Note

COORDINATES = 1 << 20
"""Assumed number of noisy numbers in one record's release of unknown size."""

MOST_TAIL = 2.0**-40
"""The largest weight of cut noise tails; beyond it nothing is certified."""

SEEDED = "the noise comes from a known seed: whoever knows it can subtract the noise"


class ObjectivePerturbation(CataloguedMechanism):
    """The base of the configurations; subclasses are frozen keyword-only dataclasses.

    Attributes:
        name: the mechanism's name.
        single_user: whether it trains on the records of one user alone.
        claims_visits: whether the paper claims ``epsilon`` of a visit, not of a record.
        epsilon: what the paper calls epsilon; ``math.inf`` adds no noise.
        mode: ``corrected`` or ``published``.
    """

    single_user: ClassVar[bool] = False
    claims_visits: ClassVar[bool] = False

    epsilon: float
    mode: str

    @abstractmethod
    def event_spec(self, *, visits: int = 1) -> EventSpec:
        """Return the certified event of one record after so many visits, or the non-private one.

        A Laplace event's multiplier is scale / bound on one record's contribution, half the
        distance of two records: ``2 / epsilon`` for a release of pure epsilon.
        """

    @abstractmethod
    def epsilon_certified(self, *, visits: int = 1) -> float:
        """Return the proved epsilon of one record after so many visits, or ``math.inf``."""

    @property
    @abstractmethod
    def certified_for(self) -> str:
        """The scope of the certificate."""

    @property
    @abstractmethod
    def notes(self) -> tuple[Note, ...]:
        """The notes that a reader of this configuration's numbers must know."""

    @property
    def relation(self) -> str:
        """The neighbouring relation."""
        return "replace_one, local, one record"

    @property
    def remarks(self) -> tuple[str, ...]:
        """The notes as text."""
        return tuple(str(note) for note in self.notes)

    def epsilon_claimed(self) -> float:
        """Return what the paper says one record pays, however often it is visited."""
        return self.epsilon

    @property
    def claim_text(self) -> str:
        """The source of the claim ``epsilon_claimed``, in words."""
        if self.mode == "published":
            return "the source's claim for one record"
        return "what is certified, if the key stays secret"

    @property
    def accountant(self) -> str:
        """The accountant of the certified epsilon."""
        return "sum of pure epsilons"

    def certified_delta(self, *, visits: int = 1, coordinates: int = COORDINATES) -> float:
        """Return the delta that the noise distribution's cut tail takes.

        Args:
            visits: of each record.
            coordinates: noisy numbers of one record.
        """
        return cut_tail(self.epsilon_certified(visits=visits), integer(1, coordinates=coordinates))

    def certificate(
        self, *, visits: int = 1, seeded: bool, coordinates: int = COORDINATES
    ) -> Certificate:
        """Return the certified epsilon and what it rests on; infinite with a known seed."""
        epsilon = self.epsilon_certified(visits=visits)
        return Certificate(
            epsilon=math.inf if seeded else epsilon,
            delta=self.certified_delta(visits=visits, coordinates=coordinates),
            relation=self.relation,
            accountant=self.accountant,
            event=json.dumps(self.event_spec(visits=visits), sort_keys=True),
            bounds={},
            certified_for=NOTHING if math.isinf(epsilon) else self.certified_for,
            notes=(*self.remarks, *((SEEDED,) if seeded else ())),
        )

    def event(self, *, visits: int = 1) -> Any:
        """Return ``event_spec`` as a ``dp_accounting.DpEvent``.

        Raises:
            MissingDependency: dp-accounting is not installed.
        """
        return build(self.event_spec(visits=visits))

    @property
    def fingerprint(self) -> str:
        """The configuration in words, by which a checkpoint knows its run."""
        shown = [f"{name}={value!r}" for name, value in self.options().items()]
        return f"{type(self).__qualname__}({', '.join(shown)})"

    def options(self) -> dict[str, Any]:
        """Return the fields by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as JSON values; infinity is the string ``"inf"``."""
        plain = {
            key: "inf" if value == math.inf else value for key, value in self.options().items()
        }
        return {"mechanism": self.name, **plain}


def near_law(found: Certificate, *, variation: float, draws: int) -> Certificate:
    """Return a certificate for noise that is near the law that it speaks of.

    Args:
        found: what the law itself certifies.
        variation: total variation distance of a coordinate's noise from the law.
        draws: of one record, all visits together: each takes ``(1 + e^epsilon) variation`` of
            delta, as for releases of sums (``accounting.tails.variation_cost``).
    """
    if not variation:
        return found
    note = (
        f"each coordinate's noise is within total variation {shown_bound(variation)} of its law, "
        f"which takes (1 + e^epsilon) of that from delta for each of {draws} draws"
    )
    found = replace(found, notes=(*found.notes, note))
    if math.isinf(found.epsilon):
        return found
    delta = found.delta + variation_cost(found.epsilon) * draws * variation
    if delta >= 1:
        return replace(found, epsilon=math.inf, delta=1.0, certified_for=NOTHING)
    return replace(found, delta=delta)


def cut_tail(epsilon: float, coordinates: int, *, releases: int = 1) -> float:
    """Return delta of the cut tails of releases that share epsilon equally; 0 for 0 and infinity.

    Args:
        epsilon: pure, of all of them.
        coordinates: draws of one release.
        releases: how many.
    """
    if not 0 < epsilon < math.inf:
        return 0.0
    leaf = ElementaryEvent(LAPLACE_EVENT, (("noise_multiplier", 2 * releases / epsilon),))
    return releases * tail_delta(leaf, "replace_one", coordinates, epsilon)


def checked_epsilon(value: Any, *, name: str = "epsilon") -> float:
    """Check that epsilon is a number > 0, or infinity for no noise, and return it.

    Raises:
        InvalidInput: anything else.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
        return float(value)
    raise InvalidInput(
        name,
        expected="a number > 0, or infinity for no noise",
        got=value,
        remedy="Start with 1: smaller values mean stronger privacy and more noise.",
    )
