"""Rounding bounds of the references: squared norms that never under-report (``docs/ghost.md``)."""

from __future__ import annotations

import torch

FLOATS = (torch.float32, torch.float64)
"""The dtypes of gradients and sums."""
OPERANDS = (*FLOATS, torch.bfloat16, torch.float16)
"""The dtypes of the layer inputs and output gradients of linear layers and convolutions."""
_UNIT = 2.0**-53  # of float64, in which the references compute norms


def of_sums(dtype: torch.dtype) -> torch.dtype:
    """The dtype of gradients, factors and sums of these operands."""
    return dtype if dtype in FLOATS else torch.float32


def gamma(terms: int) -> float:
    """``n u / (1 - n u)``: relative rounding error of a float64 sum of ``n`` terms, any order."""
    return terms * _UNIT / (1 - terms * _UNIT)


def squares(rows: torch.Tensor) -> torch.Tensor:
    """Sums of squares ``[B]`` of ``[B, m, n]`` in float64, rounded up."""
    exact = rows.double().square().sum(2).sum(1)
    return exact * (1 + gamma(rows.shape[1] + rows.shape[2] + 4))


def upper_square(computed: torch.Tensor, terms: int, absolute: torch.Tensor) -> torch.Tensor:
    """An upper bound of the squared norm of sums that were computed in float64.

    Args:
        computed: the sums ``[B, m, n]``, of at most ``terms`` products each.
        terms: see above.
        absolute: ``[B]``, a bound of the norm of the sums of absolute products.
    """
    norm = squares(computed).sqrt() + gamma(terms + 4) * absolute
    return norm.square() * (1 + gamma(8))
