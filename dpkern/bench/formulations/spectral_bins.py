"""Retained bins of the frequency domain, and sums over them, with torch alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ...ops.spectral._spectra import half_gains, parseval
from ...ops.spectral.bins import crop_matrix, kept_bins
from ._formulation import Arguments, Formulation
from .spectral import turned

Call = Callable[[], Any]
Spectra = Callable[[], tuple[torch.Tensor, torch.Tensor]]


def _by_transforms(args: Arguments) -> Spectra:
    """Return the half planes of both operands by ``rfft2``, ``[B, channels, bins]``."""
    x, g, size, padding = args["x"], args["g"], args["band"].size, args["padding"]

    def spectra() -> tuple[torch.Tensor, torch.Tensor]:
        padded = F.pad(x, (padding,) * 4)
        found = (torch.fft.rfft2(part, s=size).flatten(2) for part in (padded, g))
        inputs, grads = found
        return inputs, grads

    return spectra


def _by_products(args: Arguments) -> Spectra:
    """Return the same by products with the matrices of the transform, which are made once."""
    x, g, size, padding = args["x"], args["g"], args["band"].size, args["padding"]
    both = [(part.flatten(2), turned(part, first, size)) for part, first in ((x, padding), (g, 0))]

    def spectra() -> tuple[torch.Tensor, torch.Tensor]:
        found = ((flat @ matrix).unflatten(-1, (-1, 2)) for flat, matrix in both)
        inputs, grads = (torch.view_as_complex(each) for each in found)
        return inputs, grads

    return spectra


def _powers(spectra: torch.Tensor) -> Any:
    return torch.view_as_real(spectra).square().sum((1, 3))


def _bins_of(spectra: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Return ``[K, B, 2, channels]``, real and imaginary parts."""
    found = torch.view_as_real(spectra.index_select(2, kept))
    return found.permute(2, 0, 3, 1).contiguous()


def _conv_bins(make: Callable[[Arguments], Spectra], args: Arguments) -> Call:
    spectra, kept = make(args), kept_bins(args["band"])
    weights = parseval(args["band"].size).float()

    def call() -> Any:
        inputs, grads = spectra()
        squares = (_powers(inputs) * _powers(grads)) @ weights
        return _bins_of(inputs, kept), _bins_of(grads, kept), squares

    return call


def _whitened_bins(make: Callable[[Arguments], Spectra], args: Arguments) -> Call:
    """Return the bins, and the norms of coordinates of the taps that the bins give."""
    spectra, band, matrix = make(args), args["band"], args["matrix"].float()
    kept, kernel = kept_bins(band), args["kernel_size"]
    cosines, sines = crop_matrix(band, (kernel, kernel), (args["dilation"],) * 2)
    turns = torch.cat((cosines, sines), 1).t().float() @ matrix.t()

    def call() -> Any:
        inputs, grads = spectra()
        x_bins, g_bins = (t.index_select(2, kept) for t in (inputs, grads))
        pairs = grads_by_inputs(x_bins, g_bins)
        rows = torch.cat((pairs.real, pairs.imag), -1) @ turns
        squares = rows.flatten(1).square().sum(1)
        return _bins_of(inputs, kept), _bins_of(grads, kept), squares

    return call


def grads_by_inputs(x_bins: torch.Tensor, g_bins: torch.Tensor) -> torch.Tensor:
    """Return ``conj(D^) X^`` of every pair of channels, ``[B, co, ci, K]``."""
    return g_bins[:, :, None].conj() * x_bins[:, None]


def _whitened_bins_by_products(make: Callable[[Arguments], Spectra], args: Arguments) -> Call:
    """Return the same with one product for each coordinate, which no pair is stored for.

    A coordinate of a pair of channels is ``Re sum_k D_o(k)* t_r(k) X_c(k)``.
    """
    spectra, band, matrix = make(args), args["band"], args["matrix"].float()
    kept, kernel = kept_bins(band), args["kernel_size"]
    cosines, sines = crop_matrix(band, (kernel, kernel), (args["dilation"],) * 2)
    turns = torch.complex(matrix @ cosines.float(), -(matrix @ sines.float()))

    def call() -> Any:
        inputs, grads = spectra()
        x_bins, g_bins = (t.index_select(2, kept) for t in (inputs, grads))
        total: Any = 0
        flat = torch.view_as_real(g_bins).flatten(2)
        for turn in turns:
            turned = torch.view_as_real(x_bins * turn).flatten(2)
            total = total + torch.bmm(flat, turned.mT).square().sum((1, 2))
        return _bins_of(inputs, kept), _bins_of(grads, kept), total

    return call


