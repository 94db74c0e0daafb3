"""Errors and minima of the polynomial that stands for the cross-entropy.

Taylor's remainder of log(1 + e^z) at 0 (proposition 1 claims another), and the stationary points
of the printed polynomial (12) and of Taylor's.

Source: SPOF, proposition 1 with equation (10), equation (12), appendix D.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch

from ...base.validate import integer, non_negative, positive
from ...privacy.theory.spof_loss import TaylorCoefficients

THIRD = 1 / (6 * math.sqrt(3))
"""The largest third derivative of log(1 + e^z)."""

FOURTH = 1 / 8
"""The largest fourth derivative of log(1 + e^z), at 0."""


def stationary_point(alpha: TaylorCoefficients, a: float = 0.0) -> torch.Tensor:
    """Return ``a - alpha_2 / (2 alpha_3)``; NaN if both are 0 (printed, x = 1/2).

    At a = 0 it is 1 for (12) whatever x is, and ``4 (x - 1/2)`` for Taylor's polynomial.
    """
    return a - alpha.linear / (2 * alpha.quadratic)


def unbounded_below(alpha: TaylorCoefficients) -> torch.Tensor:
    """Return where the polynomial has no minimum: (12) exactly where x < 1/2, Taylor's nowhere."""
    flat = alpha.quadratic == 0
    return (alpha.quadratic < 0) | (flat & (alpha.linear != 0))


def taylor_error_bound_published(derivative_bound: float, delta: float) -> float:
    """Return ``2 G (e^d - 1 - d - d^2 / 2)``, proposition 1 (10).

    G bounds |f^(r)| for all r >= 3.

    No finite G exists (``softplus_derivative``), and the bound is not about (12), which is no
    Taylor polynomial.

    Raises:
        InvalidInput: a number out of its range.
    """
    d = non_negative(delta=delta)
    bound = positive(derivative_bound=derivative_bound)
    if d > 1:
        return 2 * bound * (math.expm1(d) - d - d * d / 2)
    # The closed form would cancel: its first three terms are those that are subtracted.
    return 2 * bound * math.fsum(d**r / math.factorial(r) for r in range(3, 21))


def taylor_error_bound_corrected(delta: float) -> float:
    """Return ``min(d^3 / (36 sqrt(3)), d^4 / 192)``, Taylor's error at a = 0 and |z| <= d.

    The fourth-order form holds since the third derivative is 0 at 0.

    Raises:
        InvalidInput: a number out of its range.
    """
    d = non_negative(delta=delta)
    return min(d**3 * THIRD / 6, d**4 * FOURTH / 24)


def taylor_error(delta: float) -> float:
    """Return ``|log cosh(d / 2) - d^2 / 8|``, the largest error of Taylor's polynomial, |z| <= d.

    Raises:
        InvalidInput: a number out of its range.
    """
    half = non_negative(delta=delta) / 2
    return abs(half + math.log1p(math.exp(-2 * half)) - math.log(2) - half * half / 2)


def softplus_derivative(order: int) -> Fraction:
    """Return the derivative of log(1 + e^z) at 0, exactly.

    These are 1/4, -1/8, 1/4, -17/16, ... at 2, 4, 6, 8, ...

    They outgrow every bound (the series converges for |z| < pi only).

    Raises:
        InvalidInput: an order below 1.
    """
    integer(1, order=order)
    # Coefficients of the derivative as a polynomial in s = s(z), where s' = s - s^2.
    powers = [0, 1]
    for _ in range(order - 1):
        following = [0] * (len(powers) + 1)
        for k, factor in enumerate(powers):
            following[k] += k * factor
            following[k + 1] -= k * factor
        powers = following
    return sum((Fraction(factor, 2**k) for k, factor in enumerate(powers)), Fraction(0))
