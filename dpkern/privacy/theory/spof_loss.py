"""The polynomial that stands for an autoencoder's cross-entropy, as printed and as it should be.

For a target x in [0, 1] and the logit z of its reconstruction, around the point a:

    (6)   L = x log(1 + e^-z) + (1 - x) log(1 + e^z)
    (9)   f1'' = x e^a / (1 + e^a)^2,   f2'' = -(1 - x) e^-a / (1 + e^-a)^2   the sign is wrong
    (11)  x log(1 + e^-a) + (1 - x) log(1 + e^a) + (s(a) - x) (z - a)
              + (2x - 1) / (2 + e^a + e^-a) (z - a)^2                       the 1/2 is lost
    (12)  log 2 + (1/2 - x) z + (x/2 - 1/4) z^2                             at a = 0
    Taylor's quadratic coefficient is s(a) (1 - s(a)) / 2, 1/8 at a = 0, whatever x is.

With (12) the quadratic coefficient is -1/2 times the linear one: the only stationary point is
z = 1 for every x, and for x < 1/2 the loss has no lower bound.

Source: SPOF, equations (6)-(12), (31), proposition 1, appendix D.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple

import torch
from torch.nn.functional import softplus

from ...base.validate import choice, integer, non_negative, positive

FORMS = ("printed", "taylor")
REWRITINGS = ("printed", "correct", "direct")

THIRD = 1 / (6 * math.sqrt(3))
"""The largest third derivative of log(1 + e^z)."""

FOURTH = 1 / 8
"""The largest fourth derivative of log(1 + e^z), at 0."""


class Derivatives(NamedTuple):
    """``f1 = x log(1 + e^-a)``, ``f2 = (1 - x) log(1 + e^a)`` and two derivatives of each."""

    f1: torch.Tensor
    f2: torch.Tensor
    first1: torch.Tensor
    first2: torch.Tensor
    second1: torch.Tensor
    second2: torch.Tensor


class Coefficients(NamedTuple):
    """alpha_1, alpha_2, alpha_3: factors of 1, z - a and (z - a)^2, each of the targets' shape."""

    constant: torch.Tensor
    linear: torch.Tensor
    quadratic: torch.Tensor


def sigmoid(a: float) -> float:
    """``1 / (1 + e^-a)`` of a number."""
    if a < 0:
        return math.exp(a) / (1 + math.exp(a))
    return 1 / (1 + math.exp(-a))


def log1p_exp(a: float) -> float:
    """``log(1 + e^a)`` of a number."""
    return max(a, 0.0) + math.log1p(math.exp(-abs(a)))


