"""Directional noise: Gaussian noise shaped by how much each coordinate matters.

With an importance w~ and a budget tau(epsilon, delta, k) of one release
(``dpkern.privacy.theory.markov``)

    s_i = (alpha / sqrt(tau)) |w~_i|^(1/3) (sum |w~_j|^(4/3))^(1/2) / ||w~||_2       (11)-(13)
    y   = sum_i clip_2(g_i, alpha) + N(0, diag(s^2))

is printed as the optimum under (epsilon, delta)-privacy over k steps. It is not: the optimum is
isotropic for every w~, and a sample whose gradient points at the smallest s_i moves the output by
kappa = (alpha / sqrt(tau)) / min s_i times what was budgeted
(``dpkern.papers.directional.optimum``).

Published, one release is at worst the Gaussian mechanism of multiplier ``1 / (sqrt(tau) kappa)``.
kappa depends on released values; a priori kappa <= floor^(-1/3), the ``floor`` of |w~|, or
``kappa_max``, for which s is raised: usually nothing is certified. The release of w~ itself,
clipped as an aggregate, costs the Gaussian mechanism of multiplier ``sd_w / (2 alpha)``.

Corrected, the noise is isotropic (DP-SGD), or ``elliptic``: with scales s learnt from noisy
gradients, ``||g / s||_2`` is clipped and the noise is ``sigma C s``. Dividing by s is a bijection,
so that is the Gaussian mechanism of multiplier sigma for every s.

Reference: directional noise for DP-SGD, equations (6)-(13) and algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch

from ...base.errors import InvalidInput
from ...base.validate import choice, half_open_unit, integer, open_unit, positive
from ..accounting import events
from ..accounting.events import EventSpec
from ..accounting.history import MAX_DIMENSION, MAX_NOISE_MULTIPLIER
from ..accounting.planning import epsilon as certified_epsilon
from ..theory import markov
from . import _budget, _shape
from . import _directional_options as options
from ._statement import ARITHMETIC, MODES, certified_scope
from .base import Mechanism, checked_bound, checked_noise_multiplier, checked_shapes
from .certify import gaussian_spec
from .examples import UNIT, Audit, Example
from .memory import MechanismState
from .notes import Note, notes
from .plan import Block, Importance, Plan, assign_positions
from .release import DiagonalMap
from .run_facts import RunFacts
from .work import OpAccount

_ROUNDED = 1 + 2.0**-40
"""Covers the rounding of scales that are computed in float64."""


@dataclass(frozen=True, kw_only=True)
class Directional(Mechanism):
    """The directional mechanism: Gaussian noise shaped by how much each coordinate matters.

    In published mode either ``epsilon``, ``delta``, ``steps`` and ``sample_rate`` are given and the
    noise follows from them as printed, or ``noise_multiplier`` is (and ``importance_multiplier``,
    where an importance is released).

    Args:
        max_grad_norm: alpha, the clip bound of a sample and of the importance.
        epsilon: of all steps, claimed.
        delta: of all steps, claimed.
        steps: k.
        sample_rate: q.
        noise_multiplier: ``1 / sqrt(tau)``, the isotropic noise scale / alpha. None derives it.
        importance_multiplier: noise scale of the importance / alpha. None derives it.
        generator: ``ours``; ``ours_w1``, all importances one; ``gaussian``, the sampled Gaussian
            by Renyi accounting. The fourth printed generator is ``AdaClip``.
        beta: ``integer`` orders in tau, as printed, or ``real``.
        budget_split: share of epsilon and delta that pays for the importance.
        w_source: ``lot``: the step's own samples; ``full``: what ``DPStep.set_importance`` was
            given, as printed; ``running``: a running mean of noisy gradients, which costs nothing.
        noise_target: ``sum``: the noise goes to the sum; ``average``: to the average, as printed,
            which is ``lot`` times as much.
        lot: public number of samples of a step, for ``average``.
        floor: minimum of ``|w_i|`` in units of the largest, in (0, 1). None is 1e-12, and .1 for
            ``elliptic``. There a scale is learnt from noise that is proportional to it, and would
            shrink without end.
        kappa_max: raise s so that kappa is at most this. None does as printed.
        amplified_budget: claim ``(epsilon / q, delta / q)`` for the gradients, as printed.
        shape: of the corrected noise, ``isotropic`` or ``elliptic``.
        decay: of the running mean of ``running`` and ``elliptic``.
        arithmetic: ``exact`` or ``float``. None takes ``exact`` where clip norm and noise agree.
        mode: ``corrected`` (needs ``noise_multiplier``) or ``published``.

    Raises:
        InvalidInput: a field out of its range, or noise and budget that contradict each other.
        PrivacyError: a positive noise multiplier outside [2^-4, 2^10].
    """

    name: ClassVar[str] = "directional"
    title: ClassVar[str] = "Directional"
    source: ClassVar[str] = "directional noise for DP-SGD"
    examples: ClassVar[tuple[Example, ...]] = (
        Example(UNIT, words=", isotropic"),
        Example({**UNIT, "shape": "elliptic"}, "-elliptic", ", elliptic"),
        Example(
            {**UNIT, "mode": "published", "importance_multiplier": 1.0},
            "-published",
            " as published",
        ),
    )
    audits: ClassVar[tuple[Audit, ...]] = (
        Audit(fields=UNIT, published={"importance_multiplier": 0.05}),
    )
    derived: ClassVar[tuple[str, ...]] = ("delta", "epsilon", "lot", "sample_rate", "steps")
    budget: ClassVar[tuple[str, ...]] = ("published",)
    clipping: ClassVar[str] = "flat"

    max_grad_norm: float
    epsilon: float | None = None
    delta: float | None = None
    steps: int | None = None
    sample_rate: float | None = None
    noise_multiplier: float = None  # type: ignore[assignment]
    importance_multiplier: float | None = None
    generator: str = "ours"
    beta: str = "integer"
    budget_split: float = 1 / 8
    w_source: str = "lot"
    noise_target: str = "sum"
    lot: int | None = None
    floor: float | None = None
    kappa_max: float | None = None
    amplified_budget: bool = True
    shape: str = "isotropic"
    decay: float = 0.9
    arithmetic: str | None = None
    mode: str = "corrected"

    def __post_init__(self) -> None:
        choice(MODES, mode=self.mode)
        options.check_shape(
            generator=self.generator, w_source=self.w_source, shape=self.shape, mode=self.mode
        )
        choice(markov.ORDERS, beta=self.beta)
        open_unit(budget_split=self.budget_split)
        open_unit(floor=self.least)
        half_open_unit(decay=self.decay)
        if self.kappa_max is not None and not positive(kappa_max=self.kappa_max) >= 1:
            raise InvalidInput(
                "kappa_max",
                expected="a number >= 1",
                got=self.kappa_max,
                remedy="Raise kappa_max; 1 makes the noise isotropic.",
            )
        bound = checked_bound("max_grad_norm", self.max_grad_norm)
        object.__setattr__(self, "max_grad_norm", bound)
        options.check_target(noise_target=self.noise_target, lot=self.lot, mode=self.mode)
        self._set_noise()
        if self.arithmetic is None:
            object.__setattr__(self, "arithmetic", "float" if self._stretch > 1 else "exact")
        if choice(ARITHMETIC, arithmetic=self.arithmetic) == "exact" and self._stretch > 1:
            raise InvalidInput(
                "arithmetic",
                expected="'float' where the noise is shaped, or above 2^10 times the bound",
                got="exact",
                remedy="Pass arithmetic='float': integers are bounded by the clip norm itself.",
            )

    def _set_noise(self) -> None:
        """Derive what is not given; a derived value given again must be the same."""
        derived = _budget.Multipliers(None, None)  # type: ignore[arg-type]
        if self.mode == "published" and self.epsilon is not None:
            derived = _budget.derive(
                self.generator,
                epsilon=self.epsilon,
                delta=self.delta,
                steps=self.steps,
                sample_rate=self.sample_rate,
                order=self.beta,
                split=self.budget_split if self._releases_importance else 0.0,
                amplified=self.amplified_budget,
            )
        self._set("noise_multiplier", derived.gradients, needed=True)
        checked_noise_multiplier(self.noise_multiplier)
        self._set("importance_multiplier", derived.importance, needed=self._releases_importance)

    def _set(self, name: str, follows: float | None, *, needed: bool) -> None:
        given = getattr(self, name)
        if given is not None and follows is not None and given != follows:
            raise options.no_budget(
                name, f"None, or {follows}, which follows from the budget", given
            )
        value = follows if given is None else given
        if value is None and needed:
            raise options.no_budget(
                name, "a number, or in published mode a budget to derive it from", None
            )
        object.__setattr__(self, name, value)
        if value is not None and name == "importance_multiplier":
            positive(importance_multiplier=value)

    @property
    def _shaped(self) -> bool:
        """Whether the printed closed form shapes the noise."""
        return self.mode == "published" and self.generator == "ours"

    @property
    def _elliptic(self) -> bool:
        return self.mode == "corrected" and self.shape == "elliptic"

    @property
    def least(self) -> float:
        """The floor of the scales: ``floor``, or what stands for None."""
        return self.floor if self.floor is not None else 0.1 if self._elliptic else 1e-12

    @property
    def _releases_importance(self) -> bool:
        return self._shaped and self.w_source != "running"

    @property
    def private(self) -> bool:
        """Whether every contribution is bounded and noised; the plan knows whether enough."""
        return self.noise_multiplier > 0 and math.isfinite(self.max_grad_norm)

    @property
    def certified_for(self) -> str:
        """``released bits``, ``real-number sums`` or ``nothing``."""
        certified = self.event_spec() != events.non_private()
        return certified_scope(certified, str(self.arithmetic))

    @property
    def notes(self) -> tuple[Note, ...]:
        """Notes on the printed form: shape (D1), orders (D2), sensitivity (D3), sampling (D4)."""
        if self.mode != "published":
            return ()
        found = ["D1"] if self._shaped else []
        if self.generator != "gaussian":
            found += ["D2"]
        if self.noise_target == "average" or self._releases_importance:
            found += ["D3"]
        if self.generator != "gaussian" and self.amplified_budget:
            found += ["D4"]
        return notes(*found)

    @property
    def kappa_bound(self) -> float:
        """The largest kappa that the scales can have, a priori."""
        if not self._shaped:
            return 1.0
        floor = float(self.least ** (-1 / 3))
        return _ROUNDED * (floor if self.kappa_max is None else min(floor, self.kappa_max))

    @property
    def _stretch(self) -> float:
        """The norm in units of the noise; noise is certified up to 2^10 bounds."""
        return max(self.kappa_bound, self._noise * _ROUNDED / MAX_NOISE_MULTIPLIER)

    @property
    def importance(self) -> Importance | None:
        """The release of w~ before each step's noise."""
        if not self._releases_importance or self.importance_multiplier is None:
            return None
        sd = self.importance_multiplier * self.max_grad_norm
        return Importance(bound=self.max_grad_norm, noise_scale=sd, source=self.w_source)

    def event_spec(self, dimension: int | None = None) -> EventSpec:
        """Return the Gaussian event of one release, and of its importance if ``w_source="lot"``."""
        size = MAX_DIMENSION if dimension is None else integer(minimum=1, dimension=dimension)
        return self._spec([self._block((1,))], size)

    @property
    def unsampled(self) -> EventSpec:
        """The release of the importance in every step, with ``w_source="full"``."""
        return self._unsampled(MAX_DIMENSION)

    def claimed_event_spec(self, dimension: int | None = None) -> EventSpec:
        """Return the Gaussian mechanism of the isotropic multiplier, where no budget is claimed."""
        del dimension
        return events.gaussian(self.noise_multiplier) if self.private else events.non_private()

    def claim(
        self, *, steps: int, sample_rate: float, delta: float, dataset_size: int | None
    ) -> float | None:
        """Return the budget, up to k steps and down to its delta; infinite beyond."""
        del sample_rate, dataset_size
        if self.epsilon is None or self.mode != "published":
            return None
        if steps == 0:
            return 0.0
        assert self.steps is not None
        assert self.delta is not None
        return self.epsilon if steps <= self.steps and delta >= self.delta else math.inf

    @property
    def claim_text(self) -> str:
        """The source of the claim ``epsilon_claimed``."""
        if self.mode == "published" and self.epsilon is not None:
            return f"the source's budget of {self.steps} steps, by its own composition"
        return super().claim_text

    def with_noise_multiplier(self, noise_multiplier: float) -> Self:
        """Return the configuration with other noise, without a claimed budget."""
        changed: Self = replace(self, noise_multiplier=noise_multiplier, epsilon=None, delta=None)
        return changed

    def memory(self, params: Sequence[torch.Tensor]) -> MechanismState | None:
        """Return what shapes the noise: the importance, or a running mean of noisy gradients."""
        name = "importance" if self._releases_importance else "running"
        if not (self._shaped or self._elliptic):
            return None
        return MechanismState({name: [torch.zeros_like(p, dtype=torch.float64) for p in params]})

    def weigh(self, memory: MechanismState, importance: Sequence[torch.Tensor]) -> None:
        """Take over the released importance."""
        for held, new in zip(memory["importance"], importance, strict=True):
            held.copy_(new)

    def learn(self, memory: MechanismState, gradients: Sequence[torch.Tensor]) -> None:
        """Move the running mean of ``|noisy gradient|``."""
        if self._releases_importance:
            return
        for held, new in zip(memory["running"], gradients, strict=True):
            held.lerp_(new.double().abs(), 1 - self.decay)

    @classmethod
    def fields_of_run(cls, run: RunFacts, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of the printed noise, where the budget is given and not the noise."""
        if "epsilon" not in given:
            return {"lot": run.batch_size}
        steps, rate = run.steps, run.sample_rate
        return {"lot": run.batch_size, "delta": run.delta, "steps": steps, "sample_rate": rate}

    def count_learning(self, work: OpAccount, sizes: Sequence[int]) -> None:
        """Count how magnitudes join their running mean, where there is one."""
        for n in () if self._releases_importance else sizes:
            work.each("running mean", n, AND=1)
            work.each("running mean", n, reads=2, SUB=1, MUL=1, ADD=1)

    def count_plan(self, work: OpAccount, sizes: Sequence[int], step: int) -> None:
        """Count the relative scales of importances that are not all zero."""
        del step
        _shape.count(work, sizes, powers=self._shaped, raised=self.kappa_max is not None)

    def plan(self, shapes: Sequence[Sequence[int]], memory: MechanismState | None = None) -> Plan:
        """Return the plan for parameters of these shapes; without a memory its noise is isotropic.

        Raises:
            InvalidInput: bad shapes.
        """
        sizes = checked_shapes(shapes)
        releases: Sequence[DiagonalMap | None] = [None] * len(sizes)
        if self._shaped or self._elliptic:
            memory = memory or self.memory([torch.empty(shape) for shape in sizes])
            assert memory is not None
            norm = "gradient" if self._shaped else "release"
            releases = [DiagonalMap(scale=s, norm=norm) for s in self._scales(memory)]
        blocks = assign_positions(
            self._block(shape, release) for shape, release in zip(sizes, releases, strict=True)
        )
        dimension = sum(block.size for block in blocks)
        spec = self._spec(blocks, dimension)
        private = spec != events.non_private()
        return Plan(
            mechanism=self.name,
            mode=self.mode,
            blocks=blocks,
            clipping=self.clipping,
            arithmetic=str(self.arithmetic) if private else "float",
            distribution="gaussian" if self.private else None,
            neighbouring=self.neighbouring,
            certified_for=certified_scope(private, str(self.arithmetic)),
            spec=spec,
            unsampled=self._unsampled(dimension),
            notes=self.notes,
            importance=self.importance,
        )

    def realised(self, memory: MechanismState | None) -> dict[str, float]:
        """Return kappa of the last scales, and ``tau = alpha^2 / min s^2``, which they spend."""
        if memory is None or not self._shaped or not self.private:
            return {}
        smallest = min(s.min().item() for s in self._scales(memory) if s.numel())
        return {"kappa": 1 / smallest, "tau_effective": (self._noise * smallest) ** -2}

    def epsilon_at(self, kappa: float) -> float:
        """Return epsilon of the budget's steps if each had this kappa: never a certificate.

        Raises:
            InvalidInput: no budget says how many steps, at which rate and delta.
        """
        if self.steps is None or self.sample_rate is None or self.delta is None:
            raise options.no_budget("steps", "numbers that say what would be composed", None)
        as_if = replace(self, kappa_max=max(1.0, kappa))
        return certified_epsilon(
            as_if, sample_rate=self.sample_rate, steps=self.steps, delta=self.delta
        )

    @property
    def _noise(self) -> float:
        """Noise multiplier of isotropic noise on the sum."""
        average = self.noise_target == "average" and self.lot is not None
        return self.noise_multiplier * (self.lot or 1 if average else 1)

    def _scales(self, memory: MechanismState) -> list[torch.Tensor]:
        """Return the relative noise scales: 1 is isotropic."""
        if not self._shaped:
            return _shape.elliptic(memory["running"], self.least)
        name = "importance" if self._releases_importance else "running"
        scales = _shape.printed(memory[name], self.least)
        if self.kappa_max is None:
            return scales
        return [s.clamp_(min=1 / self.kappa_max) for s in scales]

    def _block(self, shape: tuple[int, ...], release: DiagonalMap | None = None) -> Block:
        bound = self.max_grad_norm
        return Block(
            shape=shape,
            clip_group=0,
            bound=bound,
            noise_scale=self._noise * bound if self.private else 0.0,
            release=release,
            sensitivity_factor=self._stretch,
        )

    def _importance_blocks(self) -> list[Block]:
        """Return the importance as a clip group: a clipped aggregate moves by twice its bound."""
        given = self.importance
        if given is None:
            return []
        # Above 2^10 as if it were 2^10, where the noise law is certified.
        bound = max(2 * given.bound, given.noise_scale * _ROUNDED / MAX_NOISE_MULTIPLIER)
        return [Block(shape=(1,), clip_group=1, bound=bound, noise_scale=given.noise_scale)]

    def _unsampled(self, dimension: int) -> EventSpec:
        if self.importance is None or self.importance.source != "full":
            return events.no_op()
        return gaussian_spec(self._importance_blocks(), "float", dimension)

    def _spec(self, blocks: Sequence[Block], dimension: int) -> EventSpec:
        lot = self.importance is not None and self.importance.source == "lot"
        together = [*blocks, *(self._importance_blocks() if lot else [])]
        return gaussian_spec(together, str(self.arithmetic), dimension * (1 + lot))
