"""Run block-circulant layers on the CPU: products, norms at one position, and weighted sums."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...base.signature import Double, Float, written
from ..spectral._band import Band
from ..spectral._spectra import half_gains, on
from ..spectral.circulant import weights_of
from ._extension import on_cpu
from ._native import compiled

LARGEST = 512
"""Largest block whose lags take less time than its transform."""

LARGEST_TABLE = 128
"""Largest block whose products with cosines and sines take less time than torch's transform."""


@compiled
def circulant_squares(
    x: Float[Tensor, "B q d"],
    g: Float[Tensor, "B p d"],
    weights: Double[Tensor, "K"],
    error: float,
) -> Double[Tensor, "squares: B"]:
    """Return the sum over frequencies of ``weights(k) P_x(k) P_g(k)``, from above.

    ``P(k) = sum_j |z^[j](k)|^2`` for the blocks z of an operand.

    Args:
        x, g: input and output gradient blocks.
        weights: ``w Gamma^2 / d``.
        error: what rounding can hide, as a part of the product of the operands' squares.
    """
    raise NotImplementedError


@compiled
def circulant_multiply(
    x: Float[Tensor, "B q d"], weight: Float[Tensor, "p q d"], sign: float
) -> Float[Tensor, "y: B p d"]:
    """Return the products of circulant blocks.

    Args:
        x, weight: of ``circulant_product``.
        sign: 1 in the row convention, -1 in the other.
    """
    raise NotImplementedError


@compiled
def circulant_add(
    x: Float[Tensor, "B T q d"],
    g: Float[Tensor, "B T p d"],
    factors: Float[Tensor, "B"],
    gains: Double[Tensor, "K"] | None,
    out: Float[Tensor, "p q d", written],
) -> None:
    """Add the weighted sum of gradients, each frequency times its gain."""


@torch.no_grad()
def _circulant_norm(x: Tensor, g: Tensor, *, band: Band | None = None) -> Tensor:
    if not (x.numel() and g.numel()):
        return x.new_zeros(len(x), dtype=torch.float64)
    block, blocks = x.shape[3], x.shape[2] + g.shape[2]
    weights = on(x.device, weights_of, block, band)
    most = 1.0 if band is None else float(on(x.device, half_gains, band).abs().max()) ** 2
    # Of every frequency: its transforms, the sums of their powers, and the sum over frequencies.
    entries = block // 2 + 1
    terms = 6 * (entries + 16) + 2 * blocks + entries + 12
    error = block * terms * 2.0**-53 * most
    return circulant_squares(x[:, 0], g[:, 0], weights, error)


def _refuse(x: Tensor, *_: Any, **__: Any) -> str | None:
    if x.shape[1] != 1:
        return "reads one position of each sample"
    if x.shape[3] > LARGEST:
        return f"reads blocks of at most {LARGEST} values"
    return on_cpu(x)


def _circulant_product(x: Tensor, weight: Tensor, *, convention: str = "row") -> Tensor:
    if not (x.numel() and weight.numel()):
        return x.new_zeros(len(x), len(weight), x.shape[2])
    return circulant_multiply(x, weight, 1.0 if convention == "row" else -1.0)


def _circulant_sum(
    x: Tensor, g: Tensor, factors: Tensor, out: Tensor, *, band: Band | None = None
) -> None:
    if x.numel() and g.numel():
        gains = None if band is None else on(x.device, half_gains, band).flatten()
        circulant_add(x, g, factors, gains, out)


def _refuse_large(x: Tensor, *_: Any, **__: Any) -> str | None:
    if x.shape[-1] > LARGEST_TABLE:
        return f"has products with blocks of at most {LARGEST_TABLE} values"
    return on_cpu(x)


KERNELS: tuple[tuple[str, Any, Any], ...] = (
    ("spectral.circulant_norm", _circulant_norm, _refuse),
    ("spectral.circulant_product", _circulant_product, _refuse_large),
    ("spectral.circulant_sum", _circulant_sum, _refuse_large),
)
"""``(op, run, refuse)``."""
