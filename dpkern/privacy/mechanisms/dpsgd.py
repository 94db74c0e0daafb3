"""DP-SGD: clip every sample's gradient, sum, add Gaussian noise once to the sum.

    y = sum_i clip(g_i) + N(0, sd^2 I)

``flat``       the whole gradient is clipped to C;               sd = sigma C
``automatic``  the whole gradient is normalised to at most C;    sd = sigma C
``per_layer``  parameter l is clipped to C_l;                    sd = sigma sqrt(sum C_l^2)
``group``      the parameters of group k together to C_k;        sd = sigma sqrt(sum C_k^2)

With mu = (L2 norm of one contribution) / sd, one release is the Gaussian mechanism of noise
multiplier 1 / mu: mu = C / sd for the first two, mu^2 = sum (C_l / sd)^2 for the others, where a
sample moves every layer or group at once.

``noise_point="per_sample"`` is a printed variant, one draw for every sample of the batch B_t:

    y = sum_i ( clip(g_i) + N(0, sigma^2 C^2 I) ),    noise sigma C sqrt(|B_t|) on the sum

Its variance tells how many samples there were, so it certifies nothing unless that number is fixed.

Reference: Abadi et al., Deep Learning with Differential Privacy, 2016; for ``automatic`` Bu et al.,
Automatic Clipping, 2023; for ``per_sample`` the adaptive Laplace mechanism's baseline, equations
(2)-(3), and GReDP, algorithm 2, line 9.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from ...base.errors import InvalidInput
from ...base.validate import choice, integer
from ..accounting import events
from ..accounting.events import EventSpec
from ..accounting.history import MAX_DIMENSION
from ._statement import ARITHMETIC, MODES, certified_scope
from .base import (
    OPTIONAL_IN_CHECKPOINT,
    Mechanism,
    checked_bound,
    checked_noise_multiplier,
    checked_shapes,
)
from .certify import exact_multiplier, float_multiplier, gaussian_spec, lattice_bound
from .examples import UNIT, Example
from .memory import MechanismState
from .notes import Note, notes
from .plan import Block, Plan, assign_positions

CLIPPING = ("flat", "per_layer", "group", "automatic")
NOISE_POINTS = ("per_batch", "per_sample")

_ROUNDED = 1 - 2.0**-40
"""Covers the rounding of C / sqrt(L) and of the sum of squares for fewer than 2^10 roundings."""


@dataclass(frozen=True, kw_only=True)
class DPSGD(Mechanism):
    """The DP-SGD mechanism: Gaussian noise on the sum of clipped per-sample gradients.

    Args:
        noise_multiplier: sigma, noise standard deviation / bound of one sample's contribution, in
            [2^-4, 2^10]; 0 adds no noise and is not private.
        max_grad_norm: C; ``math.inf`` does not clip and is not private. For ``per_layer`` either C,
            shared as C / sqrt(L) by L parameters, or one bound per parameter; ``group`` likewise
            with its groups.
        clipping: ``flat``, ``per_layer``, ``group`` or ``automatic``.
        arithmetic: ``exact`` sums integers on the noise lattice and is certified for the released
            bits; ``float`` sums floating-point numbers and is certified for real-number sums only.
        mode: ``published`` is the printed algorithm (flat clip), whose claim is the Gaussian
            mechanism of multiplier sigma; ``corrected`` allows every clipping.
        groups: for ``group`` only: the clip group of each parameter, numbered from 0 without gaps.
        noise_point: ``per_batch``, or ``per_sample`` with ``mode="published"``.
        batch_size: for ``per_sample`` only: how many samples every step has, with sampling
            ``fixed`` or ``shuffled``; one release is then the Gaussian mechanism of multiplier
            ``sigma sqrt(batch_size)``. None allows any number, and nothing is certified.

    Raises:
        InvalidInput: a field out of its range.
        PrivacyError: a positive noise multiplier outside [2^-4, 2^10].
    """

    name: ClassVar[str] = "dpsgd"
    title: ClassVar[str] = "DP-SGD"
    source: ClassVar[str] = "Abadi et al., 2016"
    examples: ClassVar[tuple[Example, ...]] = (
        Example(UNIT),
        Example({**UNIT, "clipping": "per_layer"}, "-per-layer", ", per layer"),
        Example({**UNIT, "clipping": "automatic"}, "-automatic", ", automatic", "Bu et al., 2023"),
        Example({**UNIT, "clipping": "group", "groups": (0, 1, 1)}, "-group", ", group-wise"),
        Example(
            {**UNIT, "mode": "published", "noise_point": "per_sample"},
            "-per-sample-noise",
            ", noise per sample",
            "GReDP, algorithm 2",
        ),
    )

    noise_multiplier: float
    max_grad_norm: float | tuple[float, ...]
    clipping: str = "flat"
    arithmetic: str = "exact"
    mode: str = "corrected"
    groups: tuple[int, ...] | None = None
    noise_point: str = field(default="per_batch", metadata=OPTIONAL_IN_CHECKPOINT)
    batch_size: int | None = field(default=None, metadata=OPTIONAL_IN_CHECKPOINT)

    def __post_init__(self) -> None:
        choice(CLIPPING, clipping=self.clipping)
        object.__setattr__(self, "groups", self._checked_groups())
        choice(ARITHMETIC, arithmetic=self.arithmetic)
        choice(MODES, mode=self.mode)
        if self.mode == "published" and self.clipping != "flat":
            raise InvalidInput(
                "clipping",
                expected="'flat' with mode='published'",
                got=self.clipping,
                remedy="Use mode='corrected': the printed algorithm clips the whole gradient.",
            )
        sigma = checked_noise_multiplier(self.noise_multiplier)
        object.__setattr__(self, "noise_multiplier", sigma)
        object.__setattr__(self, "max_grad_norm", self._checked_bounds())
        self._check_noise_point()

    def _check_noise_point(self) -> None:
        each = choice(NOISE_POINTS, noise_point=self.noise_point) == "per_sample"
        if each and self.mode != "published":
            raise InvalidInput(
                "noise_point",
                expected="'per_batch' with mode='corrected'",
                got=self.noise_point,
                remedy="Use mode='published': noise for each sample is a printed variant.",
            )
        if self.batch_size is None:
            return
        if not each:
            raise InvalidInput(
                "batch_size",
                expected="None with noise_point='per_batch'",
                got=self.batch_size,
                remedy="Remove batch_size=, or pass noise_point='per_sample', mode='published'.",
            )
        checked_noise_multiplier(self._multiplier(integer(1, batch_size=self.batch_size)))

    def _multiplier(self, samples: int) -> float:
        """Return the noise on the sum of so many samples / the bound of one contribution."""
        return self.noise_multiplier * math.sqrt(samples)

    def _checked_bounds(self) -> float | tuple[float, ...]:
        given = self.max_grad_norm
        if not isinstance(given, (tuple, list)):
            bound = checked_bound("max_grad_norm", given)
            if self.clipping == "automatic" and bound == math.inf:
                raise InvalidInput(
                    "max_grad_norm",
                    expected="a finite bound with clipping='automatic'",
                    got=given,
                    remedy="Use clipping='flat' for no bound: normalised gradients need a norm.",
                )
            return bound
        if self.clipping not in ("per_layer", "group") or not given:
            raise InvalidInput(
                "max_grad_norm",
                expected="one number, or one per parameter with clipping='per_layer'",
                got=given,
                remedy="Pass a number, or choose clipping='per_layer' or 'group'.",
            )
        if self.groups is not None and len(given) != max(self.groups) + 1:
            raise InvalidInput(
                "max_grad_norm",
                expected=f"one number, or {max(self.groups) + 1}, one per clip group",
                got=given,
                remedy="Give every group in groups= its bound, in the order of their numbers.",
            )
        return tuple(checked_bound("max_grad_norm", bound) for bound in given)

    def _checked_groups(self) -> tuple[int, ...] | None:
        given = self.groups
        if (given is None) != (self.clipping != "group"):
            raise InvalidInput(
                "groups",
                expected="the clip group of each parameter, with clipping='group' only",
                got=given,
                remedy="Pass clipping='group' together with groups=(0, 0, 1, ...).",
            )
        if given is None:
            return None
        if not isinstance(given, (tuple, list)) or not given:
            raise InvalidInput(
                "groups",
                expected="one int per parameter",
                got=given,
                remedy="Pass a tuple such as (0, 0, 1).",
            )
        numbers = tuple(integer(groups=number) for number in given)
        if set(numbers) != set(range(max(numbers) + 1)):
            raise InvalidInput(
                "groups",
                expected="numbers from 0 without gaps",
                got=given,
                remedy="Number the groups 0, 1, 2, ...",
            )
        return numbers

    @property
    def samples(self) -> int | None:
        """Number of samples that every step must have. None allows any number."""
        return self.batch_size

    @property
    def noised(self) -> bool:
        """Whether every contribution is bounded and noised."""
        given = self.max_grad_norm
        bounds = given if isinstance(given, tuple) else (given,)
        return self.noise_multiplier > 0 and math.inf not in bounds

    @property
    def private(self) -> bool:
        """Whether the noise protects: its variance must not tell how many samples there were."""
        return self.noised and (self.noise_point == "per_batch" or self.batch_size is not None)

    @property
    def notes(self) -> tuple[Note, ...]:
        """The note G4, where noise is drawn for each sample."""
        return notes("G4") if self.noise_point == "per_sample" else ()

    @property
    def certified_for(self) -> str:
        """``released bits``, ``real-number sums`` or ``nothing``."""
        return certified_scope(self.private, self.arithmetic)

    def event_spec(self, dimension: int | None = None) -> EventSpec:
        """Return the Gaussian event of one release, valid for every model of at most ``dimension``.

        Args:
            dimension: number of parameters; only float sums depend on it. None covers up to 2^40.
        """
        if not self.private:
            return events.non_private()
        size = MAX_DIMENSION if dimension is None else integer(minimum=1, dimension=dimension)
        if self.clipping == "per_layer" and not isinstance(self.max_grad_norm, tuple):
            # The number of layers is unknown, and sigma is a lower bound for every number.
            sigma = self.noise_multiplier * _ROUNDED
            if self.arithmetic == "exact":
                return events.gaussian(sigma)
            return events.gaussian(float_multiplier([(1.0, sigma)], size))
        return self._event(self._groups(1), size)

    def claimed_event_spec(self, dimension: int | None = None) -> EventSpec:
        """Return the Gaussian mechanism of multiplier sigma, as printed."""
        del dimension
        return events.gaussian(self.noise_multiplier) if self.noised else events.non_private()

    def plan(self, shapes: Sequence[Sequence[int]], memory: MechanismState | None = None) -> Plan:
        """Return the plan for parameters of these shapes, in this order.

        Raises:
            InvalidInput: bad shapes, a number of bounds other than that of the parameters, or a
                layer's bound below the lattice unit of the noise.
        """
        sizes = checked_shapes(shapes)
        groups = self._groups(len(sizes))
        per_layer = self.clipping == "per_layer"
        if self.groups is not None and len(self.groups) != len(sizes):
            raise InvalidInput(
                "groups",
                expected=f"{len(sizes)} numbers, one per parameter",
                got=f"{len(self.groups)} numbers",
                remedy="Give every parameter of the model its clip group.",
            )
        if per_layer and len(groups) != len(sizes):
            raise InvalidInput(
                "max_grad_norm",
                expected=f"{len(sizes)} bounds, one per parameter",
                got=f"{len(groups)} bounds",
                remedy="Pass one bound for every parameter of the model.",
            )
        blocks = []
        for index, shape in enumerate(sizes):
            group = index if per_layer else 0 if self.groups is None else self.groups[index]
            bound, sd = groups[group]
            blocks.append(Block(shape=shape, clip_group=group, bound=bound, noise_scale=sd))
        placed = assign_positions(blocks)
        return Plan(
            mechanism=self.name,
            mode=self.mode,
            blocks=placed,
            clipping=self.clipping,
            # Without noise there is no lattice to sum on.
            arithmetic=self.arithmetic if self.private else "float",
            distribution="gaussian" if self.noised else None,
            neighbouring=self.neighbouring,
            certified_for=self.certified_for,
            spec=gaussian_spec(placed, self.arithmetic) if self.private else events.non_private(),
            noise_point=self.noise_point,
            samples=self.batch_size,
            notes=self.notes,
        )

    def _groups(self, layers: int) -> list[tuple[float, float]]:
        """Return ``(bound, sd)`` of every clip group."""
        given = self.max_grad_norm
        if isinstance(given, tuple):
            bounds = list(given)
        elif self.clipping in ("per_layer", "group"):
            count = layers if self.groups is None else max(self.groups) + 1
            bounds = [given / math.sqrt(count)] * count
        else:
            bounds = [given]
        if not self.noised:
            return [(bound, 0.0) for bound in bounds]
        norm = bounds[0] if len(bounds) == 1 else math.hypot(*bounds)
        # An unknown number of samples: what each of them is noised with.
        sigma = self._multiplier(self.batch_size or 1)
        return [(bound, sigma * norm) for bound in bounds]

    def _event(self, groups: Sequence[tuple[float, float]], dimension: int) -> EventSpec:
        """Return the event of clip groups that one sample moves together."""
        if self.arithmetic == "float":
            return events.gaussian(float_multiplier(groups, dimension))
        return events.gaussian(exact_multiplier([lattice_bound(*group) for group in groups]))
