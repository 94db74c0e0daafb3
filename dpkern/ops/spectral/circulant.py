"""Block-circulant layers: products, norms, per-sample gradients and weighted sums.

Blocks of size d in the row convention, ``W[r, s] = w[(s - r) mod d]``. For one sample with input
blocks ``x [T, q, d]`` and output gradients ``g [T, p, d]`` at T positions

    grad[i, j, u] = sum_t sum_a g[t, i, a] x[t, j, a + u mod d]

with the transform ``sum_t conj(g^[t, i]) x^[t, j]``. The column convention ``w[(r - s) mod d]`` has
the same gradients with u reversed.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from ...base.dispatch import op
from ...base.errors import InvalidInput
from ...base.signature import Double, Float, written
from .._products import exact
from ._band import Band, half_weights
from ._spectra import half_gains, on, transform_error
from ._transform_flops import Flops, of_line


def _check_band(x: Tensor, g: Tensor, band: Band | None) -> None:
    block = x.shape[3]
    if band is not None and (not isinstance(band, Band) or band.size != (block,)):
        raise InvalidInput(
            "band",
            expected=f"a Band of size ({block},), or None",
            got=band,
            remedy="Make the band on the block size of this layer.",
        )


def transforms(x: Tensor, g: Tensor, samples: int, inverse: int = 0) -> Flops:
    """Return the operations of transforming samples' operands and ``inverse`` gradients."""
    lines = samples * x.shape[1] * (x.shape[2] + g.shape[2]) + inverse * g.shape[2] * x.shape[2]
    return line(x.shape[3]) * lines


def line(block: int) -> Flops:
    """Return the operations of transforming one block."""
    return of_line(block, real=True)


def norm_route(x: Tensor, g: Tensor) -> str:
    """Return ``rank_one`` for one position, else ``positions`` or ``spectrum``.

    It is ``positions`` where Gram matrices over them are cheaper than the gradient's spectrum.
    """
    if x.shape[1] == 1:
        return "rank_one"
    return "positions" if _by_positions(x, g) else "spectrum"


def _by_positions(x: Tensor, g: Tensor) -> bool:
    """Whether Gram matrices over positions are cheaper than the gradient's spectrum."""
    positions, ins, outs = x.shape[1], x.shape[2], g.shape[2]
    return positions * (ins + outs) < ins * outs


@op(check=_check_band)
@torch.no_grad()
def circulant_norm(
    x: Float[Tensor, "B T q d"],
    g: Float[Tensor, "B T p d"],
    *,
    band: Band | None = None,
) -> Double[Tensor, "squares: B"]:
    """Return the squared norm of each sample's gradient, or of its filtered part, from above.

    ``1/d sum_k w_k Gamma_k^2 sum_{i,j} |sum_t conj(g^[t, i]) x^[t, j]|^2``: one position is a
    product of two sums of squares per frequency; more are a Gram matrix over positions or the
    spectrum itself, whichever is smaller.

    Args:
        x: input blocks ``[B, T, q, d]``, float32 or float64, contiguous.
        g: output gradient blocks ``[B, T, p, d]``, same dtype, contiguous.
        band: the filter, of size ``(d,)``, or None.

    Returns:
        float64 ``[B]``; not finite for a sample with NaN or inf.

    Raises:
        InvalidInput: wrong type, shape, dtype, device, layout or band.
    """
    if not (x.numel() and g.numel()):  # MKL has no transform of nothing
        return x.new_zeros(len(x), dtype=torch.float64)
    xs, gs = (torch.fft.rfft(t.double()) for t in (x, g))
    return norm_of_spectra(x, g, xs, gs, band)


def norm_of_spectra(x: Tensor, g: Tensor, xs: Tensor, gs: Tensor, band: Band | None) -> Tensor:
    """Run ``circulant_norm`` on transforms that were computed in the precision they have."""
    block = x.shape[-1]
    rounding, transforming = norm_errors(x, g, xs.real.dtype)
    xs, gs = (t.to(torch.complex128).movedim(-1, 1) for t in (xs, gs))  # [B, K, T, q or p]
    if x.shape[1] == 1:
        pairs = _power(xs) * _power(gs)
    elif _by_positions(x, g):
        grams = ((gs.conj() @ gs.mT) * (xs @ xs.mH)).real
        pairs = grams.sum((-2, -1)).clamp(min=0)
    else:
        pairs = _power(gs.mH @ xs)
    weights = on(x.device, weights_of, block, band)
    squares = (pairs * weights).sum(1)
    # Every term is at most the product of the operands' norms; transforms are off by eta of them.
    sizes = x.double().flatten(1).norm(dim=1) * g.double().flatten(1).norm(dim=1)
    if x.shape[1] > 1 and _by_positions(x, g):  # the square itself is what is rounded
        exact = (squares + 2 * math.sqrt(block) * rounding * sizes.square()).sqrt()
        above: Tensor = exact + transforming * sizes
    else:
        above = squares.sqrt() + (rounding + transforming) * sizes
    return above.square() * (1 + 2.0**-42)


def weights_of(block: int, band: Band | None) -> Tensor:
    """Return ``[K]``: ``w Gamma^2 / d``."""
    weights = torch.from_numpy(half_weights(block)) / block
    return weights if band is None else weights * half_gains(band).flatten().square()


_UNIT = 2.0**-53


