"""Options, transform sizes, and plans from sites that the spectral mechanisms share.

A spectral mechanism clips each sample in the frequency domain, adds complex noise of sd a sigma C
on real and b sigma C on imaginary parts to the spectrum, transforms back, takes the real part and
releases the lags that are the kernel's gradient. ``ops.spectral.pencil`` turns that into released
coordinates with white noise; here they become the blocks of a plan:

    circular        a = b = 1/sqrt(2)   white on the output, of sd sigma C / sqrt(2)
    circular_full   a = b = 1           white, of sd sigma C
    real            a = 1, b = 0        even on the output: lags u and -u share their noise
    ("ab", a, b)    a^2 + b^2 = 1

Parameters that are neither a convolution's kernel nor circulant blocks are released in the time
domain with sd sigma C, and count as layers.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar

from ...base.errors import InvalidInput
from ...base.validate import choice, integer
from ...ops.spectral._sizes import axes, fast
from ..accounting import events
from ..accounting.events import EventSpec
from ..accounting.history import MAX_DIMENSION, NOTHING, REAL_SUMS, RELEASED_BITS
from ._spectral_options import (
    ARITHMETIC,
    CLIPPING,
    MODES,
    NOISE_POINTS,
    FFTSize,
    NoiseKind,
    Sites,
    checked_batch_size,
    checked_groups,
    checked_kind,
    checked_sites,
    checked_size,
    no_sites,
    noise_parts,
)
from .base import (
    OPTIONAL_IN_CHECKPOINT,
    Mechanism,
    checked_bound,
    checked_noise_multiplier,
    checked_shapes,
)
from .certify import gaussian_spec
from .examples import CIRCULANT, UNIT, Audit, Example
from .memory import MechanismState
from .notes import Note, notes
from .plan import Block, FrequencyCoverage, Plan, assign_positions
from .release import ReleaseMap
from .site import Site

SLACK = 1 + 2.0**-30
"""Covers the rounding of a whitening matrix, 2^-34 relative, where clip and release norm differ."""

OPEN = 2.0**-20
"""A direction with a smaller share of the noise's variance than this is called unprotected."""


@dataclass(frozen=True)
class SpectralRelease:
    """The release of one parameter: its map, sd / (sigma C), and release norm / clip norm."""

    release: ReleaseMap | None = None
    scale: float = 1.0
    stretch: float = 1.0