def _taps_by_matrix(args: Arguments) -> Callable[[torch.Tensor], torch.Tensor]:
    band, out = args["band"], args["out"]
    cosines, sines = (
        part.float() for part in crop_matrix(band, tuple(out.shape[2:]), (args["dilation"],) * 2)
    )

    def taps(sums: torch.Tensor) -> torch.Tensor:
        found = cosines @ sums.real.flatten(1) + sines @ sums.imag.flatten(1)
        return found.view(-1, *sums.shape[1:]).permute(1, 2, 0).reshape(out.shape)

    return taps


def _taps_by_transform(args: Arguments) -> Callable[[torch.Tensor], torch.Tensor]:
    band, out = args["band"], args["out"]
    kept, (height, width) = kept_bins(band), out.shape[2:]
    gains = half_gains(band).float()
    plane = torch.zeros(*out.shape[:2], gains.numel(), dtype=torch.complex64)

    def taps(sums: torch.Tensor) -> torch.Tensor:
        plane.index_copy_(2, kept, sums.permute(1, 2, 0))
        spectra = plane.view(*out.shape[:2], *gains.shape) * gains
        found: torch.Tensor = torch.fft.irfft2(spectra, s=band.size)
        return found[:, :, :height, :width]

    return taps


def _bins_sum(
    make: Callable[[Arguments], Callable[[torch.Tensor], torch.Tensor]], args: Arguments
) -> Call:
    x_bins, g_bins, factors, out = (args[n] for n in ("x_bins", "g_bins", "factors", "out"))
    taps = make(args)

    def call() -> None:
        scaled = g_bins * factors[:, None, None]
        xs, gs = (torch.complex(t[:, :, 0], t[:, :, 1]) for t in (x_bins, scaled))
        out.add_(taps(gs.mH @ xs))

    return call


def _bins_sum_in_reals(args: Arguments) -> Call:
    """Return the sum by one product of reals for each bin: rows and columns hold both parts."""
    x_bins, g_bins, factors, out = (args[n] for n in ("x_bins", "g_bins", "factors", "out"))
    taps, xs = _taps_by_matrix(args), x_bins.flatten(2)
    outs, ins = g_bins.shape[3], x_bins.shape[3]

    def call() -> None:
        gs = (g_bins * factors[:, None, None]).flatten(2)
        blocks = torch.bmm(gs.mT, xs).view(len(gs), 2, outs, 2, ins)
        re = blocks[:, 0, :, 0] + blocks[:, 1, :, 1]
        im = blocks[:, 0, :, 1] - blocks[:, 1, :, 0]
        out.add_(taps(torch.complex(re, im)))

    return call


def _is_plain(args: Arguments) -> bool:
    return bool(args["x"].dim() == 4 and args["groups"] == 1 and args["stride"] == 1)


def _is_plane(args: Arguments) -> bool:
    return bool(args["out"].dim() == 4 and args["groups"] == 1)


_WAYS = {"rfft2": _by_transforms, "matrix": _by_products}


def _each(
    prepare: Callable[[Callable[[Arguments], Spectra], Arguments], Call], also: str = ""
) -> tuple[Formulation, ...]:
    def of(make: Callable[[Arguments], Spectra]) -> Callable[[Arguments], Call]:
        return lambda args: prepare(make, args)

    return tuple(Formulation(name + also, of(make), _is_plain) for name, make in _WAYS.items())


FORMULATIONS = {
    "spectral.bins_sum": (
        Formulation("matmul, matrix", lambda a: _bins_sum(_taps_by_matrix, a), _is_plane),
        Formulation("matmul, irfft2", lambda a: _bins_sum(_taps_by_transform, a), _is_plane),
        Formulation("matmul of reals, matrix", _bins_sum_in_reals, _is_plane),
    ),
    "spectral.conv_bins": _each(_conv_bins),
    "spectral.whitened_bins": (
        *_each(_whitened_bins, ", pairs"),
        *_each(_whitened_bins_by_products, ", products"),
    ),
}
