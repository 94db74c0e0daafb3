"""AdaClip: clip in coordinates that are scaled and centred by what was released before.

    b_i = sqrt(s_i) sqrt(sum_j s_j) / sqrt(gamma)         u = (g - m) / b
    u~  = ( sum_i clip_2(u_i, C) + N(0, z^2 C^2 I) ) / L       g~  = b u~ + m
    m   = beta1 m + (1 - beta1) g~
    s^2 = beta2 s^2 + (1 - beta2) clamp((g~ - m)^2 - (b z C / L)^2, h1, h2)       with the old m

m and s are functions of released values, and dividing by b is a bijection, so one release is the
Gaussian mechanism of multiplier z whatever they are. C = 1 in print.

Reference: Pichapati et al., AdaClip, 2019; the baseline of directional noise for DP-SGD, which sets
gamma = 0.01 and says that this clips 99 % of gradients. gamma bounds the mean of ||u||^2, so at
most about gamma of them are clipped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ...base.errors import InvalidInput
from ...base.validate import choice, half_open_unit, integer, positive
from ..accounting import events
from ..accounting.events import EventSpec
from ..accounting.history import MAX_DIMENSION
from ._statement import ARITHMETIC, MODES, certified_scope
from .base import Mechanism, checked_bound, checked_noise_multiplier, checked_shapes
from .certify import gaussian_spec
from .examples import UNIT, Audit, Example
from .memory import MechanismState
from .notes import Note, notes
from .plan import Block, Plan, assign_positions
from .release import DiagonalMap
from .work import OpAccount


@dataclass(frozen=True, kw_only=True)
class AdaClip(Mechanism):
    """The AdaClip mechanism: Gaussian noise in scaled and centred coordinates.

    Args:
        noise_multiplier: z, in [2^-4, 2^10]; 0 adds no noise and is not private.
        expected_batch_size: L, public, what sums are divided by.
        max_grad_norm: C, the bound on scaled gradients.
        gamma: divides the scales by its root, in (0, 1]. None stands for 1.
        beta1: decay of the mean.
        beta2: decay of the squared scale.
        h1: least estimate of a variance.
        h2: largest estimate of a variance.
        initial_scale: s at the start. None stands for sqrt(h1 h2).
        arithmetic: ``exact`` or ``float``.
        mode: both do the same; ``published`` carries the note on gamma.

    Raises:
        InvalidInput: a field out of its range.
        PrivacyError: a positive noise multiplier outside [2^-4, 2^10].
    """

    name: ClassVar[str] = "adaclip"
    title: ClassVar[str] = "AdaClip"
    source: ClassVar[str] = "Pichapati et al., 2019"
    examples: ClassVar[tuple[Example, ...]] = (
        Example({"noise_multiplier": 1.0, "expected_batch_size": 1.0}),
    )
    audits: ClassVar[tuple[Audit, ...]] = (Audit(fields=UNIT, published={"gamma": 0.01}),)
    clipping: ClassVar[str] = "flat"

    noise_multiplier: float
    expected_batch_size: float
    max_grad_norm: float = 1.0
    gamma: float | None = None
    beta1: float = 0.99
    beta2: float = 0.9
    h1: float = 1e-12
    h2: float = 10.0
    initial_scale: float | None = None
    arithmetic: str = "exact"
    mode: str = "corrected"

    def __post_init__(self) -> None:
        choice(MODES, mode=self.mode)
        choice(ARITHMETIC, arithmetic=self.arithmetic)
        sigma = checked_noise_multiplier(self.noise_multiplier)
        object.__setattr__(self, "noise_multiplier", sigma)
        bound = checked_bound("max_grad_norm", self.max_grad_norm)
        object.__setattr__(self, "max_grad_norm", bound)
        positive(expected_batch_size=self.expected_batch_size)
        half_open_unit(beta1=self.beta1)
        half_open_unit(beta2=self.beta2)
        if not positive(h1=self.h1) <= positive(h2=self.h2):
            raise InvalidInput(
                "h1", expected=f"at most h2 = {self.h2}", got=self.h1, remedy="Swap the two."
            )
        if self.initial_scale is not None:
            positive(initial_scale=self.initial_scale)
        if self.gamma is not None and not positive(gamma=self.gamma) <= 1:
            raise InvalidInput(
                "gamma",
                expected="a number in (0, 1]",
                got=self.gamma,
                remedy="Pass gamma=1 or less: it bounds the mean of the squared scaled norm.",
            )

    @property
    def private(self) -> bool:
        """Whether every contribution is bounded and noised."""
        return self.noise_multiplier > 0 and math.isfinite(self.max_grad_norm)

    @property
    def certified_for(self) -> str:
        """``released bits``, ``real-number sums`` or ``nothing``."""
        return certified_scope(self.private, self.arithmetic)

    @property
    def notes(self) -> tuple[Note, ...]:
        """The note D7, the printed reading of gamma."""
        return notes("D7") if self.mode == "published" and self.gamma is not None else ()

    def event_spec(self, dimension: int | None = None) -> EventSpec:
        """Return the Gaussian mechanism of multiplier z, less what rounding of float sums takes."""
        size = MAX_DIMENSION if dimension is None else integer(minimum=1, dimension=dimension)
        return gaussian_spec([self._block((1,))], self.arithmetic, size)

    def claimed_event_spec(self, dimension: int | None = None) -> EventSpec:
        """Return the Gaussian mechanism of multiplier z."""
        del dimension
        return events.gaussian(self.noise_multiplier) if self.private else events.non_private()

    def memory(self, params: Sequence[torch.Tensor]) -> MechanismState:
        """Return the first memory, float64 on the parameters' device: zero mean, one scale."""
        start = self.initial_scale
        scale = math.sqrt(self.h1 * self.h2) if start is None else start
        like = [p.detach().double() for p in params]
        return MechanismState(
            {
                "mean": [torch.zeros_like(p) for p in like],
                "square": [torch.full_like(p, scale**2) for p in like],
            }
        )

    def plan(self, shapes: Sequence[Sequence[int]], memory: MechanismState | None = None) -> Plan:
        """Return the plan for parameters of these shapes; without a memory that of the first step.

        Raises:
            InvalidInput: bad shapes.
        """
        sizes = checked_shapes(shapes)
        if memory is None:
            memory = self.memory([torch.empty(shape) for shape in sizes])
        releases = [
            DiagonalMap(scale=scale, centre=mean, restore=True, norm="release")
            for scale, mean in zip(self._scales(memory), memory["mean"], strict=True)
        ]
        blocks = assign_positions(
            self._block(shape, release) for shape, release in zip(sizes, releases, strict=True)
        )
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

    def learn(self, memory: MechanismState, gradients: Sequence[torch.Tensor]) -> None:
        """Move mean and scales by the noisy gradients g~ of a step."""
        noise = self.noise_multiplier * self.max_grad_norm / self.expected_batch_size
        scales = self._scales(memory)
        held = zip(gradients, memory["mean"], memory["square"], scales, strict=True)
        for gradient, mean, square, scale in held:
            away = gradient.double() - mean
            variance = (away**2 - (scale * noise) ** 2).clamp_(self.h1, self.h2)
            square.lerp_(variance, 1 - self.beta2)
            mean.lerp_(gradient.double(), 1 - self.beta1)

    def count_learning(self, work: OpAccount, sizes: Sequence[int]) -> None:
        """Count the scales, ``clamp((g - m)^2 - (b noise)^2)`` into s^2, and g into the mean."""
        self.count_plan(work, sizes, 0)
        for n in sizes:
            work.each("moments", n, reads=2, SUB=1)
            for _ in ("square of g - m", "b times the noise", "its square"):
                work.each("moments", n, MUL=1)
            work.each("moments", n, reads=2, SUB=1)
            work.each("moments", n, CMP=2, MUX=2)
            for _ in ("square", "mean"):
                work.each("moments", n, reads=2, SUB=1, MUL=1, ADD=1)

    def count_plan(self, work: OpAccount, sizes: Sequence[int], step: int) -> None:
        """Count ``s``, its sum over everything, and ``sqrt(s)`` times a number."""
        del step
        for n in sizes:
            work.each("scales", n, SQRT=1)
            work.summed("scales", n)
            work.each("scales", n, SQRT=1)
            work.each("scales", n, MUL=1)

    def _scales(self, memory: MechanismState) -> list[torch.Tensor]:
        """Return ``b = sqrt(s) sqrt(sum s) / sqrt(gamma)``, the sum over all parameters."""
        deviations = [square.sqrt() for square in memory["square"]]
        total = math.fsum(s.sum().item() for s in deviations)
        factor = math.sqrt(total / (1.0 if self.gamma is None else self.gamma))
        return [s.sqrt() * factor for s in deviations]

    def _block(self, shape: tuple[int, ...], release: DiagonalMap | None = None) -> Block:
        bound = self.max_grad_norm
        sd = self.noise_multiplier * bound if self.private else 0.0
        return Block(shape=shape, clip_group=0, bound=bound, noise_scale=sd, release=release)