def cross_entropy(z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``x log(1 + e^-z) + (1 - x) log(1 + e^z)`` (4), (6), entry by entry."""
    return x * softplus(-z) + (1 - x) * softplus(z)


def derivatives(x: torch.Tensor, a: float = 0.0, *, form: str = "printed") -> Derivatives:
    """What stands before (9); in the form "taylor" f2'' has its right sign.

    Raises:
        InvalidInput: an unknown form.
    """
    sign = -1 if choice(FORMS, form=form) == "printed" else 1
    up, down = sigmoid(a), sigmoid(-a)
    return Derivatives(
        f1=x * log1p_exp(-a),
        f2=(1 - x) * log1p_exp(a),
        first1=-x * down,
        first2=(1 - x) * up,
        second1=x * (up * down),
        second2=sign * (1 - x) * (up * down),
    )


def coefficients(x: torch.Tensor, a: float = 0.0, *, form: str = "printed") -> Coefficients:
    """(11), at a = 0 (12): without Taylor's 1/2 and with the wrong sign; or Taylor's polynomial.

    Raises:
        InvalidInput: an unknown form.
    """
    d = derivatives(x, a, form=form)
    half = 1.0 if form == "printed" else 0.5
    return Coefficients(
        constant=d.f1 + d.f2, linear=d.first1 + d.first2, quadratic=half * (d.second1 + d.second2)
    )


def polynomial(alpha: Coefficients, z: torch.Tensor, a: float = 0.0) -> torch.Tensor:
    """``alpha_1 + alpha_2 (z - a) + alpha_3 (z - a)^2``, entry by entry."""
    step = z - a
    return alpha.constant + alpha.linear * step + alpha.quadratic * step**2


def stationary_point(alpha: Coefficients, a: float = 0.0) -> torch.Tensor:
    """``a - alpha_2 / (2 alpha_3)``; NaN where both coefficients are 0 (printed, x = 1/2).

    At a = 0 it is 1 for (12) whatever x is, and ``4 (x - 1/2)`` for Taylor's polynomial.
    """
    return a - alpha.linear / (2 * alpha.quadratic)


def unbounded_below(alpha: Coefficients) -> torch.Tensor:
    """Where the polynomial has no minimum: for (12) exactly where x < 1/2, for Taylor's nowhere."""
    flat = alpha.quadratic == 0
    return (alpha.quadratic < 0) | (flat & (alpha.linear != 0))


def taylor_error_bound_published(derivative_bound: float, delta: float) -> float:
    """``2 G (e^d - 1 - d - d^2 / 2)``, proposition 1 (10), where G bounds |f^(r)| for all r >= 3.

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
    """``min(d^3 / (36 sqrt(3)), d^4 / 192)``, for Taylor's polynomial at a = 0 and |z| <= d.

    The fourth-order form holds since the third derivative is 0 at 0.

    Raises:
        InvalidInput: a number out of its range.
    """
    d = non_negative(delta=delta)
    return min(d**3 * THIRD / 6, d**4 * FOURTH / 24)


def taylor_error(delta: float) -> float:
    """``|log cosh(d / 2) - d^2 / 8|``: the largest error of Taylor's polynomial over |z| <= d.

    Raises:
        InvalidInput: a number out of its range.
    """
    half = non_negative(delta=delta) / 2
    return abs(half + math.log1p(math.exp(-2 * half)) - math.log(2) - half * half / 2)


def softplus_derivative(order: int) -> Fraction:
    """The derivative of log(1 + e^z) at 0, exactly: 1/4, -1/8, 1/4, -17/16, ... at 2, 4, 6, 8, ...

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


def shift(hidden: torch.Tensor, constant: float) -> torch.Tensor:
    """The scalar ``c_j = c sum_r h_jr`` that a constant c on the decoder adds to every logit.

    Args:
        hidden: codes ``[..., l]`` in (0, 1).

    Raises:
        InvalidInput: a negative constant.
    """
    return non_negative(constant=constant) * hidden.sum(-1)


def stabilised(
    alpha: Coefficients,
    z: torch.Tensor,
    shift: torch.Tensor | float,
    *,
    rewriting: str = "direct",
) -> torch.Tensor:
    """The polynomial at z + c_j (a = 0), summed over the features: step 3 of algorithm 1.

        direct   sum alpha_1 + alpha_2 (z + c) + alpha_3 (z + c)^2
        correct  sum alpha_1 + c alpha_2 + c^2 alpha_3 + (alpha_2 + 2 c alpha_3) z + alpha_3 z^2
        printed  sum alpha_1 + c^2 alpha_3 + alpha_2 (1 + 2 c) z + alpha_3 z^2              (31)

    For (12) the factor in front of z is alpha_2 (1 - c), not alpha_2 (1 + 2 c). The terms without
    z depend on the encoder through c.

    Args:
        alpha: coefficients ``[..., n]`` at a = 0.
        z: logits ``[..., n]``.
        shift: c_j, ``[...]`` or one number.

    Raises:
        InvalidInput: an unknown rewriting.
    """
    choice(REWRITINGS, rewriting=rewriting)
    c = shift.unsqueeze(-1) if isinstance(shift, torch.Tensor) else shift
    if rewriting == "direct":
        return polynomial(alpha, z + c).sum(-1)
    free = alpha.constant + c**2 * alpha.quadratic
    if rewriting == "printed":
        linear = alpha.linear * (1 + 2 * c)
    else:
        free = free + c * alpha.linear
        linear = alpha.linear + 2 * c * alpha.quadratic
    return (free + linear * z + alpha.quadratic * z**2).sum(-1)
