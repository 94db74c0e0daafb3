"""Run block-circulant layers on the CPU: products, norms at one position, and weighted sums."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
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
    between: Double[Tensor, "L L"],
    error: float,
) -> Double[Tensor, "squares: B"]:
    """Return the sum over lags u and v of ``A_x(u) between(u, v) A_g(v)``, from above.

    ``A(u) = sum_j sum_a z[j, a] z[j, a + u mod d]`` for the blocks z of an operand.

    Args:
        x, g: input and output gradient blocks.
        between: what joins the lags 0 .. d / 2.
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


@lru_cache(maxsize=64)
def _between(block: int, band: Band | None) -> tuple[NDArray[np.float64], float]:
    """Return what joins the lags, and the sum of what its entries are made of.

    ``sum_k (w_k Gamma_k^2 / d) P_x(k) P_g(k)`` with the powers ``P(k) = sum_u m_u A(u) cos(2 pi k u
    / d)``, m = 1 for the lags 0 and d / 2 and 2 for all others, which stand for two. Without a
    filter that is ``sum_u m_u A_x(u) A_g(u)``.
    """
    lags = np.arange(block // 2 + 1)
    counts = np.where((lags == 0) | (2 * lags == block), 1.0, 2.0)
    if band is None:
        return np.diag(counts), float(counts.sum())
    cosines = np.cos(2 * np.pi * (np.outer(lags, lags) % block) / block) * counts
    weights = weights_of(block, band).numpy()
    between = cosines.T @ (weights[:, None] * cosines)
    return between, float(weights.sum() * counts.sum() ** 2)


@torch.no_grad()
def _circulant_norm(x: Tensor, g: Tensor, *, band: Band | None = None) -> Tensor:
    if not (x.numel() and g.numel()):
        return x.new_zeros(len(x), dtype=torch.float64)
    between, entries = _between(x.shape[3], band)
    terms = (x.shape[2] + g.shape[2]) * x.shape[3] + 4 * len(between) + 16
    error = terms * 2.0**-53 * entries
    return circulant_squares(x[:, 0], g[:, 0], torch.from_numpy(between), error)


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
