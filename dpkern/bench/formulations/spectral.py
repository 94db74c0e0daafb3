"""Transforms, norms and filters of the frequency domain with ``torch.fft``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ...ops.spectral._spectra import half_gains
from ._formulation import Arguments, Formulation

Call = Callable[[], Any]


def pair_weights(count: int) -> torch.Tensor:
    """Return how often a bin of the one-sided spectrum stands in the whole one."""
    weights = torch.full((count // 2 + 1,), 2.0)
    weights[0] = 1
    if count % 2 == 0:
        weights[-1] = 1
    return weights


def _power(spectrum: torch.Tensor) -> Any:
    parts = torch.view_as_real(spectrum)
    return parts.square().sum(-1)


def _conv_norm(args: Arguments) -> Call:
    x, g, size, band = args["x"], args["g"], args["size"], args["band"]
    height, width = size
    weights = pair_weights(width) / (height * width)
    if band is not None:
        weights = weights * half_gains(band).float().square()
    padding = args["padding"]

    def call() -> Any:
        padded = F.pad(x, (padding,) * 4)
        inputs = _power(torch.fft.rfft2(padded, s=size)).sum(1)
        grads = _power(torch.fft.rfft2(g, s=size)).sum(1)
        return (inputs * grads * weights).sum((1, 2))

    return call


def _conv_norm_whole(args: Arguments) -> Call:
    x, g, size, band = args["x"], args["g"], args["size"], args["band"]
    gains = None if band is None else half_gains(band).float()
    padding = args["padding"]

    def call() -> Any:
        inputs = torch.fft.rfft2(F.pad(x, (padding,) * 4), s=size)
        grads = torch.fft.rfft2(g, s=size)
        pairs = grads[:, :, None].conj() * inputs[:, None]
        maps = torch.fft.irfft2(pairs if gains is None else pairs * gains, s=size)
        return maps.flatten(1).square().sum(1)

    return call


def _conv_norm_by_products(args: Arguments) -> Call:
    """Return the norm by products with the matrices of the transform, which are made once."""
    x, g, size, band = args["x"], args["g"], args["size"], args["band"]
    height, width = size
    weights = (pair_weights(width) / (height * width)).repeat(height)
    if band is not None:
        weights = weights * half_gains(band).float().square().flatten()
    matrices = [turned(part, first, size) for part, first in ((x, args["padding"]), (g, 0))]

    def call() -> Any:
        inputs, grads = (
            (part.flatten(2) @ matrix).square_().sum(1).view(len(part), -1, 2).sum(2)
            for part, matrix in zip((x, g), matrices, strict=True)
        )
        return (inputs * grads) @ weights

    return call


def turned(part: torch.Tensor, first: int, size: tuple[int, int]) -> torch.Tensor:
    """Return what entries of a map at row and column ``first`` add to each bin, real, imaginary."""
    count, (rows, columns) = size[0] * size[1], part.shape[2:]
    transforms = torch.fft.rfft2(torch.eye(count, dtype=torch.float64).view(count, *size))
    planes = torch.view_as_real(transforms.flatten(1)).float().flatten(1)
    places = torch.arange(count).view(size)[first : first + rows, first : first + columns]
    return planes[places.flatten()].contiguous()


def _filtered(args: Arguments) -> Call:
    x, band, padding, rows = args["x"], args["band"], args["padding"], args["rows"]
    gains = half_gains(band).float()

    def call() -> Any:
        padded = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
        spectrum = torch.fft.rfft2(padded[..., : rows[0], : rows[1]], s=band.size) * gains
        return torch.fft.irfft2(spectrum, s=band.size)[..., : rows[0], : rows[1]]

    return call


def _filtered_by_products(args: Arguments) -> Call:
    """Return the filter as a product with its circulant matrix, made once."""
    x, band, padding, rows = args["x"], args["band"], args["padding"], args["rows"]
    count = band.size[0] * band.size[1]
    impulses = torch.eye(count).view(count, *band.size)
    spectrum = torch.fft.rfft2(impulses) * half_gains(band).float()
    matrix = torch.fft.irfft2(spectrum, s=band.size)[:, : rows[0], : rows[1]]
    inner = matrix.reshape(*band.size, -1)
    top, left = padding
    inner = inner[top : top + x.shape[2], left : left + x.shape[3]].reshape(-1, rows[0] * rows[1])

    def call() -> Any:
        return (x.flatten(2) @ inner).view(*x.shape[:2], *rows)

    return call


def _blocks(args: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.fft.rfft(args["x"]), torch.fft.rfft(args["g"])


def _pairs(args: Arguments) -> torch.Tensor:
    xs, gs = _blocks(args)
    return torch.einsum("btpk,btqk->bpqk", gs.conj(), xs)


def _circulant_norm_by_powers(args: Arguments) -> Call:
    """Return the norm of one position: powers of inputs times powers of gradients."""
    x, g = args["x"][:, 0], args["g"][:, 0]
    weights = pair_weights(x.shape[2]) / x.shape[2]

    def call() -> Any:
        inputs, grads = (_power(torch.fft.rfft(part)).sum(1) for part in (x, g))
        return (inputs * grads) @ weights

    return call


def _circulant_norm_by_matrix(args: Arguments) -> Call:
    """Return the same with the transform as a product."""
    x, g = args["x"][:, 0], args["g"][:, 0]
    block = x.shape[2]
    weights = pair_weights(block) / block
    transforms = torch.view_as_real(torch.fft.rfft(torch.eye(block, dtype=torch.float64)))
    matrix = transforms.float().flatten(1).contiguous()

    def call() -> Any:
        inputs, grads = (
            (part @ matrix).square_().sum(1).view(len(part), -1, 2).sum(2) for part in (x, g)
        )
        return (inputs * grads) @ weights

    return call


def _circulant_norm_by_products(args: Arguments) -> Call:
    weights = pair_weights(args["x"].shape[3]) / args["x"].shape[3]

    def call() -> Any:
        xs, gs = (t.movedim(-1, 1).contiguous() for t in _blocks(args))
        return (torch.view_as_real(gs.mH @ xs).square().sum((2, 3, 4)) * weights).sum(1)

    return call


def _circulant_norm(args: Arguments) -> Call:
    weights = pair_weights(args["x"].shape[3]) / args["x"].shape[3]
    return lambda: (_power(_pairs(args)) * weights).sum((1, 2, 3))


def _circulant_norm_gram(args: Arguments) -> Call:
    weights = pair_weights(args["x"].shape[3]) / args["x"].shape[3]

    def call() -> Any:
        xs, gs = (t.movedim(-1, 1) for t in _blocks(args))
        grams = ((gs.conj() @ gs.mT) * (xs @ xs.mH)).real
        return (grams.sum((-2, -1)) * weights).sum(1)

    return call


def _circulant_gradient(args: Arguments) -> Call:
    block = args["x"].shape[3]

    def call() -> Any:
        grads = torch.fft.irfft(_pairs(args), n=block)
        return grads, grads.flatten(1).square().sum(1)

    return call


def _circulant_product(args: Arguments) -> Call:
    x, weight, block = args["x"], args["weight"], args["x"].shape[2]

    def call() -> Any:
        xs, ws = torch.fft.rfft(x), torch.fft.rfft(weight)
        return torch.fft.irfft(torch.einsum("bqk,pqk->bpk", xs, ws.conj()), n=block)

    return call


def _circulant_product_by_products(args: Arguments) -> Call:
    x, weight, block = args["x"], args["weight"], args["x"].shape[2]

    def call() -> Any:
        xs, ws = (torch.fft.rfft(t).movedim(-1, 0) for t in (x, weight))
        return torch.fft.irfft((xs @ ws.mH).movedim(0, -1), n=block)

    return call


def _circulant_product_dense(args: Arguments) -> Call:
    x, weight = args["x"], args["weight"]
    outs, ins, block = weight.shape
    place = torch.arange(block)
    lags = (place[None, :] - place[:, None]) % block

    def call() -> Any:
        whole = weight[:, :, lags].transpose(1, 2).reshape(outs * block, ins * block)
        return (x.flatten(1) @ whole.t()).view(len(x), outs, block)

    return call


def _fits_row(args: Arguments) -> bool:
    return bool(args.get("convention", "row") == "row")


def _circulant_sum(args: Arguments) -> Call:
    x, g, factors, out = args["x"], args["g"], args["factors"], args["out"]
    block = x.shape[3]

    def call() -> None:
        xs, gs = torch.fft.rfft(x), torch.fft.rfft(g * factors[:, None, None, None])
        out.add_(torch.fft.irfft(torch.einsum("btpk,btqk->pqk", gs.conj(), xs), n=block))

    return call


def _circulant_sum_by_products(args: Arguments) -> Call:
    x, g, factors, out = args["x"], args["g"], args["factors"], args["out"]
    block = x.shape[3]

    def call() -> None:
        xs = torch.fft.rfft(x).flatten(0, 1).movedim(-1, 0)
        gs = torch.fft.rfft(g * factors[:, None, None, None]).flatten(0, 1).movedim(-1, 0)
        out.add_(torch.fft.irfft((gs.mH @ xs).movedim(0, -1), n=block))

    return call


def _circulant_gradient_by_products(args: Arguments) -> Call:
    block = args["x"].shape[3]

    def call() -> Any:
        xs, gs = (t.movedim(-1, 1) for t in _blocks(args))
        grads = torch.fft.irfft((gs.mH @ xs).movedim(1, -1), n=block)
        return grads, grads.flatten(1).square().sum(1)

    return call


def _whitened(args: Arguments) -> Call:
    grads, matrix = args["grads"], args["matrix"].float()
    rows = grads.flatten(0, 2).flatten(1)
    return lambda: (rows @ matrix.t()).view(len(grads), -1).square().sum(1)


def _whitened_in_buffer(args: Arguments) -> Call:
    grads, matrix = args["grads"], args["matrix"].float().t().contiguous()
    rows = grads.flatten(0, 2).flatten(1)
    made = rows.new_empty(len(rows), matrix.shape[1])
    each = made.view(len(grads), -1)

    def call() -> Any:
        torch.mm(rows, matrix, out=made)
        return torch.linalg.vector_norm(each, dim=1).square_()

    return call


def _whitened_by_metric(args: Arguments) -> Call:
    grads, matrix = args["grads"], args["matrix"].float()
    metric = matrix.t() @ matrix
    rows = grads.flatten(3).flatten(1, 2)
    return lambda: torch.einsum("npt,ts,nps->n", rows, metric, rows)


def _fits_unfiltered(args: Arguments) -> bool:
    return args["band"] is None


def _fits_one_position(args: Arguments) -> bool:
    return _fits_unfiltered(args) and args["x"].shape[1] == 1


def _is_plain(args: Arguments) -> bool:
    return bool(args["x"].dim() == 4 and args["groups"] == 1 and args["stride"] == 1)


FORMULATIONS = {
    "spectral.conv_norm": (
        Formulation("rfft2, powers", _conv_norm, _is_plain),
        Formulation("rfft2, maps", _conv_norm_whole, _is_plain),
        Formulation("matrix, powers", _conv_norm_by_products, _is_plain, compiles=True),
    ),
    "spectral.filtered": (
        Formulation("rfft2", _filtered),
        Formulation("matrix", _filtered_by_products),
    ),
    "spectral.circulant_norm": (
        Formulation("rfft, pairs", _circulant_norm, _fits_unfiltered, tolerance=1e-2),
        Formulation("rfft, Gram", _circulant_norm_gram, _fits_unfiltered, tolerance=1e-2),
        Formulation("rfft, products", _circulant_norm_by_products, _fits_unfiltered),
        Formulation("rfft, powers", _circulant_norm_by_powers, _fits_one_position),
        Formulation("matrix, powers", _circulant_norm_by_matrix, _fits_one_position),
    ),
    "spectral.circulant_gradient": (
        Formulation("rfft, einsum", _circulant_gradient),
        Formulation("rfft, products", _circulant_gradient_by_products),
    ),
    "spectral.circulant_product": (
        Formulation("rfft, einsum", _circulant_product, _fits_row),
        Formulation("rfft, products", _circulant_product_by_products, _fits_row),
        Formulation("dense product", _circulant_product_dense, _fits_row),
    ),
    "spectral.circulant_sum": (
        Formulation("rfft, einsum", _circulant_sum, _fits_unfiltered),
        Formulation("rfft, products", _circulant_sum_by_products, _fits_unfiltered),
    ),
    "spectral.whitened_norm": (
        Formulation("mm", _whitened),
        Formulation("mm, buffer", _whitened_in_buffer),
        Formulation("metric", _whitened_by_metric),
    ),
}
