"""Plans: for parameters in a frozen order, how each is bounded, released and noised."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, Self

from ...base.errors import InvalidInput
from ...base.laws import SCALE_UNITS
from ...ops import noise
from ...ops.update import PairMap, PairMaps
from ..accounting import events
from ..accounting.events import EventSpec
from .notes import Note
from .release import ReleaseMap
from .site import Site

TILE = 512
"""Every block starts at a multiple of this many coordinates of the noise stream."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """A parameter's entry in a plan.

    Attributes:
        index: position of the parameter in the frozen order.
        shape: its shape.
        clip_group: blocks with the same number share one clipping bound.
        bound: clipping bound of one sample's contribution to the whole clip group.
        noise_scale: certified scale of the noise (standard deviation, or Laplace b) on each release
            coordinate of the sum; 0: no noise. With ``noise_point="per_sample"`` and an unknown
            number of samples: of each sample's noise.
        first_position: its first coordinate in the noise stream, a multiple of 512.
        release: linear map from the clipped sum to the coordinates that receive noise. None means
            the identity.
        sensitivity_factor: largest norm of one sample's release coordinates / its clip norm.
    """

    index: int = 0
    shape: tuple[int, ...]
    clip_group: int
    bound: float
    noise_scale: float
    first_position: int = 0
    release: ReleaseMap | None = None
    sensitivity_factor: float = 1.0

    @property
    def mapped(self) -> bool:
        """Whether sums are mapped before noise is added."""
        return self.release is not None and not self.release.is_identity

    @property
    def fused(self) -> bool:
        """Whether the sum can be noised as it is, inside the update."""
        return not self.mapped and self.noise_scale > 0

    @property
    def pair_map(self) -> PairMap | None:
        """The map of a sum that is noised in coordinates inside the update. None elsewhere."""
        if not self.mapped or self.release is None or self.noise_scale == 0:
            return None
        return self.release.pair_map

    @property
    def release_shape(self) -> tuple[int, ...]:
        """The coordinates that noise is added to."""
        return self.shape if self.release is None else self.release.shape(self.shape)

    @property
    def signal_shape(self) -> tuple[int, ...]:
        """The coordinates of the sum; those that noise is added to, if any protects."""
        return self.shape if self.release is None else self.release.signal_shape(self.shape)

    @property
    def size(self) -> int:
        """Number of release coordinates."""
        return math.prod(self.release_shape)

    @property
    def unit(self) -> float | None:
        """Lattice unit u = noise_scale / 2^20. None without noise."""
        return self.noise_scale / SCALE_UNITS if self.noise_scale > 0 else None

    @property
    def integer_bound(self) -> int | None:
        """M, the largest integer with M u <= bound exactly. None without noise."""
        if self.noise_scale == 0:
            return None
        return math.floor(Fraction(self.bound) * SCALE_UNITS / Fraction(self.noise_scale))


@dataclass(frozen=True, kw_only=True)
class Importance:
    """The release of how much each parameter matters, before the noise of a step is shaped.

    ``w = clip_2(raw sum / expected batch size, bound) + N(0, noise_scale^2)``: its event belongs to
    the mechanism (inside ``spec`` if the samples of the step are used, else in ``unsampled``).

    Attributes:
        bound: L2 norm that the mean of raw gradients is clipped to.
        noise_scale: standard deviation of the noise on each coordinate.
        source: ``lot`` (the step's own samples, not clipped one by one) or ``full`` (what the
            caller sets before each step).
    """

    bound: float
    noise_scale: float
    source: str = "lot"


@dataclass(frozen=True, kw_only=True)
class FrequencyCoverage:
    """The part of a model that a mechanism takes to the frequency domain.

    Attributes:
        parameters, of: how many parameters, and of how many.
        numbers, of_numbers: the same in trainable numbers.
        surveyed: whether the geometry of the parameters is known; without it none is taken.
    """

    parameters: int
    of: int
    numbers: int
    of_numbers: int
    surveyed: bool = True

    @classmethod
    def of_sites(cls, sites: Sequence[Site] | None, shapes: Sequence[tuple[int, ...]]) -> Self:
        """Count the convolutions' kernels and circulant blocks among the parameters."""
        sizes = [math.prod(shape) for shape in shapes]
        taken = [site.kind != "other" for site in sites or ()] or [False] * len(sizes)
        numbers = sum(n for n, here in zip(sizes, taken, strict=True) if here)
        return cls(
            parameters=sum(taken),
            of=len(sizes),
            numbers=numbers,
            of_numbers=sum(sizes),
            surveyed=sites is not None,
        )

    @property
    def text(self) -> str:
        """State the coverage in words."""
        said = f"{self.parameters} of {self.of} parameters in the frequency domain"
        if self.parameters:
            return f"{said} ({self.numbers:,} of {self.of_numbers:,} numbers)"
        why = "" if self.surveyed else " (no sites were given)"
        return f"{said}{why}: all are released in the time domain, as by DP-SGD"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The bounds, scales and noise positions of one release, for one list of parameters.

    Attributes:
        mechanism: name of the mechanism.
        mode: ``corrected`` or ``published``.
        blocks: the parameters in frozen order.
        clipping: ``flat``, ``per_layer``, ``group`` or ``automatic``.
        arithmetic: ``exact`` (integer sums) or ``float``.
        distribution: ``gaussian``, ``laplace``, or None when nothing is added. Noise need not
            protect: ask ``private`` for that.
        neighbouring: the relation that the event's multiplier refers to.
        certified_for: what the certificate speaks about.
        spec: the event of one release, inside the sampling, as plain values.
        p: the norm of all bounds, 1 or 2.
        noise_point: ``per_batch``, or ``per_sample``: noise of scale ``noise_scale`` once for each
            sample, drawn as noise of scale ``noise_scale sqrt(samples)`` on the sum.
        samples: how many samples a step must have; ``noise_scale`` is then that of the sum. None
            allows any number.
        unsampled: what every step releases of all records besides, without sampling.
        notes: what the reader of a report must know.
        importance: a release that shapes the noise first. None means that there is none.
        coverage: what of the model is in the frequency domain; None where that is not asked.
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
    p: int = 2
    noise_point: str = "per_batch"
    samples: int | None = None
    unsampled: EventSpec = field(default_factory=events.no_op)
    notes: tuple[Note, ...] = ()
    importance: Importance | None = None
    coverage: FrequencyCoverage | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.arithmetic == "exact" and (not self.private or self.noise_by_samples):
            raise InvalidInput(
                "arithmetic",
                expected="'float' in a plan that is not private",
                got="'exact'",
                remedy="Pass arithmetic='float': without a certified scale there is no lattice.",
            )
        norms = {block.release.norm for block in self.blocks if block.release is not None}
        if self.importance is not None and (self.arithmetic == "exact" or norms - {"gradient"}):
            raise InvalidInput(
                "importance",
                expected="float sums of gradients that are clipped as they are",
                got=f"{self.arithmetic} sums, clipped by the norm of {', '.join(sorted(norms))}",
                remedy="Pass arithmetic='float', and release maps that clip the gradient itself.",
            )

    @property
    def dimension(self) -> int:
        """Number of coordinates that are released."""
        return sum(block.size for block in self.blocks) + sum(self._importance_sizes)

    @property
    def _importance_sizes(self) -> list[int]:
        shapes = [block.shape for block in self.blocks] if self.importance is not None else []
        return [math.prod(shape) for shape in shapes]

    @property
    def private(self) -> bool:
        """Whether noise protects every released coordinate."""
        return self.spec != events.non_private()

    @cached_property
    def mapped(self) -> bool:
        """Whether any block is mapped before noise is added."""
        return any(block.mapped for block in self.blocks)

    @cached_property
    def direct(self) -> bool:
        """Whether every sum can be noised as it is, inside the update."""
        if self.distribution is None:
            return not self.mapped
        return all(block.fused for block in self.blocks)

    @cached_property
    def maps_in_update(self) -> bool:
        """Whether the update can noise every sum in its coordinates, and lead it back."""
        if self.distribution is None or self.maps_late:
            return False
        return self.mapped and all(b.fused or b.pair_map is not None for b in self.blocks)

    @cached_property
    def pair_maps(self) -> PairMaps:
        """The maps of a plan with ``maps_in_update``: of integer sums, which are of coordinates
        already, the way back."""
        maps = PairMaps(tuple(block.pair_map for block in self.blocks))
        return maps.only_back if self.arithmetic == "exact" else maps

    @property
    def maps_late(self) -> bool:
        """Whether sums are mapped when their step ends: its importance shapes the maps first."""
        return self.importance is not None

    @property
    def needs_raw(self) -> bool:
        """Whether sums without clipping are needed beside the clipped ones."""
        return self.importance is not None and self.importance.source == "lot"

    @property
    def noise_by_samples(self) -> bool:
        """Whether the noise on a sum grows with the number of its samples."""
        return self.noise_point == "per_sample" and self.samples is None

    @property
    def noise_multiplier(self) -> float:
        """Certified noise scale / bound of one record's contribution; 0 is not private."""
        return float(self.spec.get("noise_multiplier", 0.0))

    @property
    def bounds(self) -> tuple[float, ...]:
        """Clipping bound per block (the group's, so all are equal under one flat clip)."""
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
        """Clipping bound per clip group."""
        return tuple(self.blocks[group[0]].bound for group in self.groups)

    @cached_property
    def most_units(self) -> int:
        """The largest M of all blocks: what one sample can add to one entry of an integer sum."""
        return max((block.integer_bound or 0 for block in self.blocks), default=0)

    @cached_property
    def scales(self) -> tuple[float, ...]:
        """Certified noise scale per block."""
        return tuple(block.noise_scale for block in self.blocks)

    @property
    def units(self) -> tuple[float | None, ...]:
        """Lattice unit per block."""
        return tuple(block.unit for block in self.blocks)

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """First noise coordinate per block."""
        return tuple(block.first_position for block in self.blocks)

    @cached_property
    def words(self) -> dict[str, int]:
        """Keystream words that one release consumes, and those that whole tiles produce.

        Noise once per sample is counted as drawn, also in a step without samples.
        """
        words = {"produced": 0, "consumed": 0}
        if self.distribution is None:
            return words
        noised = [block.size for block in self.blocks if block.noise_scale > 0]
        for size in (*noised, *self._importance_sizes):
            tiles = -(-size // TILE)
            for name, draws, times in (("produced", TILE, tiles), ("consumed", size, 1)):
                each = noise.noise_words(draws)
                each += noise.rounding_words(draws) if self.arithmetic == "float" else 0
                words[name] += each * times
        return words

    def event_spec(self, dimension: int | None = None) -> EventSpec:
        """Return the event of one release; a plan knows its own dimension."""
        del dimension
        return self.spec

    @cached_property
    def remarks(self) -> tuple[str, ...]:
        """The notes as text, and what of the model is in the frequency domain."""
        covered = () if self.coverage is None else (self.coverage.text,)
        return (*(str(note) for note in self.notes), *covered)

    @cached_property
    def event(self) -> Any:
        """The event of one release as a ``dp_accounting.DpEvent``.

        Raises:
            MissingDependency: dp-accounting is not installed.
        """
        return events.build(self.spec)


def first_positions(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return where each parameter's noise starts: in order, each at a multiple of 512."""
    positions: list[int] = []
    following = 0
    for shape in shapes:
        positions.append(following)
        following += -(-math.prod(shape) // TILE) * TILE
    return tuple(positions)


def assign_positions(blocks: Iterable[Block]) -> tuple[Block, ...]:
    """Return the blocks with their places: indices in order, and positions by release sizes."""
    given = list(blocks)
    positions = first_positions([block.release_shape for block in given])
    return tuple(
        replace(block, index=index, first_position=position)
        for index, (block, position) in enumerate(zip(given, positions, strict=True))
    )
