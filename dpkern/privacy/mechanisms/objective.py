"""What systems that perturb a loss have in common: a claim, and what is certified of one record.

They release noisy coefficients, inputs or targets of single records, before or during training,
instead of noised sums of gradients: there is no plan of blocks, and no step of the engine composes.
Privacy is local: of one record against every other, whoever owns it. A user who contributes k
records pays k times as much.
"""

from __future__ import annotations

import json
import math
from abc import abstractmethod
from dataclasses import fields
from typing import Any, ClassVar

from ...base.errors import InvalidInput
from ...base.validate import integer
from ..accounting import Certificate
from ..accounting.events import LAPLACE_EVENT, EventSpec, Leaf, build
from ..accounting.history import NOTHING
from ..accounting.tails import escape_mass
from .catalogue import CataloguedMechanism
from .notes import Note

COORDINATES = 1 << 20
"""Noisy numbers that one record's release may have when nobody says how many."""

MOST_TAIL = 2.0**-40
"""Where noise tails that are cut weigh more than this, nothing is certified."""

SEEDED = "the noise comes from a known seed: whoever knows it can subtract the noise"


class ObjectivePerturbation(CataloguedMechanism):
    """Base of the configurations; subclasses are frozen keyword-only dataclasses.

    Attributes:
        name: the mechanism's name.
        single_user: whether it trains on the records of one user alone.
        claims_visits: whether the source claims ``epsilon`` of a visit, not of a record.
        epsilon: what the source calls epsilon; ``math.inf`` adds no noise.
        mode: ``corrected`` or ``published``.
    """

    single_user: ClassVar[bool] = False
    claims_visits: ClassVar[bool] = False

    epsilon: float
    mode: str

    @abstractmethod
    def event_spec(self, *, visits: int = 1) -> EventSpec:
        """The certified event of one record after so many visits; non-private where there is none.

        A Laplace event's multiplier is scale / bound on one record's contribution, half the
        distance of two records: ``2 / epsilon`` for a release of pure epsilon.
        """

    @abstractmethod
    def epsilon_certified(self, *, visits: int = 1) -> float:
        """Proved epsilon of one record after so many visits; ``math.inf`` where nothing is."""

    @property
    @abstractmethod
    def certified_for(self) -> str:
        """What the certificate speaks about."""

    @property
    @abstractmethod
    def notes(self) -> tuple[Note, ...]:
        """What a reader of this configuration's numbers must know."""

    @property
    def relation(self) -> str:
        """Which data sets count as neighbours."""
        return "replace_one, local, one record"

    @property
    def remarks(self) -> tuple[str, ...]:
        """The notes as text."""
        return tuple(str(note) for note in self.notes)

    def epsilon_claimed(self) -> float:
        """What the source says one record pays, however often it is visited."""
        return self.epsilon

    @property
    def claim_text(self) -> str:
        """Whose number ``epsilon_claimed`` is, in words."""
        if self.mode == "published":
            return "the source's claim for one record"
        return "what is certified, if the key stays secret"

    @property
    def accountant(self) -> str:
        """How the certified epsilon is found."""
        return "sum of pure epsilons"

    def certified_delta(self, *, visits: int = 1, coordinates: int = COORDINATES) -> float:
        """What the noise law's cut tail takes: the certificate is (epsilon, delta)-DP.

        Args:
            visits: of each record.
            coordinates: noisy numbers of one record.
        """
        return cut_tail(self.epsilon_certified(visits=visits), integer(1, coordinates=coordinates))

    def certificate(
        self, *, visits: int = 1, seeded: bool, coordinates: int = COORDINATES
    ) -> Certificate:
        """The certified epsilon with everything that it rests on; infinite with a known seed."""
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
        """``event_spec`` as a ``dp_accounting.DpEvent``.

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
        """The fields by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, Any]:
        """The configuration as JSON values; infinity is the string ``"inf"``."""
        plain = {
            key: "inf" if value == math.inf else value for key, value in self.options().items()
        }
        return {"mechanism": self.name, **plain}


def cut_tail(epsilon: float, coordinates: int, *, releases: int = 1) -> float:
    """Delta of the cut tails of releases that share epsilon equally; 0 for 0 and infinity.

    Args:
        epsilon: pure, of all of them.
        coordinates: draws of one release.
        releases: how many.
    """
    if not 0 < epsilon < math.inf:
        return 0.0
    leaf = Leaf(LAPLACE_EVENT, (("noise_multiplier", 2 * releases / epsilon),))
    return releases * escape_mass(leaf, "replace_one", coordinates, epsilon)


def checked_epsilon(value: Any, *, name: str = "epsilon") -> float:
    """A number > 0, or infinity for no noise.

    Raises:
        InvalidInput: anything else.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
        return float(value)
    raise InvalidInput(
        name,
        expected="a number > 0, or infinity for no noise",
        got=value,
        remedy="Small values mean strong privacy and much noise; 1 is a common start.",
    )
