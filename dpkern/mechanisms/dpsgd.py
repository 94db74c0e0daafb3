"""DP-SGD: clip every sample's gradient, sum, add Gaussian noise once to the sum.

    y = sum_i clip(g_i) + N(0, sd^2 I)

``flat``       the whole gradient is clipped to C;               sd = sigma C
``automatic``  the whole gradient is normalised to at most C;    sd = sigma C
``per_layer``  parameter l is clipped to C_l;                    sd = sigma sqrt(sum C_l^2)
``group``      the parameters of group k together to C_k;        sd = sigma sqrt(sum C_k^2)

With mu = (L2 norm of one contribution) / sd, one release is the Gaussian mechanism of noise
multiplier 1 / mu: mu = C / sd for the first two, mu^2 = sum (C_l / sd)^2 for the others, where a
sample moves every layer or group at once.

Source: Abadi et al., Deep Learning with Differential Privacy, 2016; for ``automatic`` Bu et al.,
Automatic Clipping, 2023.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from .._validate import choice, integer
from ..accounting import events
from ..accounting.events import EventSpec
from ..accounting.history import MAX_DIMENSION, NOTHING, REAL_SUMS, RELEASED_BITS
from ..errors import InvalidInput
from .base import Mechanism, checked_bound, checked_noise_multiplier, checked_shapes
from .certify import exact_multiplier, float_multiplier, gaussian_spec, lattice_bound
from .memory import Memory
from .plan import Block, Plan, laid_out

CLIPPING = ("flat", "per_layer", "group", "automatic")
ARITHMETIC = ("exact", "float")
MODES = ("corrected", "published")

_ROUNDED = 1 - 2.0**-40
"""Covers the rounding of C / sqrt(L) and of the sum of squares for fewer than 2^10 roundings."""


@dataclass(frozen=True, kw_only=True)
class DPSGD(Mechanism):
    """Configuration of DP-SGD.

    Args:
        noise_multiplier: sigma, noise standard deviation / bound of one sample's contribution, in
            [2^-4, 2^10]; 0 adds no noise and is not private.
        max_grad_norm: C; ``math.inf`` does not clip and is not private. For ``per_layer`` either C,
            shared as C / sqrt(L) by L parameters, or one bound per parameter; ``group`` likewise
            with its groups.
        clipping: ``flat``, ``per_layer``, ``group`` or ``automatic``.
        groups: for ``group`` only: the clip group of each parameter, numbered from 0 without gaps.
        arithmetic: ``exact`` sums integers on the noise lattice and is certified for the released
            bits; ``float`` sums floating-point numbers and is certified for real-number sums only.
        mode: ``published`` is the printed algorithm (flat clip, noise once per batch), whose
            claim is the Gaussian mechanism of multiplier sigma; ``corrected`` allows everything.

    Raises:
        InvalidInput: a field out of its range.
        PrivacyError: a positive noise multiplier outside [2^-4, 2^10].
    """

    name: ClassVar[str] = "dpsgd"

    noise_multiplier: float
    max_grad_norm: float | tuple[float, ...]
    clipping: str = "flat"
    arithmetic: str = "exact"
    mode: str = "corrected"
    groups: tuple[int, ...] | None = None

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
                remedy="The printed algorithm clips the whole gradient; use mode='corrected'.",
            )
        sigma = checked_noise_multiplier(self.noise_multiplier)
        object.__setattr__(self, "noise_multiplier", sigma)
        object.__setattr__(self, "max_grad_norm", self._checked_bounds())

    def _checked_bounds(self) -> float | tuple[float, ...]:
        given = self.max_grad_norm
        if not isinstance(given, (tuple, list)):
            bound = checked_bound("max_grad_norm", given)
            if self.clipping == "automatic" and bound == math.inf:
                raise InvalidInput(
                    "max_grad_norm",
                    expected="a finite bound with clipping='automatic'",
                    got=given,
                    remedy="Normalised gradients need a norm; use clipping='flat' for no bound.",
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
    def private(self) -> bool:
        """Whether every contribution is bounded and noised."""
        given = self.max_grad_norm
        bounds = given if isinstance(given, tuple) else (given,)
        return self.noise_multiplier > 0 and math.inf not in bounds

    @property
    def certified_for(self) -> str:
        """``released bits``, ``real-number sums`` or ``nothing``."""
        if not self.private:
            return NOTHING
        return RELEASED_BITS if self.arithmetic == "exact" else REAL_SUMS

    def event_spec(self, dimension: int | None = None) -> EventSpec:
        """The Gaussian event of one release, valid for every model of at most ``dimension``.

        Args:
            dimension: number of parameters; only float sums depend on it. None: up to 2^40.
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
        """The Gaussian mechanism of multiplier sigma, as printed."""
        del dimension
        if not self.private:
            return events.non_private()
        return events.gaussian(self.noise_multiplier)

    def plan(self, shapes: Sequence[Sequence[int]], memory: Memory | None = None) -> Plan:
        """The plan for parameters of these shapes, in this order.

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
            blocks.append(Block(shape=shape, clip_group=group, bound=bound, sd=sd))
        placed = laid_out(blocks)
        return Plan(
            mechanism=self.name,
            mode=self.mode,
            blocks=placed,
            clipping=self.clipping,
            # Without noise there is no lattice to sum on.
            arithmetic=self.arithmetic if self.private else "float",
            distribution="gaussian" if self.private else None,
            neighbouring=self.neighbouring,
            certified_for=self.certified_for,
            spec=gaussian_spec(placed, self.arithmetic),
        )

    def _groups(self, layers: int) -> list[tuple[float, float]]:
        """``(bound, sd)`` of every clip group."""
        given = self.max_grad_norm
        if isinstance(given, tuple):
            bounds = list(given)
        elif self.clipping in ("per_layer", "group"):
            count = layers if self.groups is None else max(self.groups) + 1
            bounds = [given / math.sqrt(count)] * count
        else:
            bounds = [given]
        if not self.private:
            return [(bound, 0.0) for bound in bounds]
        norm = bounds[0] if len(bounds) == 1 else math.hypot(*bounds)
        return [(bound, self.noise_multiplier * norm) for bound in bounds]

    def _event(self, groups: Sequence[tuple[float, float]], dimension: int) -> EventSpec:
        """The event of clip groups that one sample moves together."""
        if self.arithmetic == "float":
            return events.gaussian(float_multiplier(groups, dimension))
        return events.gaussian(exact_multiplier([lattice_bound(*group) for group in groups]))
