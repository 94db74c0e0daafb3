"""Private projected SGD: one random record a step, the sum of all gradients as the objective.

    theta_t = Pi( theta_{t-1} - eta_t ( n grad l(theta_{t-1}, x_I) + N(0, s^2 I) ) ),   I uniform

One gradient is clipped to L (a loss that is L-Lipschitz is not changed by that), so replacing the
record moves ``n grad l`` by at most 2 n L. In a ``DPStep`` with sampling ``fixed`` and batches of
one record the sum is one clipped gradient with noise s / n, and the gradient of the objective is n
times that:

    step = DPStep(mechanism, params, expected_batch_size=1, sample_rate=1 / n, sampling="fixed",
                  dataset_size=n, optimizer=SGD(lr=n * mechanism.step_size(1, dimension)))

followed by ``mechanism.project(params)``. The certificate is that of a Gaussian mechanism of
multiplier s / (n L) on a uniform subset of one record, replace-one.

Reference: lecture notes on private projected SGD, subsampling and local differential privacy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from ...base.errors import InvalidInput
from ...base.validate import choice, integer, positive
from ...ops import update
from ...ops.update import Projection
from ..accounting import events
from ..accounting.events import EventSpec
from ..accounting.history import MAX_DIMENSION
from ..theory import pnsgd
from ._statement import ARITHMETIC, MODES, certified_scope
from .base import Mechanism, checked_bound, checked_noise_multiplier, checked_shapes
from .certify import gaussian_spec
from .examples import UNIT, Audit, Example
from .memory import MechanismState
from .notes import Note, notes
from .plan import Block, Plan, assign_positions
from .run_facts import RunFacts

STEPS = ("bound", "constant")


@dataclass(frozen=True, kw_only=True)
class ProjectedSGD(Mechanism):
    """The private projected SGD mechanism, on one random record a step.

    Args:
        n: number of records, public.
        noise_multiplier: s / (n L), in [2^-4, 2^10]; 0 adds no noise and is not private.
        max_grad_norm: L, the Lipschitz constant or a clip bound.
        projection: ``Ball``, ``Box`` or ``Simplex`` of ``dpkern.ops.update``. None projects onto
            nothing.
        diameter: of the set. None takes the projection's own.
        steps: ``bound``: ``diameter / (G sqrt(t))`` with ``G = sqrt(n^2 L^2 + d s^2)``;
            ``constant``: always ``learning_rate``.
        learning_rate: for ``constant`` only.
        rule: the rule that claims epsilon in published mode, one of
            ``dpkern.privacy.theory.pnsgd.RULES``.
        arithmetic: ``exact`` or ``float``.
        mode: ``published`` claims by ``rule``; the noise is the same.

    Raises:
        InvalidInput: a field out of its range.
        PrivacyError: a positive noise multiplier outside [2^-4, 2^10].
    """

    name: ClassVar[str] = "projected_sgd"
    title: ClassVar[str] = "Projected SGD"
    source: ClassVar[str] = "lecture notes on private projected SGD"
    examples: ClassVar[tuple[Example, ...]] = (
        Example(
            {
                "n": lambda layer: layer.features,
                "noise_multiplier": 1.0,
                "projection": update.Ball(1.0),
            }
        ),
    )
    audits: ClassVar[tuple[Audit, ...]] = (Audit(fields={**UNIT, "n": 10}),)
    derived: ClassVar[tuple[str, ...]] = ("learning_rate", "n")
    neighbouring: ClassVar[str] = "replace_one"
    clipping: ClassVar[str] = "flat"

    n: int
    noise_multiplier: float
    max_grad_norm: float = 1.0
    projection: Projection | None = None
    diameter: float | None = None
    steps: str = "bound"
    learning_rate: float | None = None
    rule: str = "notes"
    arithmetic: str = "exact"
    mode: str = "corrected"

    def __post_init__(self) -> None:
        integer(1, n=self.n)
        sigma = checked_noise_multiplier(self.noise_multiplier)
        object.__setattr__(self, "noise_multiplier", sigma)
        bound = checked_bound("max_grad_norm", self.max_grad_norm)
        object.__setattr__(self, "max_grad_norm", bound)
        choice(ARITHMETIC, arithmetic=self.arithmetic)
        choice(MODES, mode=self.mode)
        choice(pnsgd.RULES, rule=self.rule)
        if self.diameter is not None:
            positive(diameter=self.diameter)
        constant = choice(STEPS, steps=self.steps) == "constant"
        if constant != (self.learning_rate is not None):
            raise InvalidInput(
                "learning_rate",
                expected="a number with steps='constant', else None",
                got=self.learning_rate,
                remedy="Pass steps='constant' with learning_rate=, or leave both out.",
            )
        if constant:
            positive(learning_rate=self.learning_rate)

    @classmethod
    def from_budget(
        cls, n: int, lipschitz: float, epsilon: float, delta: float, **fields: object
    ) -> Self:
        """Return the notes' noise for T = n^2: ``s = 8 n L sqrt(log(2n/d) log(2/d)) / epsilon``."""
        sigma = pnsgd.pnsgd_sigma(n, lipschitz, epsilon, delta)
        noise = sigma / (n * lipschitz)
        return cls(n=n, max_grad_norm=lipschitz, noise_multiplier=noise, **fields)  # type: ignore[arg-type]

    @property
    def sigma(self) -> float:
        """s, the standard deviation of the noise on ``n grad l``."""
        return self.noise_multiplier * self.n * self.max_grad_norm

    @property
    def private(self) -> bool:
        """Whether the contribution is bounded and noised."""
        return self.noise_multiplier > 0 and math.isfinite(self.max_grad_norm)

    @property
    def certified_for(self) -> str:
        """``released bits``, ``real-number sums`` or ``nothing``."""
        return certified_scope(self.private, self.arithmetic)

    @property
    def notes(self) -> tuple[Note, ...]:
        """Notes N1 and N2, where the notes' chain is claimed."""
        return notes("N1", "N2") if self.mode == "published" else ()

    def event_spec(self, dimension: int | None = None) -> EventSpec:
        """Return the Gaussian mechanism of multiplier s / (n L), before sampling."""
        size = MAX_DIMENSION if dimension is None else integer(minimum=1, dimension=dimension)
        return gaussian_spec([self._block((1,))], self.arithmetic, size)

    def claimed_event_spec(self, dimension: int | None = None) -> EventSpec:
        """Return the same Gaussian mechanism; ``claim`` says what the notes make of it."""
        del dimension
        return events.gaussian(self.noise_multiplier) if self.private else events.non_private()

    def claim(
        self, *, steps: int, sample_rate: float, delta: float, dataset_size: int | None
    ) -> float | None:
        """Return the epsilon of ``rule`` after ``steps`` steps."""
        del sample_rate, dataset_size
        if steps == 0:
            return 0.0
        if not self.private:
            return math.inf
        numbers = self.sigma, self.n, self.max_grad_norm, delta
        return pnsgd.pnsgd_epsilon(*numbers, rule=self.rule, steps=steps)

    @property
    def claim_text(self) -> str:
        """The source of the claim ``epsilon_claimed``."""
        if self.mode == "published":
            return f"the notes' noise and n, by the rule {self.rule!r}"
        return super().claim_text

    def plan(self, shapes: Sequence[Sequence[int]], memory: MechanismState | None = None) -> Plan:
        """Return the plan for parameters of these shapes, in this order.

        Raises:
            InvalidInput: bad shapes.
        """
        blocks = assign_positions(self._block(shape) for shape in checked_shapes(shapes))
        arithmetic = self.arithmetic if self.private else "float"
        return Plan(
            mechanism=self.name,
            mode=self.mode,
            blocks=blocks,
            clipping=self.clipping,
            arithmetic=arithmetic,
            distribution="gaussian" if self.private else None,
            neighbouring=self.neighbouring,
            certified_for=self.certified_for,
            spec=gaussian_spec(blocks, arithmetic),
            notes=self.notes,
        )

    def step_size(self, t: int, dimension: int) -> float:
        """Return eta_t for the gradient of the summed loss, t = 1, 2, ...

        Args:
            t: number of the step.
            dimension: d, number of parameters.

        Raises:
            InvalidInput: no diameter to compute it from.
        """
        if self.learning_rate is not None:
            return self.learning_rate
        own = None if self.projection is None else self.projection.diameter(dimension)
        diameter = own if self.diameter is None else self.diameter
        if diameter is None:
            raise InvalidInput(
                "diameter",
                expected="a number, or a projection onto a bounded set",
                got=None,
                remedy="Pass diameter= or projection=, or steps='constant'.",
            )
        bound = pnsgd.gradient_bound(self.n, self.max_grad_norm, dimension, self.sigma)
        return pnsgd.step_sizes(diameter, bound)(integer(1, t=t))

    @classmethod
    def fields_of_run(cls, run: RunFacts, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return n, and the run's rate over n: the notes minimise the sum of the losses."""
        constant = given.get("steps", "constant") == "constant"
        chosen = {"steps": "constant", "learning_rate": run.lr / run.rows} if constant else {}
        return {"n": run.rows, **chosen}

    @property
    def sampling(self) -> Mapping[str, Any]:
        """Arguments of the sampling: one uniform record a step."""
        return {"sampling": "fixed", "dataset_size": self.n, "sample_rate": 1 / self.n}

    def rate(self, step: int, dimension: int) -> float:
        """Return ``n eta_t``: the sum of one clipped gradient stands for ``n grad l / n``."""
        return self.n * self.step_size(step, dimension)

    def _block(self, shape: tuple[int, ...]) -> Block:
        bound = self.max_grad_norm
        sd = self.noise_multiplier * bound if self.private else 0.0
        return Block(shape=shape, clip_group=0, bound=bound, noise_scale=sd)
