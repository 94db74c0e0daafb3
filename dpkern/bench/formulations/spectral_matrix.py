"""Frequency domain by real products with the matrices of the transform, bins before samples.

Bins that come first make every later product one batch of real matrices, and every power a norm of
a row: complex numbers of torch are neither.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...ops.spectral._spectra import half_gains, parseval
from ...ops.spectral.bins import crop_matrix, kept_bins
from ._formulation import Arguments, Formulation
from .spectral import pair_weights

Call = Callable[[], Any]


def _transform(block: int) -> torch.Tensor:
    """Return the matrix of ``rfft``, ``[2 bins, block]``: real parts, then imaginary ones."""
    spectrum = torch.fft.rfft(torch.eye(block, dtype=torch.float64))
    return torch.cat((spectrum.real, spectrum.imag), 1).t().float().contiguous()


def _inverse(block: int) -> torch.Tensor:
    """Return the matrix of ``irfft``, ``[2 bins, block]``."""
    unit = torch.eye(block // 2 + 1, dtype=torch.complex128)
    parts = (torch.fft.irfft(unit, n=block), torch.fft.irfft(1j * unit, n=block))
    return torch.cat(parts).float().contiguous()


class _Planes:
    """Transforms of maps by one product: ``[2, bins, samples, channels]``.

    Args:
        maps: ``[samples, channels, height, width]``.
        first: row and column of the grid that holds their first entry.
        size: of the grid.
        kept: the bins of the half plane that are wanted; None for all.
    """

    def __init__(
        self, maps: torch.Tensor, first: int, size: tuple[int, int], kept: torch.Tensor | None
    ) -> None:
        count, (rows, columns) = size[0] * size[1], maps.shape[2:]
        transforms = torch.fft.rfft2(torch.eye(count, dtype=torch.float64).view(count, *size))
        places = torch.arange(count).view(size)[first : first + rows, first : first + columns]
        found = torch.view_as_real(transforms.flatten(1)[places.flatten()]).permute(2, 1, 0)
        found = found if kept is None else found[:, kept]
        self.bins = found.shape[1]
        self.matrix = found.flatten(0, 1).float().contiguous()
        self.entries = maps.flatten(2).flatten(0, 1).t()
        self.made = maps.new_empty(2 * self.bins, len(maps) * maps.shape[1])
        self.view = self.made.view(2, self.bins, len(maps), -1)

    def transform(self) -> torch.Tensor:
        """Transform the maps."""
        torch.mm(self.matrix, self.entries, out=self.made)
        return self.view


def _planes(
    args: Arguments, size: tuple[int, int], kept: torch.Tensor | None
) -> tuple[_Planes, _Planes]:
    first = args["padding"]
    return _Planes(args["x"], first, size, kept), _Planes(args["g"], 0, size, kept)


def _powers(spectra: torch.Tensor) -> torch.Tensor:
    """Return the powers of all channels together, ``[bins, samples]``."""
    both: torch.Tensor = torch.linalg.vector_norm(spectra, dim=3).square_()
    return both[0] + both[1]


def _bins_of(spectra: torch.Tensor, kept: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``[K, B, 2, channels]``."""
    found = spectra if kept is None else spectra.index_select(1, kept)
    return found.permute(1, 2, 0, 3).contiguous()


def _conv_bins(args: Arguments) -> Call:
    band = args["band"]
    both, kept, weights = _planes(args, band.size, None), kept_bins(band), parseval(band.size)
    weights = weights.float()

    def call() -> Any:
        inputs, grads = (planes.transform() for planes in both)
        squares = weights @ (_powers(inputs) * _powers(grads))
        return _bins_of(inputs, kept), _bins_of(grads, kept), squares

    return call


def _conv_norm(args: Arguments) -> Call:
    """Return the norm by those bins that have a weight."""
    size, band = args["size"], args["band"]
    weights = parseval(size).float()
    if band is not None:
        weights = weights * half_gains(band).float().square().flatten()
    kept = weights.nonzero()[:, 0]
    both, weights = _planes(args, size, kept), weights[kept]

    def call() -> Any:
        inputs, grads = (planes.transform() for planes in both)
        return weights @ (_powers(inputs) * _powers(grads))

    return call


def _whitened_bins(args: Arguments) -> Call:
    """Return the bins, and the norm by one product of reals for each coordinate."""
    band, matrix = args["band"], args["matrix"].float()
    both, kernel = _planes(args, band.size, kept_bins(band)), args["kernel_size"]
    cosines, sines = crop_matrix(band, (kernel, kernel), (args["dilation"],) * 2)
    turns = list(zip(matrix @ cosines.float(), -(matrix @ sines.float()), strict=True))

    def call() -> Any:
        inputs, grads = (planes.transform() for planes in both)
        rows, columns = inputs.permute(2, 0, 1, 3), grads.permute(2, 3, 0, 1).flatten(2)
        re, im = rows.contiguous().unbind(1)
        total: Any = 0
        for cosine, sine in turns:
            c, s = cosine[:, None], sine[:, None]
            turned = torch.cat((re * c - im * s, re * s + im * c), 1)
            made = torch.bmm(columns, turned).flatten(1)
            total = total + torch.linalg.vector_norm(made, dim=1).square_()
        return _bins_of(inputs), _bins_of(grads), total

    return call


