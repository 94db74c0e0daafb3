"""What every mechanism is: a frozen configuration that makes a plan and knows its privacy event.

A plan says, for parameters in a frozen order, how their per-sample gradients are bounded, where
each block's noise stands in the noise stream, and with which certified scale it is drawn. The event
is computed from exactly these numbers; nobody types it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, ClassVar, Self

from .._validate import integer
from ..accounting import events
from ..accounting.events import EventSpec
from ..accounting.history import MAX_NOISE_MULTIPLIER, MIN_NOISE_MULTIPLIER
from ..errors import InvalidInput, PrivacyError
from ..laws import SCALE_UNITS
from ..ops import noise
from ..ops.clip import MIN_BOUND

TILE = 512
"""Every block starts at a multiple of this many coordinates of the noise stream."""

MAX_BOUND = 2.0**96
"""Outside MIN_BOUND .. MAX_BOUND the lattice unit would leave float32's normal numbers."""

ROUNDING_STEP = 2.0**-16
"""Stochastic rounding with 16 bits moves a coordinate's mean by less than this many units."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """One parameter of a plan.

    Attributes:
        index: position of the parameter in the frozen order.
        shape: its shape.
        clip_group: blocks with the same number share one norm bound.
        bound: norm bound of one sample's contribution to the whole clip group.
        sd: certified standard deviation of the noise on each coordinate of the sum; 0: no noise.
        first_position: its first coordinate in the noise stream, a multiple of 512.
        to_release: how gradients become release coordinates; only ``identity`` here.
        post: linear map applied to the noisy values, or None.
    """

    index: int
    shape: tuple[int, ...]
    clip_group: int
    bound: float
    sd: float
    first_position: int
    to_release: str = "identity"
    post: None = None

    @property
    def size(self) -> int:
        """Number of coordinates."""
        return math.prod(self.shape)

    @property
    def unit(self) -> float | None:
        """Side u = sd / 2^20 of the fine lattice; None without noise."""
        return self.sd / SCALE_UNITS if self.sd > 0 else None

    @property
    def integer_bound(self) -> int | None:
        """M, the largest integer with M u <= bound exactly; None without noise."""
        if self.sd == 0:
            return None
        return math.floor(Fraction(self.bound) * SCALE_UNITS / Fraction(self.sd))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one release does, for one list of parameters.

    Attributes:
        mechanism: name of the mechanism.
        mode: ``corrected`` or ``published``.
        blocks: the parameters in frozen order.
        clipping: ``flat``, ``per_layer``, ``group`` or ``automatic``.
        arithmetic: ``exact`` (integer sums) or ``float``.
        distribution: ``gaussian``, ``laplace``, or None when nothing is added.
        neighbouring: the relation that the event's multiplier refers to.
        certified_for: what the certificate speaks about.
        spec: the event of one release as plain values.
    """

    mechanism: str
    mode: str
    blocks: tuple[Block, ...]
    clipping: str
    arithmetic: str
    distribution: str | None
    neighbouring: str
    certified_for: str
    spec: EventSpec

    @property
    def dimension(self) -> int:
        """Number of coordinates that are released."""
        return sum(block.size for block in self.blocks)

    @property
    def private(self) -> bool:
        """Whether noise protects every released coordinate."""
        return self.spec != events.non_private()

    @property
    def noise_multiplier(self) -> float:
        """Certified scale of the noise / bound of one record's contribution; 0: not private."""
        return float(self.spec.get("noise_multiplier", 0.0))

    @property
    def bounds(self) -> tuple[float, ...]:
        """Norm bound per block (the group's, so all equal under one flat clip)."""
        return tuple(block.bound for block in self.blocks)

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The blocks of each clip group, by index."""
        members: dict[int, list[int]] = {}
        for block in self.blocks:
            members.setdefault(block.clip_group, []).append(block.index)
        return tuple(tuple(members[group]) for group in sorted(members))

    @cached_property
    def group_bounds(self) -> tuple[float, ...]:
        """Norm bound per clip group."""
        return tuple(self.blocks[group[0]].bound for group in self.groups)

    @property
    def scales(self) -> tuple[float, ...]:
        """Certified noise scale per block."""
        return tuple(block.sd for block in self.blocks)

    @property
    def units(self) -> tuple[float | None, ...]:
        """Fine lattice unit per block."""
        return tuple(block.unit for block in self.blocks)

    @property
    def positions(self) -> tuple[int, ...]:
        """First noise coordinate per block."""
        return tuple(block.first_position for block in self.blocks)

    @cached_property
    def words(self) -> dict[str, int]:
        """Keystream words that one release consumes, and those that whole tiles produce."""
        words = {"produced": 0, "consumed": 0}
        if self.distribution is None:
            return words
        for block in self.blocks:
            tiles = -(-block.size // TILE)
            for name, draws, times in (("produced", TILE, tiles), ("consumed", block.size, 1)):
                each = noise.noise_words(draws)
                each += noise.rounding_words(draws) if self.arithmetic == "float" else 0
                words[name] += each * times
        return words

    def event_spec(self, dimension: int | None = None) -> EventSpec:
        """The event of one release; a plan knows its own dimension."""
        del dimension
        return self.spec

    @cached_property
    def event(self) -> Any:
        """The event of one release as a ``dp_accounting.DpEvent``.

        Raises:
            MissingDependency: dp-accounting is not installed.
        """
        return events.build(self.spec)


class Mechanism(ABC):
    """Base of the configurations; subclasses are frozen keyword-only dataclasses.

    Attributes:
        name: the mechanism's name.
        neighbouring: the relation that its event's multiplier refers to.
    """

    name: ClassVar[str]
    neighbouring: ClassVar[str] = "add_remove"

    noise_multiplier: float
    mode: str

    @abstractmethod
    def event_spec(self, dimension: int | None = None) -> EventSpec:
        """The certified event of one release on at most ``dimension`` coordinates."""

    @abstractmethod
    def plan(self, shapes: Sequence[Sequence[int]]) -> Plan:
        """The plan for parameters of these shapes, in this order."""

    @property
    @abstractmethod
    def certified_for(self) -> str:
        """What the certificate speaks about."""

    @property
    def dimension(self) -> int | None:
        """A configuration does not know its parameters; its plan does."""
        return None

    def claimed_event_spec(self, dimension: int | None = None) -> EventSpec:
        """The event that the mechanism's source claims for one release."""
        return self.event_spec(dimension)

    def event(self, dimension: int | None = None) -> Any:
        """``event_spec`` as a ``dp_accounting.DpEvent``.

        Raises:
            MissingDependency: dp-accounting is not installed.
        """
        return events.build(self.event_spec(dimension))

    def with_noise_multiplier(self, noise_multiplier: float) -> Self:
        """The same configuration with other noise."""
        changed: Self = replace(self, noise_multiplier=noise_multiplier)  # type: ignore[type-var]
        return changed


