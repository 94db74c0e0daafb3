"""Per-sample gradients with the norm that the mechanism clips.

A plan's release map takes a parameter's sum to the coordinates that noise is added to. A mechanism
may clip the whole spectrum of a layer's correlation, or the release coordinates, instead of the
gradient itself. Sums stay in the parameter's shape; the step applies the maps.

    class            clipped norm                                        sum
    SpectrumNormed   ||R_b||, of the whole or the kept spectrum          of (filtered) gradients
    WhitenedNormed   ||gain signal F_b||, F_b the (filtered) gradient    of F_b
    WhitenedBinsNormed  the same, from retained bins                     of F_b
    ScaledNormed     ||(grad_b - m) / s||                                of grad_b - m
    L1Normed         the L1 norm of grad_b                               of grad_b
    ReleaseNormed    the norm of any other release's coordinates         of grad_b
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from ..base.phase import MAP, phase
from ..ops import spectral
from ..ops.spectral import Band
from ..privacy.mechanisms.release import DiagonalMap, ReleaseMap, Taps
from .per_sample_gradients import (
    CirculantGradients,
    ConvolutionGradients,
    ExplicitGradients,
    LinearGradients,
    PerSampleGradients,
    copied,
    operands,
    to_sum_dtype_dense,
)
from .scaled import scaled_square


@dataclass
class NormedGradients(PerSampleGradients):
    """The per-sample gradients ``record``, clipped by a norm that a subclass defines."""

    record: PerSampleGradients
    _rows: tuple[Tensor] | None = field(default=None, init=False)
    """Release coordinates, kept from the norm of integers to their sum; they are no operand."""
    samples_apart: bool = field(default=False, init=False)
    """Whether coordinates are made one sample at a time (``Capture.samples_apart``)."""

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.record.shape

    @property
    def batch(self) -> int:
        return self.record.batch

    @property
    def device(self) -> torch.device:
        return self.record.device

    @property
    def dtype(self) -> torch.dtype:
        return self.record.dtype

    def add_sum(self, factors: Tensor, out: Tensor) -> None:
        self.record.add_sum(factors, out)

    def per_sample(self) -> Tensor:
        return self.record.per_sample()

    def part(self, samples: slice) -> Self:
        return replace(self, record=self.record.part(samples))

    def rounding_terms(self) -> tuple[int, Tensor]:
        return self.record.rounding_terms()

    def _apart(self, samples: slice) -> Self:
        found = self.part(samples)
        # The library may round by the place of an operand in memory.
        return copied(found) if self.samples_apart else found

    def coordinates(self, scale: float) -> Tensor:
        """Return each sample's release coordinates, in floating point.

        ``scale`` takes captured gradients to those of the sample's own loss.
        """
        return self.record.per_sample().double() * scale

    def rows(self) -> Tensor:
        """Return the release coordinates of captured gradients in float32, ``[B, *coordinates]``.

        Integers are made of these very numbers, so that nothing else need be accurate.
        """
        if self._rows is None:
            whole = [slice(None)] if not self.batch else [samples for samples, _ in self.pieces()]
            if self.samples_apart and self.batch:
                whole = [slice(b, b + 1) for b in range(self.batch)]
            made = [self._apart(samples).coordinates(1.0).float() for samples in whole]
            self._rows = (made[0].contiguous() if len(made) == 1 else torch.cat(made),)
        return self._rows[0]


@dataclass
class L1Normed(NormedGradients):
    """Gradients clipped by their L1 norm."""

    def squared_norms(self) -> Tensor:
        return self.record.l1_norms().square()


@dataclass
class ReleaseNormed(NormedGradients):
    """Gradients clipped by their release coordinates, which are computed from materialized ones."""

    release: ReleaseMap
    p: int

    def squared_norms(self) -> Tensor:
        def one(piece: PerSampleGradients) -> Tensor:
            gradients = piece.per_sample().reshape(-1, *self.shape)
            with phase(MAP):
                rows = self.release.forward(gradients).flatten(1)
            return rows.square().sum(1) if self.p == 2 else rows.abs().sum(1).square()

        return self.record.by_pieces(one) * (1 + 2.0**-40)

    def coordinates(self, scale: float) -> Tensor:
        # The map is linear, so its result is scaled, which may have fewer entries.
        rows = self.record.per_sample().reshape(-1, *self.shape)
        with phase(MAP):
            return self.release.forward(rows) * scale


@dataclass
class ScaledNormed(NormedGradients):
    """Gradients of a ``DiagonalMap``, whose coordinates are ``(grad - centre) / scale``."""

    release: DiagonalMap
    scale: float = 1.0
    """Factor from captured gradients to those of the sample's own loss, which the centre is for."""

    @property
    def _centre(self) -> Tensor | None:
        """The centre, in the units of captured gradients."""
        centre = self.release.centre
        return None if centre is None else self._on(centre) / self.scale

    def _on(self, constant: Tensor) -> Tensor:
        return constant.to(device=self.device, dtype=torch.float64).reshape(self.shape)

    def squared_norms(self) -> Tensor:
        """Return ``sum w grad^2 - 2 <grad, w m> + sum w m^2`` plus the rounding of each term."""
        centre, weights = self._centre, None
        scale = None if self.release.norm == "gradient" else self.release.scale
        if scale is None:
            squares = self.record.squared_norms()
        elif isinstance(self.record, LinearGradients) and self.record.a.shape[1] == 1:
            weights = self._on(scale) ** -2
            a, g = (t[:, 0].double().square() for t in (self.record.a, self.record.g))
            squares = (g @ weights * a).sum(1)
        else:
            each = 1 / self._on(scale)
            return scaled_square(self.record, each, None if centre is None else -centre * each)
        squares = squares * (1 + 2.0**-40)
        if centre is None:
            return squares
        pulled = centre if weights is None else centre * weights
        product, constant = self.record.inner(pulled), (pulled * centre).sum()
        terms, products = self.record.rounding_terms()
        slack = (terms + pulled.numel()) * 2.0**-52 * pulled.abs().max() * products
        rounding = 2.0**-40 * (product.abs() + constant)
        return (squares - 2 * product + constant + 2 * slack + rounding).clamp(min=0)

    def add_sum(self, factors: Tensor, out: Tensor) -> None:
        self.record.add_sum(factors, out)
        centre = self._centre
        if centre is not None:
            out.sub_((factors.double().sum() * centre).to(out.dtype))

    def coordinates(self, scale: float) -> Tensor:
        # One pass in the gradients' own precision is enough, because the integers that result are
        # clipped with their rounding.
        grads = self.record.per_sample().reshape(-1, *self.shape)
        grads = grads.to(torch.promote_types(grads.dtype, torch.float32))
        each = 1.0 if self.release.scale is None else 1 / self._on(self.release.scale)
        factor = torch.as_tensor(scale * each, dtype=grads.dtype, device=grads.device)
        if self.release.centre is None:
            return grads * factor
        shift = (-self._on(self.release.centre) * each).to(grads.dtype)
        return torch.addcmul(shift, grads, factor)


