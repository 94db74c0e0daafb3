"""Sensitivities and Laplace scales of perturbed polynomial losses, as printed and as they are.

n features in [0, 1], one record replaced; c is the shift of the stabilisation constant.

    (22), (23)  Dbar = 2 sum_i max (|1/2 - x| + |x/2 - 1/4|) = 3n/2
    (32)        Dhat = Dbar + n c (c/2 + 2)
    step 5      Laplace noise of scale Dhat / (sqrt(2) epsilon) on alpha_2 and on alpha_3
    (24)-(27)   D_SGD = n where ||grad||_2 < C, else 2 n C;   b n with environmental noise

What is perturbed are alpha_2 and alpha_3: adding c to a logit afterwards is post-processing, and
Dbar is enough for every c. Dhat, b and the branch of D_SGD depend on the private record.

Source: SPOF, equations (14)-(27), (32), (33), propositions 2 and 3.
"""

from __future__ import annotations

import math
from typing import TypeVar

import torch

from ...base.validate import choice, integer, non_negative, positive
from .spof_loss import FORMS

STATEMENTS = ("step", "variance")
OUTPUT_GRADIENTS = ("at_a", "polynomial", "exact")

Shift = TypeVar("Shift", float, torch.Tensor)


def coefficient_sensitivity(n: int, *, form: str = "printed") -> float:
    """Return Dbar (22)-(23): the exact l1 sensitivity of all (alpha_2, alpha_3) at a = 0.

    3n/2 for (12). n for Taylor's polynomial, whose quadratic coefficient depends on no record.

    Raises:
        InvalidInput: n below 1, or an unknown form.
    """
    return integer(1, n=n) * (1.5 if choice(FORMS, form=form) == "printed" else 1.0)


def summed_query_sensitivity(n: int) -> float:
    """Return n/2, of the n numbers alpha_2 + alpha_3 of which proposition 2's proof speaks.

    Raises:
        InvalidInput: n below 1.
    """
    return integer(1, n=n) / 2


def stabilised_sensitivity(n: int, shift: Shift) -> Shift:
    """Return Dhat (32), proposition 3: ``3n/2 + n c (c/2 + 2)``.

    Args:
        shift: c_j, one number or one per record. It comes from the private record; the public
            bound is constant times code length.

    Raises:
        InvalidInput: n below 1.
    """
    return coefficient_sensitivity(n) + n * shift * (shift / 2 + 2)


def spof_scale(n: int, epsilon: float, shift: Shift, *, statement: str = "step") -> Shift:
    """Return the noise of step 5 on alpha_2 and alpha_3: ``Dhat / (sqrt(2) epsilon)``.

    A Laplace variable is split into two of half its variance. Its scale Dhat / epsilon has the
    variance 2 (Dhat / epsilon)^2 and gives step 5; the text says (Dhat / epsilon)^2, which would
    give ``Dhat / (2 epsilon)`` (statement "variance"). Nor is the sum of two Laplace variables one.

    Raises:
        InvalidInput: a number out of its range, or an unknown statement.
    """
    split = math.sqrt(2) if choice(STATEMENTS, statement=statement) == "step" else 2.0
    return stabilised_sensitivity(n, shift) / (split * positive(epsilon=epsilon))


def fm_scale(n: int, epsilon: float, *, joint: bool = False) -> float:
    """Return the functional mechanism's scale, or ``(3n/2) / epsilon`` if joint.

    It is that of step 5 without constant.

    Only the joint scale, the classic functional mechanism's, gives (alpha_2, alpha_3) epsilon.

    Raises:
        InvalidInput: a number out of its range.
    """
    return coefficient_scale(n, epsilon) if joint else spof_scale(n, epsilon, 0.0)


def coefficient_scale(n: int, epsilon: float, *, form: str = "printed") -> float:
    """Return ``Dbar / epsilon``, which one release of a record's coefficients needs.

    It holds for every shift.

    It protects the record as target only, not as input of the encoder.

    Raises:
        InvalidInput: a number out of its range, or an unknown form.
    """
    return coefficient_sensitivity(n, form=form) / positive(epsilon=epsilon)


def local_scale(n: int, epsilon: float) -> float:
    """Return ``n / epsilon``: release the record once; all that follows is post-processing.

    Raises:
        InvalidInput: a number out of its range.
    """
    return integer(1, n=n) / positive(epsilon=epsilon)


def audited_factor(shift: float) -> float:
    """Return ``sqrt(2) (3n/2) / Dhat``, how many epsilon one visit's coefficients really cost.

    As if Dhat were a public number, and for the record as target only.

    Raises:
        InvalidInput: a negative shift.
    """
    dbar = coefficient_sensitivity(1)
    return math.sqrt(2) * dbar / stabilised_sensitivity(1, non_negative(shift=shift))


def audited_epsilon(epsilon: float, shift: float, *, visits: int = 1) -> float:
    """Return ``audited_factor`` times epsilon, for each visit with fresh noise.

    Raises:
        InvalidInput: a number out of its range.
    """
    return integer(0, visits=visits) * positive(epsilon=epsilon) * audited_factor(shift)


def log_ratio(
    y: torch.Tensor, mean: float, scale: float, other_mean: float, other_scale: float
) -> torch.Tensor:
    """Return the log of the density of Laplace(mean, scale) at y over that of the other.

    At most |mean - other_mean| / scale for equal scales; without bound in y for different ones, so
    that a scale which depends on the record gives no pure epsilon at all.

    Raises:
        InvalidInput: a scale that is not positive.
    """
    positive(scale=scale)
    positive(other_scale=other_scale)
    far = (y - other_mean).abs() / other_scale - (y - mean).abs() / scale
    return far + math.log(other_scale / scale)


def sgd_sensitivity(
    n: int, clip: float, norm: torch.Tensor, total: torch.Tensor | float = 1.0
) -> torch.Tensor:
    """Return D_SGD (24)-(27) at a = 0: ``b_j n`` where the norm is below C, else ``2 n C``.

    It switches on the private record's own norm, so it is no sensitivity.

    Args:
        norm: ||grad||_2 of each record.
        total: b_j of each record; 1 without environmental noise, as printed.

    Raises:
        InvalidInput: a number out of its range.
    """
    integer(1, n=n)
    clipped = torch.full_like(norm, 2 * n * positive(clip=clip))
    return torch.where(norm < clip, total * n * torch.ones_like(norm), clipped)


def sgd_bound(
    n: int, clip: float, *, output_gradient: str = "at_a", environmental: bool = False
) -> float:
    """Return a constant l1 sensitivity of the clipped gradient with respect to the n outputs.

        at_a        s(a) - x:            min(n, 2 C sqrt(n))
        exact       s(z) - x:            min(2 n, 2 C sqrt(n)), since z depends on the record too
        polynomial  alpha_2 + 2 alpha_3 z has no bound before clipping:  2 C sqrt(n)

    Clipping is a projection and lengthens no difference. With environmental noise the gradient
    carries b_j, and what clipping gives remains.

    Raises:
        InvalidInput: a number out of its range, or an unknown gradient.
    """
    clipped = 2 * positive(clip=clip) * math.sqrt(integer(1, n=n))
    choice(OUTPUT_GRADIENTS, output_gradient=output_gradient)
    if output_gradient == "polynomial" or environmental:
        return clipped
    return min(n if output_gradient == "at_a" else 2 * n, clipped)
