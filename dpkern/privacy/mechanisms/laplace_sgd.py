"""Laplace SGD: clip every sample's gradient, sum, add Laplace noise once to the sum.

    corrected    y = sum_i clip_1(g_i, C) + Lap(b)^d        one release is Laplace(b / C)
    published    y = sum_i clip_2(g_i, C) + Lap(b)^d        claimed: the same

with b = noise_multiplier C. The print clips the L2 norm and calibrates as if it were the L1 norm.
An L2 ball of radius C in d dimensions reaches L1 norm C sqrt(d), so the published form certifies
Laplace(b / (C sqrt(d))): hardly anything for a network.

``per_layer`` clips parameter l to C_l = C / L; L1 norms of layers add, so b = noise_multiplier C
again.

Reference: the distributed autoencoder's baseline of the stabilised perturbed loss, algorithm 2; the
Laplace mechanism of Dwork, McSherry, Nissim and Smith, 2006.
``dpkern.privacy.accounting.events.laplace`` proves the event for many coordinates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from ...base.errors import InvalidInput
from ...base.validate import choice, integer
from ..accounting import events
from ..accounting.events import EventSpec
from ..accounting.history import MAX_DIMENSION
from ._statement import ARITHMETIC, MODES, certified_scope
from .base import Mechanism, checked_bound, checked_noise_multiplier, checked_shapes
from .certify import laplace_spec
from .examples import UNIT, Example
from .memory import MechanismState
from .notes import Note, notes
from .plan import Block, Plan, assign_positions

CLIPPING = ("flat", "per_layer")


@dataclass(frozen=True, kw_only=True)
class LaplaceSGD(Mechanism):
    """The Laplace SGD mechanism: Laplace noise on the sum of clipped per-sample gradients.

    Args:
        noise_multiplier: b / C, in [2^-4, 2^10]; 0 adds no noise and is not private.
        max_grad_norm: C, a bound on L1 norms (``corrected``) or L2 norms (``published``).
        clipping: ``flat``, or ``per_layer`` with C / L for each of L parameters.
        arithmetic: ``exact`` or ``float``. None takes ``exact``, and ``float`` in published mode,
            whose clip norm is not the noise's.
        mode: ``corrected`` or ``published``.

    Raises:
        InvalidInput: a field out of its range, or ``exact`` in published mode.
        PrivacyError: a positive noise multiplier outside [2^-4, 2^10].
    """

    name: ClassVar[str] = "laplace_sgd"
    title: ClassVar[str] = "Laplace SGD"
    source: ClassVar[str] = "stabilised perturbed loss, algorithm 2"
    examples: ClassVar[tuple[Example, ...]] = (
        Example(UNIT),
        Example({**UNIT, "mode": "published"}, "-published", " as published"),
    )

    noise_multiplier: float
    max_grad_norm: float
    clipping: str = "flat"
    arithmetic: str | None = None
    mode: str = "corrected"

    def __post_init__(self) -> None:
        choice(CLIPPING, clipping=self.clipping)
        printed = choice(MODES, mode=self.mode) == "published"
        if self.arithmetic is None:
            object.__setattr__(self, "arithmetic", "float" if printed else "exact")
        choice(ARITHMETIC, arithmetic=self.arithmetic)
        if printed and self.arithmetic == "exact":
            raise InvalidInput(
                "arithmetic",
                expected="'float' with mode='published'",
                got="exact",
                remedy="Pass arithmetic='float': integers are clipped in L1, the paper in L2.",
            )
        sigma = checked_noise_multiplier(self.noise_multiplier)
        object.__setattr__(self, "noise_multiplier", sigma)
        bound = checked_bound("max_grad_norm", self.max_grad_norm)
        object.__setattr__(self, "max_grad_norm", bound)

    @property
    def noised(self) -> bool:
        """Whether every contribution is bounded and noised."""
        return self.noise_multiplier > 0 and math.isfinite(self.max_grad_norm)

    @property
    def certified_for(self) -> str:
        """``released bits``, ``real-number sums`` or ``nothing``."""
        return certified_scope(self.noised, str(self.arithmetic))

    @property
    def notes(self) -> tuple[Note, ...]:
        """The note C1, where L2 norms are clipped for Laplace noise."""
        return notes("C1") if self.mode == "published" else ()

    def event_spec(self, dimension: int | None = None) -> EventSpec:
        """Return the Laplace event of one release, valid for every model of at most ``dimension``.

        Args:
            dimension: number of parameters. None covers up to 2^40, at which the published form
                is non-private.
        """
        size = MAX_DIMENSION if dimension is None else integer(minimum=1, dimension=dimension)
        # One block of this size is the worst model; layers' bounds add to C but for rounding.
        (whole,) = self._blocks([(size,)])
        if self.clipping == "per_layer":
            whole = replace(whole, bound=whole.bound * (1 + 2.0**-40))
        return laplace_spec([whole], str(self.arithmetic), size)

    def claimed_event_spec(self, dimension: int | None = None) -> EventSpec:
        """Return the Laplace mechanism of multiplier b / C, as printed."""
        del dimension
        return events.laplace(self.noise_multiplier) if self.noised else events.non_private()

    def plan(self, shapes: Sequence[Sequence[int]], memory: MechanismState | None = None) -> Plan:
        """Return the plan for parameters of these shapes, in this order.

        Raises:
            InvalidInput: bad shapes, or a layer's bound below the lattice unit of the noise.
        """
        blocks = assign_positions(self._blocks(checked_shapes(shapes)))
        arithmetic = str(self.arithmetic) if self.noised else "float"
        spec = laplace_spec(blocks, arithmetic)
        return Plan(
            mechanism=self.name,
            mode=self.mode,
            blocks=blocks,
            clipping=self.clipping,
            arithmetic=arithmetic,
            distribution="laplace" if self.noised else None,
            neighbouring=self.neighbouring,
            certified_for=certified_scope(spec != events.non_private(), arithmetic),
            spec=spec,
            p=1 if self.mode == "corrected" else 2,
            notes=self.notes,
        )

    def _blocks(self, shapes: Sequence[tuple[int, ...]]) -> list[Block]:
        sizes = [math.prod(shape) for shape in shapes]
        per_layer = self.clipping == "per_layer"
        bound = self.max_grad_norm / (len(shapes) if per_layer else 1)
        blocks = []
        for index, shape in enumerate(shapes):
            reached = sizes[index] if per_layer else sum(sizes)
            blocks.append(
                Block(
                    shape=shape,
                    clip_group=index if per_layer else 0,
                    bound=bound,
                    noise_scale=self.noise_multiplier * self.max_grad_norm if self.noised else 0.0,
                    sensitivity_factor=1.0
                    if self.mode == "corrected"
                    else math.sqrt(max(1, reached)),
                )
            )
        return blocks