@dataclass(frozen=True, kw_only=True)
class SpectralMechanism(Mechanism):
    """The base of the spectral mechanisms; fields left None take the mode's default.

    Args:
        noise_multiplier: sigma, in [2^-4, 2^10]; 0 adds no noise and is not private.
        max_grad_norm: C; ``math.inf`` does not clip and is not private.
        sites: geometry of every parameter, from ``dpkern.survey(model, example)``.
        mode: ``published`` or ``corrected``.
        noise_kind: ``circular``, ``circular_full``, and in published mode ``real`` or
            ``("ab", a, b)`` with a^2 + b^2 = 1.
        clip_domain: which norm is clipped.
        clipping: ``flat``: all parameters together to C; ``per_layer``: each to C; ``group``: each
            group of ``groups`` to C.
        groups: for ``group`` only: the clip group of each parameter, from 0 without gaps.
        fft_size: P and Q of every convolution: ``padded`` H', ``fast`` (the least even
            2^a 3^b 5^c >= H'), ``linear`` H' + s (Ho - 1), or one tuple per site (None for others).
        noise_point: ``per_batch`` or ``per_sample``, the latter in published mode only.
        batch_size: with ``per_sample``: how many samples every step has. None means that it is
            unknown, and nothing is certified.
        arithmetic: ``exact`` or ``float``. None takes exact where clip norm and release norm
            agree. The rounding of float sums is outside of the certificate. Whitening magnifies it:
            by up to 2^10 in corrected mode, which leaves weaker directions out, and by up to 2^18
            in published mode, which keeps them.
        allow_time_domain: whether to accept sites of which none is a convolution's kernel or
            circulant blocks. Every parameter is then released in the time domain, as by DP-SGD.

    Raises:
        InvalidInput: a field out of its range, or options that do not belong together.
        PrivacyError: a positive noise multiplier outside [2^-4, 2^10].
    """

    examples: ClassVar[tuple[Example, ...]] = (
        Example({**UNIT, "sites": lambda layer: layer.sites}),
        Example(
            {**UNIT, "sites": lambda layer: layer.sites, "mode": "published"},
            "-published",
            " as published",
        ),
    )
    audits: ClassVar[tuple[Audit, ...]] = (Audit(fields=UNIT, shapes=CIRCULANT),)
    frequency_domain: ClassVar[bool] = True
    clip_domains: ClassVar[tuple[str, ...]]
    defaults: ClassVar[dict[str, dict[str, Any]]]
    """Defaults of fields left None, by mode."""
    corrected_only: ClassVar[dict[str, tuple[Any, ...]]]
    """Values that ``corrected`` accepts, by field."""

    noise_multiplier: float
    max_grad_norm: float
    sites: Sites | None = None
    mode: str = "corrected"
    noise_kind: NoiseKind | None = None
    clip_domain: str | None = None
    clipping: str | None = None
    groups: tuple[int, ...] | None = None
    fft_size: FFTSize | None = None
    noise_point: str = "per_batch"
    batch_size: int | None = None
    arithmetic: str | None = None
    allow_time_domain: bool = field(default=False, metadata=OPTIONAL_IN_CHECKPOINT)

    def __post_init__(self) -> None:
        choice(MODES, mode=self.mode)
        for name, value in self.defaults[self.mode].items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        sigma = checked_noise_multiplier(self.noise_multiplier)
        object.__setattr__(self, "noise_multiplier", sigma)
        bound = checked_bound("max_grad_norm", self.max_grad_norm)
        object.__setattr__(self, "max_grad_norm", bound)
        object.__setattr__(self, "noise_kind", checked_kind(self.noise_kind))
        object.__setattr__(self, "sites", checked_sites(self.sites))
        choice((False, True), allow_time_domain=self.allow_time_domain)
        self._check_coverage()
        choice(self.clip_domains, clip_domain=self.clip_domain)
        choice(CLIPPING, clipping=self.clipping)
        object.__setattr__(self, "groups", checked_groups(self.groups, self.clipping))
        choice(NOISE_POINTS, noise_point=self.noise_point)
        checked_batch_size(self.batch_size, self.noise_point)
        object.__setattr__(self, "fft_size", checked_size(self.fft_size, self.sites))
        self._check_options()
        if self.mode == "corrected":
            self._check_corrected()
        if self.arithmetic is None:
            whole = self._integers and self.noise_point == "per_batch"
            object.__setattr__(self, "arithmetic", "exact" if whole else "float")
        choice(ARITHMETIC, arithmetic=self.arithmetic)
        if self.sites is not None:
            _plan(self, tuple(site.shape for site in self.sites))

    def _check_coverage(self) -> None:
        """Refuse a model without any layer that the mechanism works on, unless that is asked."""
        if self.sites is None or self.allow_time_domain:
            return
        if all(site.kind == "other" for site in self.sites):
            raise InvalidInput(
                "sites",
                expected=f"a layer in the frequency domain for {self.title}: a convolution used "
                "once, or a block-circulant layer",
                got=f"0 of {len(self.sites)} parameters in the frequency domain",
                remedy="Use the mechanism dpsgd, which is what would run. To run it as this one, "
                "pass allow_time_domain=True (--set allow_time_domain=true).",
            )

    @property
    def remarks(self) -> tuple[str, ...]:
        """The notes as text, and what of the model is in the frequency domain."""
        if self.sites is None:
            return super().remarks
        covered = FrequencyCoverage.of_sites(self.sites, [site.shape for site in self.sites])
        return (*super().remarks, covered.text)

    def _check_corrected(self) -> None:
        for name, allowed in {**_CORRECTED, **self.corrected_only}.items():
            value = getattr(self, name)
            if value not in allowed:
                raise InvalidInput(
                    name,
                    expected=f"one of {', '.join(map(repr, allowed))} with mode='corrected'",
                    got=value,
                    remedy="Use mode='published' for what the paper prints.",
                )

    def _check_options(self) -> None:
        """Raise ``InvalidInput`` for fields of a subclass that do not belong together."""

    @property
    @abstractmethod
    def _integers(self) -> bool:
        """Whether clipped samples can be summed as integers."""

    @abstractmethod
    def _release(self, site: Site, size: tuple[int, ...]) -> SpectralRelease:
        """Return the release of a kernel or of circulant blocks on this grid."""

    @abstractmethod
    def _note_ids(self) -> tuple[str, ...]:
        """Return the ids of the notes on published mode."""

    def _bound(self, layers: int) -> float:
        """Clip bound of each of this many clip groups."""
        del layers
        return self.max_grad_norm

    @property
    def parts(self) -> tuple[float, float]:
        """``(a, b)`` of the noise."""
        return noise_parts(self.noise_kind)

    @property
    def isotropic(self) -> bool:
        """Whether the noise protects all that is released alike, with sd a sigma C."""
        a, b = self.parts
        return a == b

    @property
    def noisy(self) -> bool:
        """Whether noise is added; it need not protect."""
        return self.noise_multiplier > 0 and self.max_grad_norm < math.inf

    @property
    def needs_sites(self) -> bool:
        """Whether plans depend on more than shapes."""
        return True

    @property
    def certified_for(self) -> str:
        """``released bits``, ``real-number sums`` or ``nothing``."""
        if self.event_spec() == events.non_private():
            return NOTHING
        return RELEASED_BITS if self.arithmetic == "exact" else REAL_SUMS

    @property
    def notes(self) -> tuple[Note, ...]:
        """The register's entries that apply to these options; none in corrected mode."""
        return notes(*self._note_ids()) if self.mode == "published" else ()

    def event_spec(self, dimension: int | None = None) -> EventSpec:
        """Return the certified event of one release; of these sites if they are known.

        Raises:
            InvalidInput: without sites, where the certificate depends on them.
        """
        if self.sites is not None:
            return _plan(self, tuple(site.shape for site in self.sites)).spec
        if not self.noisy or self._unknown_noise:
            return events.non_private()
        layers = 1 if self.clipping == "flat" else len(set(self.groups or ()))
        if not self.isotropic or not layers:
            raise no_sites("the certificate depends on the layers")
        size = MAX_DIMENSION if dimension is None else integer(minimum=1, dimension=dimension)
        bound = self._bound(layers)
        scale = self._sd(min(1.0, self.parts[0]))
        stretch = 1.0 if self.arithmetic == "exact" else SLACK
        blocks = [
            Block(
                shape=(), clip_group=i, bound=bound, noise_scale=scale, sensitivity_factor=stretch
            )
            for i in range(layers)
        ]
        return gaussian_spec(blocks, str(self.arithmetic), size)

    def claimed_event_spec(self, dimension: int | None = None) -> EventSpec:
        """Return the printed event: the Gaussian mechanism of multiplier sigma."""
        if self.mode == "corrected":
            return self.event_spec(dimension)
        return events.gaussian(self.noise_multiplier) if self.noisy else events.non_private()

    def plan(self, shapes: Sequence[Sequence[int]], memory: MechanismState | None = None) -> Plan:
        """Return the plan for parameters of these shapes, in this order.

        Raises:
            InvalidInput: bad shapes, no sites or sites of other parameters, an FFT size that is
                too small, or ``exact`` arithmetic where clip norm and release norm differ.
        """
        sizes = checked_shapes(shapes)
        if self.sites is None and self.needs_sites:
            raise no_sites("transform sizes and filters depend on the layers")
        if self.sites is not None and [site.shape for site in self.sites] != list(sizes):
            raise InvalidInput(
                "sites",
                expected=f"one site per parameter, of shapes {list(sizes)}",
                got=f"sites of {[site.shape for site in self.sites]}",
                remedy="Survey the model that is trained, after it was last changed.",
            )
        return _plan(self, sizes)

    @property
    def samples(self) -> int | None:
        """Number of samples that every step must have. None allows any number."""
        return self.batch_size

    @property
    def _unknown_noise(self) -> bool:
        return self.noise_point == "per_sample" and self.batch_size is None

    def _sd(self, scale: float) -> float:
        each = self.noise_multiplier * self.max_grad_norm * scale
        # As many independent draws as samples; their number is public here.
        return each if self.batch_size is None else each * math.sqrt(self.batch_size)

    def _clip_groups(self, count: int) -> Sequence[int]:
        if self.groups is not None:
            if len(self.groups) != count:
                raise InvalidInput(
                    "groups",
                    expected=f"{count} numbers, one per parameter",
                    got=f"{len(self.groups)} numbers",
                    remedy="Give every parameter of the model its clip group.",
                )
            return self.groups
        return range(count) if self.clipping == "per_layer" else [0] * count

    def _grid(self, index: int, site: Site) -> tuple[int, ...]:
        if site.kind == "circulant":
            return (site.block,)
        given = self.fft_size
        if isinstance(given, tuple):
            size = given[index]
            return axes(site.padded) if size is None else size
        if given == "fast":
            return tuple(fast(n) for n in axes(site.padded))
        return axes(site.linear if given == "linear" else site.padded)


