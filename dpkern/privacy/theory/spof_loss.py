"""The polynomial for an autoencoder's cross-entropy, as printed and as it should be.

For a target x in [0, 1] and the logit z of its reconstruction, around the point a:

    (6)   L = x log(1 + e^-z) + (1 - x) log(1 + e^z)
    (9)   f1'' = x e^a / (1 + e^a)^2,   f2'' = -(1 - x) e^-a / (1 + e^-a)^2   the sign is wrong
    (11)  x log(1 + e^-a) + (1 - x) log(1 + e^a) + (s(a) - x) (z - a)
              + (2x - 1) / (2 + e^a + e^-a) (z - a)^2                       the 1/2 is lost
    (12)  log 2 + (1/2 - x) z + (x/2 - 1/4) z^2                             at a = 0
    Taylor's quadratic coefficient is s(a) (1 - s(a)) / 2, 1/8 at a = 0, whatever x is.

Source: SPOF, equations (6)-(12), (31), proposition 1, appendix D.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch.nn.functional import softplus

from ...base.validate import choice, non_negative

FORMS = ("printed", "taylor")
REWRITINGS = ("printed", "correct", "direct")


class Derivatives(NamedTuple):
    """The losses ``f1 = x log(1 + e^-a)``, ``f2 = (1 - x) log(1 + e^a)``, and derivatives."""

    f1: torch.Tensor
    f2: torch.Tensor
    first1: torch.Tensor
    first2: torch.Tensor
    second1: torch.Tensor
    second2: torch.Tensor


class TaylorCoefficients(NamedTuple):
    """The factors alpha_1, alpha_2, alpha_3 of 1, z - a, (z - a)^2, of the targets' shape."""

    constant: torch.Tensor
    linear: torch.Tensor
    quadratic: torch.Tensor


def sigmoid(a: float) -> float:
    """Return ``1 / (1 + e^-a)`` of a number."""
    if a < 0:
        return math.exp(a) / (1 + math.exp(a))
    return 1 / (1 + math.exp(-a))


def log1p_exp(a: float) -> float:
    """Return ``log(1 + e^a)`` of a number."""
    return max(a, 0.0) + math.log1p(math.exp(-abs(a)))


def cross_entropy(z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return ``x log(1 + e^-z) + (1 - x) log(1 + e^z)`` (4), (6), entry by entry."""
    return x * softplus(-z) + (1 - x) * softplus(z)


def derivatives(x: torch.Tensor, a: float = 0.0, *, form: str = "printed") -> Derivatives:
    """Return the terms before (9); in the form "taylor" f2'' has its right sign.

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


def coefficients(x: torch.Tensor, a: float = 0.0, *, form: str = "printed") -> TaylorCoefficients:
    """Return (11), at a = 0 (12): without Taylor's 1/2 and with the wrong sign; or Taylor's.

    Raises:
        InvalidInput: an unknown form.
    """
    d = derivatives(x, a, form=form)
    half = 1.0 if form == "printed" else 0.5
    return TaylorCoefficients(
        constant=d.f1 + d.f2, linear=d.first1 + d.first2, quadratic=half * (d.second1 + d.second2)
    )


def polynomial(alpha: TaylorCoefficients, z: torch.Tensor, a: float = 0.0) -> torch.Tensor:
    """Return ``alpha_1 + alpha_2 (z - a) + alpha_3 (z - a)^2``, entry by entry."""
    step = z - a
    return alpha.constant + alpha.linear * step + alpha.quadratic * step**2


def shift(hidden: torch.Tensor, constant: float) -> torch.Tensor:
    """Return the ``c_j = c sum_r h_jr`` that a constant c on the decoder adds to every logit.

    Args:
        hidden: codes ``[..., l]`` in (0, 1).

    Raises:
        InvalidInput: a negative constant.
    """
    return non_negative(constant=constant) * hidden.sum(-1)


def stabilised(
    alpha: TaylorCoefficients,
    z: torch.Tensor,
    shift: torch.Tensor | float,
    *,
    rewriting: str = "direct",
) -> torch.Tensor:
    """Return the polynomial at z + c_j (a = 0), summed over features: step 3 of algorithm 1.

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
