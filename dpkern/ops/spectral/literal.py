"""The published pipelines in full: one sample at a time, the whole complex spectrum stored.

Nothing here is fast. These are the oracles that shortcuts are compared with, and the baseline of
the benchmarks. For one sample, with the unitary DFT F on a grid of P x Q,

    G_ij = sqrt(PQ) conj(F(D_i)) o F(X_j)                  spectrum of the correlation map
    Ghat = G / max(1, ||G||_2 / C) + tau                   tau: sd a sigma C on Re, b sigma C on Im
    gradient = Re F^-1(gains o Ghat) at the taps           gains = 1: no filter

X is the zero-padded input up to the last row and column that some output sees, D the output
gradient on the grid of the stride.

Reference: GReDP, Algorithms 1 and 2, with the conjugate and the factor sqrt(PQ) that (15) and (19)
omit; Spectral-DP (Feng et al., 2023) as GReDP describes it; ``stored`` as its authors' code has it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ...base.errors import InvalidInput
from ..ghost._conv_geometry import check_size
from ._band import Band, half_weights
from ._basis import lags

CIRCULAR = (math.sqrt(0.5), math.sqrt(0.5))


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """The configuration of one layer's release.

    Attributes:
        kernel, stride, padding, dilation, groups: of the convolution, () for what leaves an axis
            as it is; a circulant layer of block ``d`` has ``kernel=(d,)`` and the rest as given.
        size: P and Q; ``(d,)`` for a circulant layer.
        bound: C.
        noise_multiplier: sigma; 0 adds nothing.
        noise: ``(a, b)``.
        band: the filter, or None.
        noise_point: ``per_batch``: once on the sum; ``per_sample``: on every sample, as printed.
        stored: noise and slice act on the spectrum as code stores it (one-sided in two dimensions),
            noise only in the corner ``band.block``; needs a band of kind ``authors_slice``.

    Raises:
        InvalidInput: other numbers of axes than the kernel's, or a band of another grid.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1
    size: tuple[int, ...]
    bound: float
    noise_multiplier: float = 0.0
    noise: tuple[float, float] = CIRCULAR
    band: Band | None = None
    noise_point: str = "per_batch"
    stored: bool = False

    def __post_init__(self) -> None:
        axes = len(self.kernel)
        for name, least in (("stride", 1), ("padding", 0), ("dilation", 1)):
            spread = check_size(name, getattr(self, name) or least, axes, least)
            object.__setattr__(self, name, spread)
        if len(self.size) != axes or (self.band is not None and self.band.size != self.size):
            raise InvalidInput(
                "size",
                expected=f"{axes} sizes, one for each axis of the kernel, and a band on them",
                got=f"{self.size} with {self.band}",
                remedy="Make the band on this grid.",
            )


def gredp(
    x: torch.Tensor, g: torch.Tensor, config: Pipeline, generator: torch.Generator
) -> torch.Tensor:
    """Return the noisy sum of a convolution's weight gradients, without a filter.

    Args:
        x: ``[B, C, *positions]``, input.
        g: ``[B, O, *output]``, output gradient of every sample's own loss.
        config: sizes and noise; its ``band`` must be None.
        generator: of torch, for the noise. Not a certified generator.

    Returns:
        ``[O, C / groups, *kernel]`` in the dtype of ``x``.

    Raises:
        InvalidInput: a config with a band.
    """
    if config.band is not None:
        raise _wrong_band("None for GReDP, which keeps every frequency", config)
    return _release(_conv_spectra(x, g, config), x, config, generator)


def spectral_dp(
    x: torch.Tensor, g: torch.Tensor, config: Pipeline, generator: torch.Generator
) -> torch.Tensor:
    """Return what ``gredp`` does, with a filter after the noise.

    Raises:
        InvalidInput: a config without a band.
    """
    if config.band is None:
        raise _wrong_band("a Band for Spectral-DP", config)
    return _release(_conv_spectra(x, g, config), x, config, generator)