_CORRECTED: dict[str, tuple[Any, ...]] = {
    "noise_kind": ("circular", "circular_full"),
    "noise_point": ("per_batch",),
}


@lru_cache(maxsize=256)
def _plan(mechanism: SpectralMechanism, shapes: tuple[tuple[int, ...], ...]) -> Plan:
    groups = mechanism._clip_groups(len(shapes))
    bound = mechanism._bound(len(set(groups)))
    blocks = []
    for index, shape in enumerate(shapes):
        site = None if mechanism.sites is None else mechanism.sites[index]
        released = SpectralRelease()
        if site is not None and site.kind != "other":
            released = mechanism._release(site, mechanism._grid(index, site))
        blocks.append(
            Block(
                shape=shape,
                clip_group=groups[index],
                bound=bound,
                noise_scale=mechanism._sd(released.scale) if mechanism.noisy else 0.0,
                release=released.release,
                sensitivity_factor=released.stretch,
            )
        )
    placed = assign_positions(blocks)
    arithmetic = str(mechanism.arithmetic)
    spec = events.non_private()
    if not mechanism._unknown_noise:
        spec = gaussian_spec(placed, arithmetic)
    private = spec != events.non_private()
    certified_for = RELEASED_BITS if arithmetic == "exact" else REAL_SUMS
    return Plan(
        mechanism=mechanism.name,
        mode=mechanism.mode,
        blocks=placed,
        clipping=str(mechanism.clipping),
        # Sums without a certificate need no integers.
        arithmetic=arithmetic if private else "float",
        distribution="gaussian" if mechanism.noisy else None,
        neighbouring=mechanism.neighbouring,
        certified_for=certified_for if private else NOTHING,
        spec=spec,
        noise_point=mechanism.noise_point,
        samples=mechanism.batch_size,
        notes=mechanism.notes,
        coverage=FrequencyCoverage.of_sites(mechanism.sites, shapes),
    )
