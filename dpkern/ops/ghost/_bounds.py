"""Rounding bounds of the references: squared norms that never under-report (``docs/ghost.md``)."""

from __future__ import annotations

import math

import torch

FLOATS = (torch.float32, torch.float64)
"""The dtypes of gradients and sums."""
OPERANDS = (*FLOATS, torch.bfloat16, torch.float16)
"""The dtypes of the layer inputs and output gradients of linear layers and convolutions."""
_UNIT = 2.0**-53  # of float64, in which the references compute norms


def of_sums(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of gradients, factors and sums of these operands."""
    return dtype if dtype in FLOATS else torch.float32


def gamma(terms: int) -> float:
    """Return ``n u / (1 - n u)``, the relative rounding error of a float64 sum of ``n`` terms.

    The sum may run in any order.
    """
    return terms * _UNIT / (1 - terms * _UNIT)


_OTHER_ROUNDINGS = 4
"""Roundings of an entry beyond one per position, as ``csrc/cpu/exact.h`` counts them."""


def sum_error(
    dtype: torch.dtype, positions: int, entries: int, absolute: torch.Tensor
) -> torch.Tensor:
    """Bound the norm of the rounding error of gradients computed in ``dtype``.

    Args:
        dtype: dtype in which the sums over positions are computed.
        positions: number of terms of a sum.
        entries: number of entries of a gradient.
        absolute: ``[B]``, bounds of the norm of the sums of absolute products.
    """
    relative, most, tiny = sum_numbers(dtype, positions, entries)
    return torch.where(absolute < most, relative * absolute, math.inf) + tiny


def sum_numbers(dtype: torch.dtype, roundings: int, entries: int) -> tuple[float, float, float]:
    """Return a share of the absolute products, from where on nothing is known, and a constant.

    The bound of the rounding error is this share of the norm of the sums of absolute products, and
    this constant, which underflow can hide; where a chain of sums could overflow, it is infinite.
    """
    kind, roundings = torch.finfo(dtype), roundings + _OTHER_ROUNDINGS
    total = roundings * kind.eps / 2
    relative = 1.001 * total / (1 - total) if total < 0.5 else math.inf
    return relative, kind.max / 4, 2 * roundings * kind.smallest_normal * math.sqrt(entries)


def squares(rows: torch.Tensor) -> torch.Tensor:
    """Return sums of squares ``[B]`` of ``[B, m, n]`` in float64, rounded up."""
    exact = rows.double().square().sum(2).sum(1)
    return exact * (1 + gamma(rows.shape[1] + rows.shape[2] + 4))


def upper_square(computed: torch.Tensor, terms: int, absolute: torch.Tensor) -> torch.Tensor:
    """Return an upper bound of the squared norm of sums that were computed in float64.

    Args:
        computed: the sums ``[B, m, n]``, of at most ``terms`` products each.
        terms: see above.
        absolute: ``[B]``, a bound of the norm of the sums of absolute products.
    """
    norm = squares(computed).sqrt() + gamma(terms + 4) * absolute
    return norm.square() * (1 + gamma(8))


def integers(terms: torch.Tensor) -> torch.Tensor:
    """Return the integer parts of numbers below 2^31, int32."""
    return terms.to(torch.int32)