@dataclass
class SpectrumNormed(NormedGradients):
    """Gradients clipped by the spectrum of their correlation or by their own norm, and filtered."""

    record: ConvolutionGradients | CirculantGradients
    release: Taps
    _bins: tuple[Tensor, Tensor] | None = field(default=None, init=False)
    """Retained bins of both operands, kept from the norm to the sum."""

    @property
    def _band(self) -> Band | None:
        band = self.release.band
        assert band is None or isinstance(band, Band)
        return band

    def squared_norms(self) -> Tensor:
        if self.release.norm == "gradient":
            squares = self.record.squared_norms()
        else:
            squares = self._of_spectrum(self._band if self.release.norm == "kept" else None)
        return squares * (self.release.gain**2 * (1 + 2.0**-50))

    def _of_spectrum(self, band: Band | None) -> Tensor:
        x, g = operands(self.record.x, self.record.g)
        if isinstance(self.record, CirculantGradients):
            return spectral.circulant_norm(x, g, band=band)
        if band is None and self._band is not None and self._by_bins():
            options = self.record.options
            *bins, squares = spectral.conv_bins(x, g, band=self._band, **options)
            self._bins = bins[0], bins[1]
            return squares
        return spectral.conv_norm(x, g, band=band, **self._options)

    def whitens_by_bins(self, rank: int) -> bool:
        """Whether retained bins are the cheaper way to so many coordinates of a channel pair."""
        x, g = operands(self.record.x, self.record.g)
        band = self._band
        return band is not None and spectral.norm_by_bins(
            x, g, rank=rank, band=band, **self._options
        )

    def _by_bins(self) -> bool:
        """Whether the transforms of the norm serve the sum too."""
        x, g = operands(self.record.x, self.record.g)
        assert self._band is not None
        same = grid_of(self.release) == self._band.size
        return same and spectral.sum_route(x, g, band=self._band, **self._options) == "bins"

    @property
    def _options(self) -> dict[str, Any]:
        assert isinstance(self.record, ConvolutionGradients)
        return {**self.record.options, "size": grid_of(self.release)}

    def add_sum(self, factors: Tensor, out: Tensor) -> None:
        band = self._band
        if band is None:
            self.record.add_sum(factors, out)
            return
        if self._bins is not None:
            assert isinstance(self.record, ConvolutionGradients)
            geometry = self.record.geometry
            sizes = {"dilation": geometry["dilation"], "groups": geometry["groups"]}
            spectral.bins_sum(*self._bins, factors, out, band=band, **sizes)
            return
        x, g = operands(self.record.x, self.record.g)
        if isinstance(self.record, CirculantGradients):
            spectral.circulant_sum(x, g, factors, out, band=band)
        else:
            spectral.conv_sum(x, g, factors, out, band=band, **self._options)

    def filtered(self) -> PerSampleGradients:
        """Return the filtered per-sample gradients."""
        band = self._band
        if band is None:
            return self.record
        if isinstance(self.record, CirculantGradients):
            grads = self.record.per_sample()
            return ExplicitGradients(grads @ self.filter().to(grads).mT)
        x, g = operands(self.record.x, self.record.g)
        geometry = self.record.geometry
        rows = self.release.site.least
        x = spectral.filtered(x, padding=geometry["padding"], rows=rows, band=band)
        # The filtered input includes the padding, so the convolution pads no more.
        none = {"padding": (0,) * len(rows)}
        return ConvolutionGradients(x, g.to(x.dtype), self.record.kernel_size, {**geometry, **none})

    def filter(self) -> Tensor:
        """Return the circular convolution with the band, ``[d, d]`` float64, for circulants."""
        assert self._band is not None
        return torch.tensor(spectral.smoothing(self._band, self.shape[-1:], (1,)))

    def coordinates(self, scale: float) -> Tensor:
        rows = self.filtered().per_sample().double()
        with phase(MAP):
            return self.release.forward(rows if scale == 1 else rows * scale)


