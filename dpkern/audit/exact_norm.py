"""Compute norms of tensors without rounding: every float is an integer times a power of 2."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..base.errors import InvalidInput
from ..base.validate import choice

_PIECE = 1 << 20
_HALF = 27
_ROW = 256
"""Maximum of products of 27-bit halves whose sum fits into int64."""


def power_sum(values: Tensor, p: int) -> Fraction:
    """Return ``sum |v|^p``, exactly.

    Args:
        values: tensor of any shape; integers, or finite floats of at most 64 bits.
        p: 1 or 2.

    Raises:
        InvalidInput: another p, or an entry that is not finite.
    """
    choice((1, 2), p=p)
    total = Fraction(0)
    for piece in torch.split(values.detach().cpu().flatten(), _PIECE):
        if not piece.dtype.is_floating_point:
            total += _of_integers(piece.to(torch.int64), p)
            continue
        if not bool(torch.isfinite(piece).all()):
            raise InvalidInput(
                "values",
                expected="finite entries",
                got="NaN or infinity",
                remedy="Replace NaN and infinities first; such a tensor has no norm.",
            )
        total += _of_floats(piece.double().numpy(), p)
    return total


def _of_integers(piece: Tensor, p: int) -> int:
    largest = (
        max((abs(int(v)) for v in (piece.amin(), piece.amax())), default=0) if len(piece) else 0
    )
    if largest < 1 << (2 * _HALF):
        return _sum(piece.abs().numpy(), p)
    return sum(abs(v) ** p for v in piece.tolist())


def _of_floats(values: NDArray[Any], p: int) -> Fraction:
    mantissas, exponents = np.frexp(np.abs(values))
    total = Fraction(0)
    for exponent in np.unique(exponents):
        whole = (mantissas[exponents == exponent] * 2.0**53).astype(np.int64)
        total += _sum(whole, p) * Fraction(2) ** (p * (int(exponent) - 53))
    return total


def _sum(magnitudes: NDArray[np.int64], p: int) -> int:
    """Return ``sum m^p`` of 0 <= m < 2^54 by halves m = a 2^27 + b."""
    high, low = magnitudes >> _HALF, magnitudes & ((1 << _HALF) - 1)
    if p == 1:
        return (int(high.sum()) << _HALF) + int(low.sum())
    squares, crossed, rest = (_by_rows(x) for x in (high * high, high * low, low * low))
    return (squares << (2 * _HALF)) + (crossed << (_HALF + 1)) + rest


def _by_rows(values: NDArray[np.int64]) -> int:
    return (
        sum(np.add.reduceat(values, np.arange(0, len(values), _ROW)).tolist()) if len(values) else 0
    )