def checked_noise_multiplier(value: Any) -> float:
    """0, or a number in [2^-4, 2^10], where the noise law is certified.

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
            remedy="Outside this range the noise lattice is not certified; choose another value.",
        )
    return float(value)


def checked_bound(name: str, value: Any) -> float:
    """A norm bound in [2^-96, 2^96], or infinity for no clipping.

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
    """Parameter shapes as tuples of ints.

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


def first_positions(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Where each parameter's noise starts: in order, each at a multiple of 512."""
    positions: list[int] = []
    following = 0
    for shape in shapes:
        positions.append(following)
        following += -(-math.prod(shape) // TILE) * TILE
    return tuple(positions)


def exact_multiplier(integer_bounds: Sequence[int]) -> float:
    """2^20 / sqrt(sum M_l^2), rounded down: noise / contribution on the integer lattice."""
    squares = sum(bound * bound for bound in integer_bounds)
    # floor(2^k sqrt(2^40 / S)) / 2^k with integers only; 2^60 keeps more digits than a float.
    scaled = math.isqrt(SCALE_UNITS**2 * (1 << 120) // squares)
    value = scaled / (1 << 60)
    return value if Fraction(value) * (1 << 60) <= scaled else math.nextafter(value, 0)


def float_multiplier(ratios: Sequence[tuple[float, float]], dimension: int) -> float:
    """1 / (sqrt(sum (C_l / sd_l)^2) + 2^-36 sqrt(d)), rounded down: float sums, rounded to u.

    Args:
        ratios: ``(C, sd)`` per clip group.
        dimension: number of coordinates ``d``; rounding adds ``2^-16 sqrt(d) u`` to the norm.
    """
    mu = math.sqrt(math.fsum((bound / sd) ** 2 for bound, sd in ratios))
    mu += ROUNDING_STEP / SCALE_UNITS * math.sqrt(dimension)
    return (1 - 2.0**-48) / mu