@dataclass
class WhitenedBinsNormed(SpectrumNormed):
    """Gradients clipped by ``||gain signal F_b||``, made of the bins that their sum takes too.

    No filtered gradient ``F_b`` is made.
    """

    matrix: Tensor = field(kw_only=True)

    def squared_norms(self) -> Tensor:
        assert isinstance(self.record, ConvolutionGradients)
        assert self._band is not None
        x, g = operands(self.record.x, self.record.g)
        options = self.record.options
        *bins, squares = spectral.whitened_bins(x, g, self.matrix, band=self._band, **options)
        self._bins = bins[0], bins[1]
        return squares * (self.release.gain**2 * (1 + 2.0**-50))


@dataclass
class WhitenedNormed(NormedGradients):
    """Gradients clipped by ``||gain matrix F_b||``, or by ``||gain F_b||`` without a matrix.

    ``record`` holds the gradients that the matrix applies to. ``behind``, if given, is summed in
    their place.
    """

    release: Taps
    matrix: Tensor | None = None
    behind: SpectrumNormed | None = None

    def squared_norms(self) -> Tensor:
        gain = self.release.gain
        if self.matrix is None:
            return self.record.squared_norms() * (gain**2 * (1 + 2.0**-50))
        matrix = self.matrix * gain

        def one(piece: PerSampleGradients) -> Tensor:
            grads = to_sum_dtype_dense(piece.per_sample())
            grads = grads if grads.shape[1:] == self.shape else grads.reshape(-1, *self.shape)
            return spectral.whitened_norm(grads, matrix.to(grads.device))

        return self.record.by_pieces(one)

    def part(self, samples: slice) -> Self:
        behind = None if self.behind is None else self.behind.part(samples)
        return replace(self, record=self.record.part(samples), behind=behind)

    def add_sum(self, factors: Tensor, out: Tensor) -> None:
        (self.record if self.behind is None else self.behind).add_sum(factors, out)

    def coordinates(self, scale: float) -> Tensor:
        if self.behind is not None:
            return self.behind.coordinates(scale)
        return self.release.forward(super().coordinates(scale).reshape(-1, *self.shape))


def grid_of(release: Taps) -> tuple[int, ...]:
    """Return the transform size that a release's norms refer to."""
    if release.size is not None:
        return release.size
    assert isinstance(release.band, Band)
    return release.band.size