def _bins_sum(args: Arguments) -> Call:
    """Return the sum by two products of reals for each bin, and one for the taps of all."""
    x_bins, g_bins, out = args["x_bins"], args["g_bins"], args["out"]
    scaled, factors = torch.empty_like(g_bins), args["factors"][:, None, None]
    cosines, sines = crop_matrix(args["band"], tuple(out.shape[2:]), (args["dilation"],) * 2)
    turns = torch.cat((cosines, sines), 1).float()
    bins, outs, ins = len(x_bins), g_bins.shape[3], x_bins.shape[3]
    made, turned = x_bins.new_empty(2, bins, outs, ins), torch.empty_like(x_bins)
    grads, both = scaled.flatten(1, 2).mT, [t.flatten(1, 2) for t in (x_bins, turned)]

    def call() -> None:
        torch.mul(g_bins, factors, out=scaled)
        turned[:, :, 0] = x_bins[:, :, 1]
        torch.neg(x_bins[:, :, 0], out=turned[:, :, 1])
        for rows, part in zip(both, made, strict=True):
            torch.bmm(grads, rows, out=part)
        taps = turns @ made.view(2 * bins, -1)
        out.add_(taps.view(-1, outs, ins).permute(1, 2, 0).reshape(out.shape))

    return call


def _circulant_norm(args: Arguments) -> Call:
    both = [args[name][:, 0] for name in ("x", "g")]
    samples, _, block = both[0].shape
    matrix, bins = _transform(block), block // 2 + 1
    weights = pair_weights(block) / block
    rows = [part.reshape(-1, block).t() for part in both]
    made = [part.new_empty(2 * bins, part.shape[1]) for part in rows]

    def call() -> Any:
        for part, spectra in zip(rows, made, strict=True):
            torch.mm(matrix, part, out=spectra)
        inputs, grads = (_powers(each.view(2, bins, samples, -1)) for each in made)
        return weights @ (inputs * grads)

    return call


def _circulant_product(args: Arguments) -> Call:
    x, weight = args["x"], args["weight"]
    (samples, ins, block), outs = x.shape, len(weight)
    matrix, back, bins = _transform(block), _inverse(block), block // 2 + 1
    xs, ws = x.new_empty(2 * bins, samples * ins), x.new_empty(2 * bins, outs * ins)
    (xr, xi), (wr, wi) = xs.view(2, bins, samples, ins), ws.view(2, bins, outs, ins).mT
    made, out = x.new_empty(2, bins, samples, outs), x.new_empty(samples * outs, block)

    def call() -> Any:
        torch.mm(matrix, x.reshape(-1, block).t(), out=xs)
        torch.mm(matrix, weight.reshape(-1, block).t(), out=ws)
        torch.bmm(xr, wr, out=made[0]).baddbmm_(xi, wi)
        torch.bmm(xi, wr, out=made[1]).baddbmm_(xr, wi, alpha=-1)
        return torch.mm(made.view(2 * bins, -1).t(), back, out=out).view(samples, outs, block)

    return call


def _circulant_sum(args: Arguments) -> Call:
    x, g, out = args["x"], args["g"], args["out"]
    factors, scaled = args["factors"][:, None, None, None], torch.empty_like(g)
    ins, outs, block = x.shape[2], g.shape[2], x.shape[3]
    matrix, back, bins = _transform(block), _inverse(block), block // 2 + 1
    rows, total = len(x) * x.shape[1], out.view(-1, block)
    xs, gs = x.new_empty(2 * bins, rows * ins), x.new_empty(2 * bins, rows * outs)
    (xr, xi), (gr, gi) = xs.view(2, bins, rows, ins), gs.view(2, bins, rows, outs).mT
    made = x.new_empty(2, bins, outs, ins)

    def call() -> None:
        torch.mul(g, factors, out=scaled)
        torch.mm(matrix, x.reshape(-1, block).t(), out=xs)
        torch.mm(matrix, scaled.view(-1, block).t(), out=gs)
        torch.bmm(gr, xr, out=made[0]).baddbmm_(gi, xi)
        torch.bmm(gr, xi, out=made[1]).baddbmm_(gi, xr, alpha=-1)
        total.addmm_(made.view(2 * bins, -1).t(), back)

    return call


def _whitened_norm_by_gram(args: Arguments) -> Call:
    """Return the norms by a small matrix of products of taps for each sample."""
    matrix = args["matrix"].float()
    metric = (matrix.t() @ matrix).flatten()
    rows = args["grads"].flatten(3).flatten(1, 2)
    return lambda: torch.bmm(rows.mT, rows).flatten(1) @ metric


def _is_unfiltered(args: Arguments) -> bool:
    return args["band"] is None


def _has_one_position(args: Arguments) -> bool:
    return _is_unfiltered(args) and args["x"].shape[1] == 1


def _is_row(args: Arguments) -> bool:
    return bool(args.get("convention", "row") == "row")


def _is_plain(args: Arguments) -> bool:
    return bool(args["x"].dim() == 4 and args["groups"] == 1 and args["stride"] == 1)


def _is_plane(args: Arguments) -> bool:
    return bool(args["out"].dim() == 4 and args["groups"] == 1)


FORMULATIONS = {
    name: (Formulation(idea, prepare, fits),)
    for name, idea, prepare, fits in (
        ("spectral.bins_sum", "products of reals, matrix", _bins_sum, _is_plane),
        ("spectral.circulant_norm", "matrix, bins first", _circulant_norm, _has_one_position),
        ("spectral.circulant_product", "matrix, bins first", _circulant_product, _is_row),
        ("spectral.circulant_sum", "matrix, bins first", _circulant_sum, _is_unfiltered),
        ("spectral.conv_bins", "matrix, bins first", _conv_bins, _is_plain),
        ("spectral.conv_norm", "matrix, bins first", _conv_norm, _is_plain),
        ("spectral.whitened_bins", "matrix, kept bins", _whitened_bins, _is_plain),
        ("spectral.whitened_norm", "Gram", _whitened_norm_by_gram, lambda _: True),
    )
}
