"""Spectral-DP: noise on the spectrum of a layer's gradient, of which low frequencies are kept.

For one sample and one layer, F the unitary DFT on a P x Q grid,

    G_ij = sqrt(PQ) conj(F(D_i)) o F(X_j)            the spectrum of all lags of the correlation
    Ghat = G / max(1, ||G||_2 / C) + tau             tau: sd a sigma C on Re, b sigma C on Im
    gradient = Re F^-1(mask o Ghat) at the kernel's lags

The mask is public, so filtering after the noise is post-processing: it removes noise and biases the
gradient, and changes no guarantee. With h = IDFT(mask) the released kernel is that of the filtered
correlation h * R, under noise of covariance h(u - v) per channel pair. In the whitened coordinates
y = Wt crop(h * R) of ``ops.spectral.whitening`` that noise is white and ||y|| <= ||mask o G|| <=
||G||: clipping y instead of G keeps several times more signal for the same guarantee.

Reference: Feng et al., Spectral-DP, 2023, as GReDP describes it; ``as_coded`` for the published
code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from ...base.errors import InvalidInput
from ...base.validate import choice, probability
from ...ops.spectral import Band, WhitenedBasis, pencil, smoothing
from ...ops.spectral._basis import FLOAT_RANK, RANK
from ._spectral_options import taps
from ._spectral_plan import OPEN, SLACK, SpectralMechanism, SpectralRelease
from .release import PartialNoiseMap, WhitenedCrop
from .site import Site

MASKS = ("shells", "rectangle", "authors_slice")
LAYER_BOUNDS = ("c", "c_over_sqrt_layers")
NOISE_BANDS = ("mask", "block")
UNITS = ("sum", "mean")


@dataclass(frozen=True, kw_only=True)
class SpectralDP(SpectralMechanism):
    """The Spectral-DP mechanism: noise on the spectrum of a layer's gradient, then a filter.

    ``SpectralMechanism`` has the fields of every spectral mechanism.

    Args:
        noise_kind: default ``circular`` (published), ``circular_full`` (corrected).
        clip_domain: ``spectrum`` clips all frequencies (published), ``whitened`` the released
            coordinates (corrected). ``kept`` clips the frequencies that are kept, ``cropped`` the
            kernel's gradient before it is put on the grid; both for study, in published mode.
        clipping: default ``per_layer`` (published), ``flat`` (corrected).
        keep_fraction: least share of the frequencies that are kept, in (0, 1].
        mask: ``shells``, ``rectangle``, or ``authors_slice``; see ``ops.spectral.Band``.
        layer_bound: with L clip groups each is clipped to ``c`` or to ``c_over_sqrt_layers``; the
            noise is sigma C either way.
        noise_band: ``mask``: noise on all frequencies; ``block``: on the corner that the authors'
            slice leaves alone.
        gradient_units: ``mean``: gradients of a loss averaged over ``batch_size`` samples are
            clipped to C, while each sample's noise is sigma C / batch_size of these units.

    Noise off, the result is the low-pass projection of the gradient.
    """

    name: ClassVar[str] = "spectral_dp"
    title: ClassVar[str] = "Spectral-DP"
    source: ClassVar[str] = "Feng et al., 2023"
    clip_domains: ClassVar[tuple[str, ...]] = ("spectrum", "whitened", "kept", "cropped")
    defaults: ClassVar[dict[str, dict[str, Any]]] = {
        "published": {
            "noise_kind": "circular",
            "clip_domain": "spectrum",
            "clipping": "per_layer",
            "fft_size": "padded",
        },
        "corrected": {
            "noise_kind": "circular_full",
            "clip_domain": "whitened",
            "clipping": "flat",
            "fft_size": "fast",
        },
    }
    corrected_only: ClassVar[dict[str, tuple[Any, ...]]] = {
        "clip_domain": ("whitened", "spectrum"),
        "mask": ("shells", "rectangle"),
        "noise_band": ("mask",),
        "gradient_units": ("sum",),
    }

    keep_fraction: float = 0.5
    mask: str = "shells"
    layer_bound: str = "c"
    noise_band: str = "mask"
    gradient_units: str = "sum"

    @classmethod
    def as_coded(
        cls,
        noise_multiplier: float,
        max_grad_norm: float,
        batch_size: int,
        *,
        sites: tuple[Site, ...] | None = None,
        keep_fraction: float = 0.5,
        allow_time_domain: bool = False,
    ) -> Self:
        """Return the configuration of the published code, every known quirk included.

        Full linear correlation, a slice instead of a low-pass, noise on its corner only and once
        per sample, C / sqrt(L) per layer, and gradients of the mean clipped as if of the sum:
        before the effects of the mask, the Gaussian mechanism of multiplier sigma / sqrt(N).
        """
        return cls(
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            batch_size=batch_size,
            sites=sites,
            keep_fraction=keep_fraction,
            allow_time_domain=allow_time_domain,
            mode="published",
            fft_size="linear",
            mask="authors_slice",
            noise_band="block",
            noise_point="per_sample",
            layer_bound="c_over_sqrt_layers",
            gradient_units="mean",
        )

    @property
    def rho_kept(self) -> float:
        """The filtering ratio read as the share that is kept, K / N."""
        return self.keep_fraction

    @property
    def rho_deleted(self) -> float:
        """The filtering ratio read as the share that is deleted."""
        return 1 - self.keep_fraction

    @property
    def isotropic(self) -> bool:
        """Whether the noise protects all that is released alike, with sd a sigma C."""
        a, b = self.parts
        return a == b and self.noise_band == "mask"

    def band(self, size: tuple[int, ...]) -> Band:
        """Return the filter on a grid."""
        return Band(size, self.mask, self.keep_fraction)

    def _check_options(self) -> None:
        object.__setattr__(self, "keep_fraction", probability(keep_fraction=self.keep_fraction))
        choice(MASKS, mask=self.mask)
        choice(LAYER_BOUNDS, layer_bound=self.layer_bound)
        choice(NOISE_BANDS, noise_band=self.noise_band)
        choice(UNITS, gradient_units=self.gradient_units)
        if self.noise_band == "block" and self.mask != "authors_slice":
            raise _together(
                "noise_band",
                "'mask' with this mask",
                self.noise_band,
                "Use noise_band='mask', or mask='authors_slice'.",
            )
        if self.clip_domain != "spectrum" and not self.isotropic:
            raise _together(
                "clip_domain",
                "'spectrum' with such noise",
                self.clip_domain,
                "Use clip_domain='spectrum', or noise_kind='circular' with noise_band='mask'.",
            )
        if self.clip_domain == "kept" and self.mask == "authors_slice":
            raise _together(
                "clip_domain",
                "another with mask='authors_slice'",
                "kept",
                "Use clip_domain='spectrum', or another mask.",
            )
        if self.layer_bound != "c" and self.clipping == "flat":
            raise _together(
                "layer_bound",
                "'c' with clipping='flat'",
                self.layer_bound,
                "Use layer_bound='c', or clipping='per_layer'.",
            )
        if self.gradient_units == "mean" and self.batch_size is None:
            raise _together(
                "gradient_units",
                "'sum' without noise_point='per_sample' and batch_size",
                "mean",
                "Use gradient_units='sum', or pass noise_point='per_sample' with batch_size=.",
            )

    @property
    def _integers(self) -> bool:
        # Under one bound for all, noise of two scales has no common lattice.
        same = self.noise_kind == "circular_full" or self.clipping == "per_layer"
        return self.clip_domain == "whitened" and same

    def _bound(self, layers: int) -> float:
        bound = self.max_grad_norm
        if self.layer_bound == "c_over_sqrt_layers":
            bound /= math.sqrt(layers)
        # A gradient of the mean is the sample's own divided by the number of samples.
        return (
            bound * self.batch_size if self.gradient_units == "mean" and self.batch_size else bound
        )

    def _release(self, site: Site, size: tuple[int, ...]) -> SpectralRelease:
        if self.mask == "authors_slice" and site.axes == 3:
            raise _together(
                "mask",
                f"'shells' or 'rectangle' with a convolution of three axes, {list(site.shape)}",
                self.mask,
                "Choose another mask, or release its kernel in the time domain: in its place in "
                "sites put Site(kind='other', shape=site.shape).",
            )
        band = self.band(size)
        law = pencil(band, *taps(site), *self.parts, self.noise_band, self._rank)
        if law.multiplier**2 < OPEN:
            spread = law.noise
            return SpectralRelease(
                PartialNoiseMap(norm="spectrum", site=site, size=size, band=band, noise=spread)
            )
        if self.clip_domain == "cropped":
            return self._embedded(site, size, band, law)
        if site.kind == "circulant":
            return self._circulant(site, size, band, law)
        norm = "release" if self.clip_domain == "whitened" else str(self.clip_domain)
        crop = WhitenedCrop(
            norm=norm, site=site, size=size, band=band, signal=law.signal, post=law.post
        )
        return SpectralRelease(
            crop, law.scale, law.stretch if norm == "release" else law.stretch * SLACK
        )

    @property
    def _rank(self) -> float:
        """The rank rule: weak directions are kept as printed, and where integers are summed."""
        rounded = self.mode == "corrected" and self.arithmetic == "float"
        return FLOAT_RANK if rounded else RANK

    def _circulant(
        self, site: Site, size: tuple[int, ...], band: Band, law: WhitenedBasis
    ) -> SpectralRelease:
        """Return the release of a circulant layer, a matrix on the gradient itself.

        All lags are released, so the norm is that of the spectrum. What the filter keeps of it is
        what the whitened coordinates hold.
        """
        signal = law.signal @ smoothing(band, *taps(site))
        norm = "gradient" if self.clip_domain == "spectrum" else "release"
        crop = WhitenedCrop(norm=norm, site=site, size=size, signal=signal, post=law.post)
        return SpectralRelease(
            crop, law.scale, law.stretch if norm == "release" else law.stretch * SLACK
        )

    def _embedded(
        self, site: Site, size: tuple[int, ...], band: Band, law: WhitenedBasis
    ) -> SpectralRelease:
        """Return the printed release: the clipped gradient on a grid, noised, filtered, cropped."""
        signal = law.signal @ smoothing(band, *taps(site))
        top = float(np.linalg.svd(signal, compute_uv=False)[0])
        crop = WhitenedCrop(norm="gradient", site=site, size=size, signal=signal, post=law.post)
        return SpectralRelease(crop, law.scale, top * SLACK)

    def _note_ids(self) -> tuple[str, ...]:
        sites = self.sites or ()
        halved = self.parts != (1.0, 1.0)
        block = self.noise_band == "block"
        reasons = {
            "G1": self.parts[0] != self.parts[1],
            "G2": halved,
            "G3": self.clipping != "flat" and self.layer_bound == "c",
            "G4": self.noise_point == "per_sample",
            "G5": self.parts[0] != self.parts[1],
            "S6.2": self.mask == "authors_slice",
            "S6.3": block,
            "S6.4": block and any(site.kind == "circulant" for site in sites),
            "S6.5": self.gradient_units == "mean",
            "S6.6": self.layer_bound != "c",
        }
        return tuple(name for name, applies in reasons.items() if applies)


def _together(name: str, expected: str, got: object, remedy: str) -> InvalidInput:
    return InvalidInput(name, expected=expected, got=got, remedy=remedy)
