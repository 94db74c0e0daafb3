"""SPOF and the functional mechanism: noise on the coefficients of an autoencoder's loss.

    published    alpha_2, alpha_3 + Lap(Dhat / (sqrt(2) epsilon)), fresh at every visit of a record
    corrected    x + Lap(n / epsilon), clipped to [0, 1], once per record, for input and target

The published form releases gradients into which the record also enters as code and as input,
without noise, so nothing is certified of what is trained. The corrected form is local differential
privacy of one record; all training afterwards, stabilisation constant included, is post-processing.
Its release runs on integers (``record_reach``), so that its certificate speaks of released bits.

``release="coefficients"`` in corrected mode perturbs (alpha_2, alpha_3) jointly and once. That
protects the record as target only; what is trained remains uncertified.

Reference: SPOF, equations (12), (21)-(23), (32), propositions 2-4, algorithm 1, appendices B-E;
Zhang et al., Functional Mechanism, 2012.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from torch import Tensor

from ...base.errors import InvalidInput
from ...base.laws import SCALE_UNITS
from ...base.validate import choice, integer, non_negative
from ..accounting import events
from ..accounting.events import EventSpec
from ..accounting.history import NOTHING, RELEASED_BITS
from ..theory import environment, spof_sensitivity
from ..theory.spof_loss import FORMS
from ._statement import MODES
from .examples import FEATURE, Audit
from .notes import Note, notes
from .objective import (
    COORDINATES,
    MOST_TAIL,
    ObjectivePerturbation,
    checked_epsilon,
    cut_tail,
)

RELEASES = ("coefficients", "record")
SCHEDULES = ("per_visit", "once_per_record")
NOISY_LOSSES = ("printed", "evaluated")
SHIFTS = ("current", "bound", "none")


@dataclass(frozen=True, kw_only=True)
class Functional(ObjectivePerturbation):
    """The base of SPOF and FM, which users configure instead.

    Args:
        epsilon: of one record, as the paper calls it; ``math.inf`` adds no noise.
        mode: ``corrected`` or ``published``.
        form: of the polynomial, ``printed`` (published, and corrected on request) or ``taylor``.
        release: ``coefficients``, or ``record`` (corrected only, and its default).
        noise_schedule: ``per_visit`` (published only, and its default) or ``once_per_record``.
        noisy_loss: with environmental noise: ``printed``, theorem 1 with b_j in coefficients and
            scale (published only, and its default), or ``evaluated`` at the noisy logit.

    Raises:
        InvalidInput: a field out of its range, or one that this mode does not have.
    """

    trained_by: ClassVar[str | None] = "records"
    audits: ClassVar[tuple[Audit, ...]] = (
        Audit(releases="record", fields={"epsilon": 1.0}, shapes=FEATURE, corrected=("shapes",)),
        Audit(
            releases="visits",
            suffix="_training",
            fields={"epsilon": 1.0},
            shapes=FEATURE,
            takes=("steps", "shapes"),
        ),
    )

    epsilon: float
    mode: str = "corrected"
    form: str | None = None
    release: str | None = None
    noise_schedule: str | None = None
    noisy_loss: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", checked_epsilon(self.epsilon))
        choice(MODES, mode=self.mode)
        published = self.published
        self._settle("form", FORMS, "printed" if published else "taylor", not published)
        self._settle("release", RELEASES, "coefficients" if published else "record", not published)
        self._settle(
            "noise_schedule", SCHEDULES, "per_visit" if published else "once_per_record", published
        )
        self._settle("noisy_loss", NOISY_LOSSES, "printed" if published else "evaluated", published)

    def _settle(self, name: str, options: tuple[str, ...], default: str, free: bool) -> None:
        """Replace None by the default; refuse another value unless this mode lets it be chosen."""
        given = getattr(self, name)
        value = default if given is None else choice(options, **{name: given})
        if value != default and not free:
            raise InvalidInput(
                name,
                expected=f"{default!r} with mode={self.mode!r}",
                got=given,
                remedy="Leave it out, or change the mode.",
            )
        object.__setattr__(self, name, value)

    @property
    def published(self) -> bool:
        """Whether the printed algorithm runs."""
        return self.mode == "published"

    @property
    def constant_entry(self) -> float:
        """The constant c that is added to every weight of the decoder."""
        return 0.0

    @property
    def constant_stays(self) -> bool:
        """Whether c is part of the decoder that is used after training."""
        return True

    @property
    def noised(self) -> bool:
        """Whether there is noise."""
        return self.epsilon < math.inf

    @property
    def certified(self) -> bool:
        """Whether what is trained is certified: the record itself is released, and nothing else.

        From about epsilon 33 the noise's cut tails weigh too much, and it is not.
        """
        released = self.noised and self.release == "record"
        return released and cut_tail(self.epsilon, COORDINATES) <= MOST_TAIL

    @property
    def certified_for(self) -> str:
        """``released bits`` or ``nothing``."""
        return RELEASED_BITS if self.certified else NOTHING

    def event_spec(self, *, visits: int = 1) -> EventSpec:
        """Return one Laplace release of the record for all visits, or the non-private event."""
        if integer(visits=visits) == 0:
            return events.no_op()
        return events.laplace(2 / self.epsilon) if self.certified else events.non_private()

    def epsilon_certified(self, *, visits: int = 1) -> float:
        """Return ``epsilon`` where the record itself is released, else infinite."""
        if integer(visits=visits) == 0:
            return 0.0
        return self.epsilon if self.certified else math.inf

    def epsilon_audited(self, *, visits: int = 1, shift: float = 0.0) -> float:
        """Return what the released coefficients cost the record *as a target* alone.

        published    visits sqrt(2) epsilon Dbar / Dhat(shift), as if Dhat were public
        corrected    epsilon

        It certifies nothing that is trained: codes and gradients contain the record too.
        """
        if not self.noised:
            return math.inf if visits else 0.0
        if not self.published:
            return self.epsilon if visits else 0.0
        paid = visits if self.noise_schedule == "per_visit" else min(visits, 1)
        return self._split_factor * spof_sensitivity.audited_epsilon(
            self.epsilon, shift, visits=paid
        )

    @property
    def _split_factor(self) -> float:
        return 1.0

    def scale(
        self, features: int, shift: float | Tensor = 0.0, total: Tensor | None = None
    ) -> float | Tensor:
        """Return the Laplace scale of what is released of a record; 0 without noise.

        Args:
            features: n.
            shift: c_j of each record; only published scales depend on it.
            total: b_j of each record, where theorem 1 scales the noise with it.
        """
        if not self.noised:
            return 0.0
        if self.release == "record":
            return spof_sensitivity.local_scale(features, self.epsilon)
        if not self.published:
            return spof_sensitivity.coefficient_scale(features, self.epsilon, form=str(self.form))
        if total is None:
            return self._printed_scale(features, shift)
        return environment.noisy_sensitivity(features, total, shift) / (self._split * self.epsilon)

    def _printed_scale(self, features: int, shift: float | Tensor) -> float | Tensor:
        if isinstance(shift, Tensor):
            return spof_sensitivity.spof_scale(features, self.epsilon, shift)
        return spof_sensitivity.spof_scale(features, self.epsilon, float(shift))

    @property
    def _split(self) -> float:
        return math.sqrt(2)

    def record_reach(self, features: int) -> int:
        """Return M, the largest integer with ``n M <= 2^20 epsilon``.

        1 is M units of the noise lattice.

        With scale ``n / epsilon`` the unit is scale / 2^20. Two records of integers in 0 .. M
        differ by at most n M units of L1 norm, n M / 2^20 <= epsilon of the scale.

        Raises:
            InvalidInput: epsilon so small that M is 0.
        """
        reach = int(Fraction(self.epsilon) * SCALE_UNITS / integer(1, features=features))
        if not reach:
            raise InvalidInput(
                "epsilon",
                expected=f"at least {features / SCALE_UNITS:g} for {features} features",
                got=self.epsilon,
                remedy="Raise epsilon.",
            )
        return reach

    @property
    def notes(self) -> tuple[Note, ...]:
        """The notes on what is wrong with the parts that this configuration uses."""
        found = ["S1", "S2"] if self.form == "printed" else []
        if self.published:
            found += ["S4"] + (["S5"] if self.constant_entry else [])
            found += ["S6"] if self.scale_is_private else []
            found += ["S7"]
            found += ["S8", "S10"] if self.noisy_loss == "printed" else []
            found += ["S13"]
        elif self.release == "coefficients":
            found += ["S7"]
        return notes(*found)

    @property
    def scale_is_private(self) -> bool:
        """Whether the scale depends on the record, be it with environmental noise only."""
        return self.published and self.noisy_loss == "printed"


@dataclass(frozen=True, kw_only=True)
class SPOF(Functional):
    """The SPOF mechanism: the stabilised perturbed loss of a (distributed) autoencoder.

    Args:
        epsilon, mode, form, release, noise_schedule, noisy_loss: see ``Functional``.
        constant: c >= 0, the stabilisation constant: every entry of the decoder is used plus c.
        shift: which c_j the published scale Dhat is for: ``current``, c times the sum of the
            record's own code, or ``bound``, the public c l. Corrected scales have none.
        constant_at_inference: whether c is used after training too.

    Raises:
        InvalidInput: a field out of its range, or one that this mode does not have.
    """

    name: ClassVar[str] = "spof"

    constant: float = 2.5
    shift: str | None = None
    constant_at_inference: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "constant", non_negative(constant=self.constant))
        choice((True, False), constant_at_inference=self.constant_at_inference)
        self._settle("shift", SHIFTS, "current" if self.published else "none", self.published)
        if self.published and self.shift == "none":
            raise InvalidInput(
                "shift",
                expected="'current' or 'bound' with mode='published'",
                got=self.shift,
                remedy="Choose one of these, or mode='corrected', which needs no constant.",
            )

    @property
    def constant_entry(self) -> float:
        """The constant c."""
        return self.constant

    @property
    def constant_stays(self) -> bool:
        """Whether the constant stays: ``constant_at_inference``."""
        return self.constant_at_inference

    @property
    def scale_is_private(self) -> bool:
        """Whether the scale is private, through b_j or through the current c_j."""
        return super().scale_is_private or (self.shift == "current" and self.constant > 0)


@dataclass(frozen=True, kw_only=True)
class FM(Functional):
    """The functional mechanism on a single autoencoder: SPOF with one user and no constant.

    Args:
        epsilon, mode, form, release, noise_schedule, noisy_loss: see ``Functional``.
        joint: published only: scale ``(3n/2) / epsilon`` of the classic mechanism instead of
            ``(3n/2) / (sqrt(2) epsilon)``.

    Raises:
        InvalidInput: a field out of its range, or one that this mode does not have.
    """

    name: ClassVar[str] = "fm"
    single_user: ClassVar[bool] = True

    joint: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        choice((True, False), joint=self.joint)
        if self.joint and not self.published:
            raise InvalidInput(
                "joint",
                expected="False with mode='corrected'",
                got=self.joint,
                remedy="Leave joint out: corrected scales are joint already.",
            )

    @property
    def _split(self) -> float:
        return 1.0 if self.joint else math.sqrt(2)

    @property
    def _split_factor(self) -> float:
        return math.sqrt(0.5) if self.joint else 1.0

    def _printed_scale(self, features: int, shift: float | Tensor) -> float | Tensor:
        del shift
        return spof_sensitivity.fm_scale(features, self.epsilon, joint=self.joint)

    @property
    def notes(self) -> tuple[Note, ...]:
        """The notes of SPOF, without S4 where the scale is joint."""
        return tuple(note for note in super().notes if not (self.joint and note.id == "S4"))