def circulant(
    x: torch.Tensor, g: torch.Tensor, config: Pipeline, generator: torch.Generator
) -> torch.Tensor:
    """Return the noisy sum of a block-circulant layer's gradients, W[r, s] = w[(s - r) mod d].

    Args:
        x: ``[B, T, q, d]``, input blocks.
        g: ``[B, T, p, d]``, output gradient blocks.
        config: sizes and noise; with a band it is Spectral-DP, without one GReDP.
        generator: of torch, for the noise.

    Returns:
        ``[p, q, d]``.
    """
    return _release(_circulant_spectra(x, g), x, config, generator)


def batched(
    x: torch.Tensor,
    g: torch.Tensor,
    config: Pipeline,
    generator: torch.Generator,
    *,
    chunk: int = 16,
) -> torch.Tensor:
    """Return the same release of a convolution in the form that careful code would choose.

    It takes half spectra of ``chunk`` samples at a time, noise and inverse once.

    Raises:
        InvalidInput: noise other than circular and per batch, which this form cannot draw.
    """
    a, b = config.noise
    if a != b or config.noise_point != "per_batch" or config.stored:
        raise InvalidInput(
            "config",
            expected="a == b, noise_point='per_batch', stored=False",
            got=config,
            remedy="Use gredp or spectral_dp.",
        )
    axes = _axes(config)
    last = config.size[-1]
    weights = torch.from_numpy(half_weights(last)).to(x)
    parts = []
    for i in range(0, x.shape[0], chunk):
        xs, ds = (_half(t, axes) for t in _placed(x[i : i + chunk], g[i : i + chunk], config))
        spectra = _pairs(xs, ds, config)
        squares = (spectra.abs().square() * weights).flatten(1).sum(1)
        factors = (config.bound / squares.sqrt()).clamp(max=1)
        parts.append(torch.einsum("b,b...->...", factors.to(spectra.dtype), spectra))
    total = torch.stack(parts).sum(0)
    if config.noise_multiplier > 0:
        # The real part of circular noise with sd s on Re and on Im is white noise of sd s.
        scale = a * config.noise_multiplier * config.bound
        shape = (*total.shape[:2], *config.size)
        white = torch.randn(shape, generator=generator, dtype=x.dtype) * scale
        total = total + torch.fft.rfftn(white, dim=axes, norm="ortho")
    if config.band is not None:
        total = total * torch.tensor(config.band.gains[..., : last // 2 + 1], device="cpu").to(x)
    return _taps(torch.fft.irfftn(total, s=config.size, dim=axes, norm="ortho"), config)


def _half(t: torch.Tensor, axes: list[int]) -> torch.Tensor:
    spectrum: torch.Tensor = torch.fft.rfftn(t, dim=axes, norm="ortho")
    return spectrum


def _wrong_band(expected: str, config: Pipeline) -> InvalidInput:
    return InvalidInput(
        "config.band", expected=expected, got=config.band, remedy="Call the other function."
    )


def _axes(config: Pipeline) -> list[int]:
    return list(range(-len(config.size), 0))


def _placed(
    x: torch.Tensor, g: torch.Tensor, config: Pipeline
) -> tuple[torch.Tensor, torch.Tensor]:
    """Place the padded input up to the last position that is used, and D, both on the grid."""
    least = tuple(
        s * (n - 1) + t * (k - 1) + 1
        for n, s, t, k in zip(
            g.shape[2:], config.stride, config.dilation, config.kernel, strict=True
        )
    )
    pads = [p for n in reversed(config.padding) for p in (n, n)]
    every = (slice(None), slice(None))
    used = every + tuple(slice(n) for n in least)
    grid = x.new_zeros(*x.shape[:2], *config.size)
    grid[used] = torch.nn.functional.pad(x, pads)[used]
    strided = g.new_zeros(*g.shape[:2], *config.size)
    steps = zip(g.shape[2:], config.stride, strict=True)
    strided[every + tuple(slice(0, s * (n - 1) + 1, s) for n, s in steps)] = g
    return grid, strided


def _pairs(xs: torch.Tensor, ds: torch.Tensor, config: Pipeline) -> torch.Tensor:
    """Return sqrt(PQ) conj(F D_i) o F X_j for each group's pairs, ``[B, O, C / groups, *bins]``."""
    groups = config.groups
    xs, ds = (t.reshape(t.shape[0], groups, -1, *t.shape[2:]) for t in (xs, ds))
    spectra = math.sqrt(math.prod(config.size)) * ds.conj()[:, :, :, None] * xs[:, :, None]
    return spectra.flatten(1, 2)


def _conv_spectra(x: torch.Tensor, g: torch.Tensor, config: Pipeline) -> Iterator[torch.Tensor]:
    axes = _axes(config)
    for i in range(x.shape[0]):
        grids = _placed(x[i : i + 1], g[i : i + 1], config)
        xs, ds = (torch.fft.fftn(t, dim=axes, norm="ortho") for t in grids)
        yield _pairs(xs, ds, config)[0]


def _circulant_spectra(x: torch.Tensor, g: torch.Tensor) -> Iterator[torch.Tensor]:
    for xs, ds in zip(x, g, strict=True):
        f, h = (torch.fft.fft(t, norm="ortho") for t in (xs, ds))
        yield math.sqrt(x.shape[-1]) * torch.einsum("tpk,tqk->pqk", h.conj(), f)


def _release(
    spectra: Iterator[torch.Tensor],
    like: torch.Tensor,
    config: Pipeline,
    generator: torch.Generator,
) -> torch.Tensor:
    """Clip, noise, inverse, real part, taps: per sample or once, as ``noise_point`` says."""
    total: torch.Tensor | None = None
    for spectrum in spectra:
        part = spectrum / max(1.0, float(spectrum.abs().square().sum().sqrt()) / config.bound)
        if config.noise_point == "per_sample":
            part = _inverse(part, config, generator)
        total = part if total is None else total + part
    if total is None:
        raise InvalidInput(
            "x", expected="at least one sample", got=str(list(like.shape)), remedy="Pass a batch."
        )
    return total if config.noise_point == "per_sample" else _inverse(total, config, generator)


def _inverse(spectrum: torch.Tensor, config: Pipeline, generator: torch.Generator) -> torch.Tensor:
    axes = _axes(config)
    if config.stored:
        return _taps(_stored_inverse(spectrum, config, generator), config)
    spectrum = spectrum + _noise(spectrum, config, generator)
    if config.band is not None:
        spectrum = spectrum * torch.tensor(config.band.gains, device="cpu").to(spectrum.real)
    return _taps(torch.fft.ifftn(spectrum, dim=axes, norm="ortho").real, config)


def _stored_inverse(
    spectrum: torch.Tensor, config: Pipeline, generator: torch.Generator
) -> torch.Tensor:
    """Add noise on the corner, set a slice to zero, and invert, which makes the result real."""
    band = config.band
    if band is None or band.kind != "authors_slice":
        raise _wrong_band("a Band of kind 'authors_slice' with stored=True", config)
    axes = _axes(config)
    two = len(config.size) == 2
    kept = spectrum[..., : config.size[-1] // 2 + 1].clone() if two else spectrum.clone()
    corner = (slice(None), slice(None), *(slice(n) for n in band.block))
    kept[corner] += _noise(kept[corner], config, generator)
    for axis, n in zip(axes, band.block, strict=True):
        kept.transpose(axis, 0)[n:-1] = 0
    maps: torch.Tensor = (
        torch.fft.irfftn(kept, s=config.size, dim=axes, norm="ortho")
        if two
        else torch.fft.ifftn(kept, dim=axes, norm="ortho").real
    )
    return maps


def _noise(spectrum: torch.Tensor, config: Pipeline, generator: torch.Generator) -> torch.Tensor:
    real, imaginary = (
        torch.randn(spectrum.shape, generator=generator, dtype=spectrum.real.dtype)
        * (part * config.noise_multiplier * config.bound)
        for part in config.noise
    )
    return torch.complex(real, imaginary)


def _taps(maps: torch.Tensor, config: Pipeline) -> torch.Tensor:
    """Return the entries at the lags of the kernel, in its shape."""
    if len(config.size) == 1 and maps.shape[-1] == config.kernel[0]:
        return maps
    index = torch.from_numpy(lags(config.kernel, config.dilation[: len(config.kernel)])).T
    taps = maps[(slice(None), slice(None), *index)]
    return taps.reshape(*maps.shape[:2], *config.kernel)
