"""The base of mechanisms: a frozen configuration that makes a plan and knows its privacy event.

A plan says, for parameters in a frozen order, how their per-sample gradients are bounded, in which
coordinates they are released, where each block's noise stands in the noise stream, and with which
certified scale it is drawn. The event is computed from exactly these numbers and never typed.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, replace
from typing import Any, ClassVar, Self

import torch

from ...base.errors import InvalidInput, PrivacyError
from ...base.phase import PROJECT, phase
from ...base.validate import integer
from ...ops import update
from ...ops.clip import MIN_BOUND
from ...ops.update import Projection
from ..accounting import events
from ..accounting.events import EventSpec
from ..accounting.history import MAX_NOISE_MULTIPLIER, MIN_NOISE_MULTIPLIER
from .catalogue import CataloguedMechanism
from .examples import UNIT, Audit, Example
from .memory import MechanismState
from .notes import Note
from .plan import Plan
from .run_facts import RunFacts
from .work import OpAccount

MAX_BOUND = 2.0**96
"""The range of clipping bounds: outside, the lattice unit would not be normal in float32."""

OPTIONAL_IN_CHECKPOINT = {"later": True}
"""Metadata of a field that came after checkpoints had been written: at its default it is left out
of the fingerprint, so that they still load."""


class Mechanism(CataloguedMechanism):
    """The base of the configurations; subclasses are frozen keyword-only dataclasses.

    Besides ``title``, ``source``, ``event_spec``, ``plan`` and ``certified_for`` everything has a
    default. A mechanism that adapts to its own noisy outputs keeps them in a ``MechanismState``:
    ``memory`` makes it, ``plan`` reads it, ``weigh`` and ``learn`` change it, and ``count_plan``
    and ``count_learning`` say what that takes.

    Attributes:
        name: the mechanism's name.
        title: in tables and figures.
        source: of the mechanism, in a few words.
        examples: its forms, whose steps are counted, compared and tested.
        derived: fields that ``fields_of_run`` decides and no setting of a run may name, besides
            those that every mechanism derives.
        budget: modes in which the epsilon that a run asks for is a field of the mechanism, and
            nothing is calibrated.
        neighbouring: the relation that its event's multiplier refers to.
        frequency_domain: whether it clips or noises layers in the frequency domain.
        noise_multiplier: noise scale in units of the bound, as calibration and schedules set it.
        mode: ``corrected`` or ``published``.
    """

    title: ClassVar[str]
    source: ClassVar[str]
    trained_by: ClassVar[str | None] = "gradients"
    examples: ClassVar[tuple[Example, ...]] = (Example(UNIT),)
    audits: ClassVar[tuple[Audit, ...]] = (Audit(fields=UNIT),)
    derived: ClassVar[tuple[str, ...]] = ()
    budget: ClassVar[tuple[str, ...]] = ()
    neighbouring: ClassVar[str] = "add_remove"
    frequency_domain: ClassVar[bool] = False

    noise_multiplier: float
    mode: str

    @abstractmethod
    def event_spec(self, dimension: int | None = None) -> EventSpec:
        """Return the certified event of one release on at most ``dimension`` coordinates."""

    @abstractmethod
    def plan(self, shapes: Sequence[Sequence[int]], memory: MechanismState | None = None) -> Plan:
        """Return the plan for parameters of these shapes, in this order.

        Args:
            shapes: of the parameters.
            memory: what the mechanism has learnt so far. None stands for nothing. The plan's
                ``spec`` and ``unsampled`` must not depend on it: certificates are a priori.
        """

    @property
    @abstractmethod
    def certified_for(self) -> str:
        """The scope of the certificate."""

    @property
    def dimension(self) -> int | None:
        """No number: a configuration does not know its parameters; its plan does."""
        return None

    @property
    def unsampled(self) -> EventSpec:
        """The event of what every step releases of all records besides, without sampling."""
        return events.no_op()

    @property
    def notes(self) -> tuple[Note, ...]:
        """The notes that a reader of this configuration's numbers must know."""
        return ()

    @property
    def remarks(self) -> tuple[str, ...]:
        """The notes as text."""
        return tuple(str(note) for note in self.notes)

    def claimed_event_spec(self, dimension: int | None = None) -> EventSpec:
        """Return the event that the mechanism's paper claims for one release."""
        return self.event_spec(dimension)

    def claim(
        self, *, steps: int, sample_rate: float, delta: float, dataset_size: int | None
    ) -> float | None:
        """Return the epsilon that the paper claims after ``steps``, where no event expresses it.

        None means that the claim is ``claimed_event_spec``, Poisson-sampled and composed. It is
        asked in ``published`` mode only.
        """
        return None

    @property
    def claim_text(self) -> str:
        """The source of the claim ``epsilon_claimed``, in words."""
        if self.mode == "published":
            return "the source's claim: its event, as if batches were Poisson samples"
        return "what is certified, if the key stays secret"

    def memory(self, params: Sequence[torch.Tensor]) -> MechanismState | None:
        """Return the state of a new run. None means that the mechanism does not adapt."""
        return None

    def weigh(self, memory: MechanismState, importance: Sequence[torch.Tensor]) -> None:
        """Take over the released importance of this step (``Plan.importance``), before its noise.

        The plan is then made anew.
        """
        del memory, importance

    def learn(self, memory: MechanismState, gradients: Sequence[torch.Tensor]) -> None:
        """Adapt to the noisy gradients of a step, before they update the parameters.

        Args:
            memory: the state.
            gradients: what was released, divided by the public batch size; float64 or of the
                sums' dtype. May be changed in place (post-processing): the update takes what is
                left there.
        """
        del memory, gradients

    def realised(self, memory: MechanismState | None) -> dict[str, float]:
        """Return numbers of the last step that depend on released values, never certified."""
        return {}

    @classmethod
    def fields_of_run(cls, run: RunFacts, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields that follow from a run.

        The base fills in ``sites``, ``expected_batch_size`` and, with ``clipping="group"``,
        ``groups``, where the class has such a field.

        Args:
            run: what is trained.
            given: the fields that were asked for, ``mode`` among them.

        Raises:
            InvalidInput: the run lacks what a field follows from.
        """
        known = {field.name for field in fields(cls)}  # type: ignore[arg-type]
        found: dict[str, Any] = {}
        if "sites" in known:
            found["sites"] = run.sites()
        if "expected_batch_size" in known:
            found["expected_batch_size"] = float(run.batch_size)
        if "groups" in known and given.get("clipping") == "group":
            found["groups"] = run.layers()
        return found

    @property
    def sampling(self) -> Mapping[str, Any]:
        """Arguments ``sampling``, ``dataset_size`` and ``sample_rate`` of the required batches.

        The mapping is empty where any batches will do.
        """
        return {}

    @property
    def noise_moves(self) -> bool:
        """Whether the coordinates that are noised change from step to step."""
        return False

    @property
    def projection(self) -> Projection | None:
        """The set that parameters are projected onto after every step.

        None stands for no projection.
        """
        return None

    def rate(self, step: int, dimension: int) -> float | None:
        """Return the learning rate of plain SGD in this step, from 1.

        None keeps the optimizer's own.

        Args:
            step: number of the step.
            dimension: number of parameters.
        """
        del step, dimension
        return None

    def project(self, params: Sequence[torch.Tensor]) -> None:
        """Project parameters in place, after a step; post-processing."""
        if self.projection is not None:
            with phase(PROJECT):
                update.project(params, self.projection)

    def plan_at(self, plan: Plan, step: int) -> Plan:
        """Return a first step's plan with the sizes that it has in a later step, for counting.

        Args:
            plan: made without a memory.
            step: number of the step, from 1.
        """
        del step
        return plan

    def count_learning(self, work: OpAccount, sizes: Sequence[int]) -> None:
        """Count what ``learn`` takes on float64 gradients of these sizes.

        Raises:
            InvalidInput: a mechanism with a memory that does not say.
        """
        del work, sizes
        raise self._uncounted()

    def count_plan(self, work: OpAccount, sizes: Sequence[int], step: int) -> None:
        """Count what ``plan`` takes that is made anew from the memory, after step ``step``.

        Raises:
            InvalidInput: a mechanism with a memory that does not say.
        """
        del work, sizes, step
        raise self._uncounted()

    def _uncounted(self) -> InvalidInput:
        return InvalidInput(
            "mechanism",
            expected="one whose learning has a closed form",
            got=type(self).__name__,
            remedy="Define its count_learning and count_plan, or use cost.counting.count.",
        )

    @property
    def fingerprint(self) -> str:
        """The configuration in words, by which a checkpoint knows its run."""
        shown = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)  # type: ignore[arg-type]
            if not (field.metadata.get("later") and getattr(self, field.name) == _default(field))
        ]
        return f"{type(self).__qualname__}({', '.join(shown)})"

    def event(self, dimension: int | None = None) -> Any:
        """Return ``event_spec`` as a ``dp_accounting.DpEvent``.

        Raises:
            MissingDependency: dp-accounting is not installed.
        """
        return events.build(self.event_spec(dimension))

    def with_noise_multiplier(self, noise_multiplier: float) -> Self:
        """Return the same configuration with other noise."""
        changed: Self = replace(self, noise_multiplier=noise_multiplier)  # type: ignore[type-var]
        return changed


def _default(field: Any) -> Any:
    return field.default if field.default is not MISSING else field.default_factory()


def checked_noise_multiplier(value: Any) -> float:
    """Check that a multiplier is 0 or in [2^-4, 2^10], where the noise distribution is certified.

    Raises:
        InvalidInput: not a finite number >= 0.
        PrivacyError: positive, but outside the certified range.
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0:
        raise InvalidInput(
            "noise_multiplier",
            expected="a finite number >= 0",
            got=value,
            remedy="Pass noise standard deviation / max_grad_norm, or 0 for no noise.",
        )
    if value and not MIN_NOISE_MULTIPLIER <= value <= MAX_NOISE_MULTIPLIER:
        raise PrivacyError(
            "noise_multiplier",
            expected="0 or a number in [2^-4, 2^10]",
            got=value,
            remedy="Choose another value: outside this range the noise lattice is not certified.",
        )
    return float(value)


def checked_bound(name: str, value: Any) -> float:
    """Check that a clipping bound is in [2^-96, 2^96], or infinity for no clipping.

    Raises:
        InvalidInput: anything else.
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not (MIN_BOUND <= value <= MAX_BOUND or value == math.inf):
        raise InvalidInput(
            name,
            expected="a number in [2^-96, 2^96], or infinity for no clipping",
            got=value,
            remedy="Pass the largest norm that one sample may contribute.",
        )
    return float(value)


def checked_shapes(shapes: Any) -> tuple[tuple[int, ...], ...]:
    """Return parameter shapes as tuples of ints.

    Raises:
        InvalidInput: not a non-empty sequence of shapes.
    """
    sequence = isinstance(shapes, Sequence) and not isinstance(shapes, (str, bytes))
    if not sequence or not shapes or not all(isinstance(shape, Sequence) for shape in shapes):
        raise InvalidInput(
            "shapes",
            expected="a non-empty sequence of parameter shapes",
            got=shapes,
            remedy="Pass [p.shape for p in model.parameters() if p.requires_grad].",
        )
    return tuple(tuple(integer(shapes=extent) for extent in shape) for shape in shapes)
