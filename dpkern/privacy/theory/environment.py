"""Noise of the environment at the encoder's input, and the loss that is printed for it.

The encoder sees x + n_j with n_j ~ N(0, s^2 I); the target stays x. With v_r = n_j . W_(:,r):

    (34)  b_r = e^v_r / (1 + (e^v_r - 1) h_r),   b_r h_r = s(W^T (x + n_j))_r,   0 < b_r < 1 / h_r
    (36)  b = sum_r b_r
    (37)  t_i = sum_r (b - b_r) What_ri h_r
    (38)  zhat_i = b z_i - t_i
    (39)  n_j = 0:  b_r = 1, b = l, zhat = z
    (13)  alpha_1 + b alpha_2 (z - t/b) + b alpha_3 (z - t/b)^2

These identities are exact, except that (13) needs b^2 in front of alpha_3 (by the paper's own
(42)) to be the polynomial at zhat. Since b = l without noise, it does not become (12) there.

Reference: SPOF, equations (13), (34)-(42), theorem 1, proposition 4, appendix E.
"""

from __future__ import annotations

import torch

from ...base.validate import choice
from .spof_loss import TaylorCoefficients, polynomial
from .spof_sensitivity import coefficient_sensitivity, stabilised_sensitivity

POWERS = ("printed", "squared")


def multipliers(hidden: torch.Tensor, projected: torch.Tensor) -> torch.Tensor:
    """Return b_r (34) as ``1 / (e^-v (1 - h) + h)``, whose exponential may overflow harmlessly.

    Args:
        hidden: noiseless codes ``[..., l]`` in (0, 1); one that was rounded to 1 has lost what
            decides its multiplier.
        projected: v, ``[..., l]``: the environmental noise times the encoder.
    """
    return 1 / (torch.exp(-projected) * (1 - hidden) + hidden)


def offset(hidden: torch.Tensor, b: torch.Tensor, decoder: torch.Tensor) -> torch.Tensor:
    """Return t (37), ``[..., n]``.

    Args:
        hidden: noiseless codes ``[..., l]``.
        b: their multipliers ``[..., l]``.
        decoder: the user's block of What, ``[l, n]``.
    """
    return ((b.sum(-1, keepdim=True) - b) * hidden) @ decoder


def noisy_logits(z: torch.Tensor, total: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Return ``zhat = b z - t`` (38).

    Args:
        z: noiseless logits ``[..., n]``.
        total: b = sum of the multipliers (36), ``[...]``.
        offset: t, ``[..., n]``.
    """
    return total.unsqueeze(-1) * z - offset


def noisy_loss(
    alpha: TaylorCoefficients,
    z: torch.Tensor,
    total: torch.Tensor,
    offset: torch.Tensor,
    *,
    power: str = "printed",
) -> torch.Tensor:
    """Return (13) at a = 0, summed over features: ``b alpha_3``, or ``b^2 alpha_3`` if squared.

    Squared, it is the polynomial at zhat; ``corrected`` training evaluates that directly.

    Raises:
        InvalidInput: an unknown power.
    """
    b = total.unsqueeze(-1)
    quadratic = b if choice(POWERS, power=power) == "printed" else b**2
    noisy = TaylorCoefficients(alpha.constant, b * alpha.linear, quadratic * alpha.quadratic)
    return polynomial(noisy, z - offset / b).sum(-1)


def noisy_sensitivity(
    n: int, total: torch.Tensor, shift: torch.Tensor | float = 0.0
) -> torch.Tensor:
    """Return Dhat^[N] = ``b 3n/2 + n c (c/2 + 2)``, for Dhat in step 5; Dbar^[N] where c = 0.

    As printed: b belongs to the private record, and multiplying coefficient and noise by b
    changes nothing between them.

    Raises:
        InvalidInput: n below 1.
    """
    dbar = coefficient_sensitivity(n)
    extra = stabilised_sensitivity(n, torch.as_tensor(shift, dtype=total.dtype)) - dbar
    return total * dbar + extra