def norm_errors(x: Tensor, g: Tensor, dtype: torch.dtype = torch.float64) -> tuple[float, float]:
    """Return the errors of sums and of transforms of this dtype.

    They are relative to the product of the operands' norms.
    """
    block = x.shape[3]
    terms = x.shape[1] * (x.shape[2] + g.shape[2]) * block
    return terms * _UNIT * math.sqrt(block), 3 * transform_error(dtype, (1, block)) * math.sqrt(
        block
    )


def _power(spectra: Tensor) -> Tensor:
    return torch.view_as_real(spectra).square().sum((-3, -2, -1))


@op()
@torch.no_grad()
def circulant_product(
    x: Float[Tensor, "B q d"],
    weight: Float[Tensor, "p q d"],
    *,
    convention: Literal["row", "column"] = "row",
) -> Float[Tensor, "y: B p d"]:
    """Multiply by circulant blocks: ``y_i = sum_j W_ij x_j``.

    In the row convention a block is a correlation, ``F(y_i) = sum_j conj(F(w_ij)) F(x_j)``; in the
    column convention a convolution, without the conjugate. The gradient by x is the product with
    ``weight.transpose(0, 1)`` in the other convention.

    Args:
        x: blocks ``[B, q, d]``, float32 or float64, contiguous.
        weight: ``[p, q, d]``, same dtype, contiguous.
        convention: ``row`` or ``column``.

    Returns:
        ``[B, p, d]`` of the dtype of x, off by a few roundings for each doubling of q d; not finite
        in blocks that NaN or inf reach.

    Raises:
        InvalidInput: wrong type, shape, dtype, device, layout or convention.

    Source: GReDP (17)-(18); CirCNN, Ding et al. 2017, for the column convention.
    """
    if not (x.numel() and weight.numel()):
        return x.new_zeros(len(x), len(weight), x.shape[2])
    kind = exact(x.dtype, x.device)
    xs, ws = (torch.fft.rfft(t.to(kind)).movedim(-1, 0) for t in (x, weight))
    ys = xs @ (ws.mH if convention == "row" else ws.mT)
    y: Tensor = torch.fft.irfft(ys.movedim(0, -1), n=x.shape[2])
    return y.to(x.dtype).contiguous()


@op()
@torch.no_grad()
def circulant_gradient(
    x: Float[Tensor, "B T q d"],
    g: Float[Tensor, "B T p d"],
) -> tuple[Float[Tensor, "grads: B p q d"], Double[Tensor, "squares: B"]]:
    """Materialize per-sample gradients, and return their squared norms as well.

    Args: as ``circulant_norm``.

    Returns:
        ``[B, p, q, d]`` of the dtype of x, contiguous; and float64 ``[B]``, their sums of squares.

    Raises:
        InvalidInput: wrong type, shape, dtype, device or layout.
    """
    if not (x.numel() and g.numel()):
        empty = x.new_zeros(len(x), g.shape[2], x.shape[2], x.shape[3])
        return empty, empty.new_zeros(len(x), dtype=torch.float64)
    xs, gs = (torch.fft.rfft(t).movedim(-1, 1) for t in (x, g))
    spectra = (gs.mH @ xs).movedim(1, -1)
    grads = torch.fft.irfft(spectra, n=x.shape[-1]).contiguous()
    return grads, grads.double().square().flatten(1).sum(1)


def _check_sum(x: Tensor, g: Tensor, factors: Tensor, out: Tensor, band: Band | None) -> None:
    _check_band(x, g, band)


@op(check=_check_sum)
@torch.no_grad()
def circulant_sum(
    x: Float[Tensor, "B T q d"],
    g: Float[Tensor, "B T p d"],
    factors: Float[Tensor, "B"],
    out: Float[Tensor, "p q d", written],
    *,
    band: Band | None = None,
) -> None:
    """Add ``sum_b factors_b h * grad_b`` to ``out``.

    Each frequency takes one product over samples and positions.

    Args:
        x, g, band: as ``circulant_norm``.
        factors: ``[B]``, same dtype. Factor 0 contributes nothing, whatever the sample holds.
        out: ``[p, q, d]``, same dtype, contiguous, added to.

    Raises:
        InvalidInput: wrong type, shape, dtype, device, layout or band.
    """
    kept = factors != 0
    if not bool(kept.all()):
        x, g, factors = x[kept], g[kept], factors[kept]
    if not (x.numel() and g.numel()):
        return
    add_transformed(x, g * factors[:, None, None, None], out, band)


def add_transformed(x: Tensor, scaled: Tensor, out: Tensor, band: Band | None) -> None:
    """Add ``sum_b h * grad_b`` to ``out``, of output gradients that hold the factors."""
    kind = exact(x.dtype, x.device)
    xs, gs = (
        torch.fft.rfft(t.to(kind)).flatten(0, 1).movedim(-1, 0) for t in (x, scaled)
    )  # [K, B T, q or p]
    spectra = (gs.mH @ xs).movedim(0, -1)
    if band is not None:
        spectra = spectra * on(x.device, half_gains, band).flatten().to(kind)
    out.add_(torch.fft.irfft(spectra, n=x.shape[-1]))


__all__ = [
    "add_transformed",
    "circulant_gradient",
    "circulant_norm",
    "circulant_product",
    "circulant_sum",
    "norm_errors",
    "norm_of_spectra",
    "norm_route",
    "transforms",
]
