"""Expand AdLM's M logistic losses to second order at 0: the polynomial loss.

    sum_l [ log 2 + (1/2 - y_l) s_l + s_l^2 / 8 ],      s_l = hbar . W_l

Its coefficients can be seen in two ways (``label_coefficients``, ``feature_coefficients``), which
agree without noise. Noise is added to them, never to the loss.

Source: AdLM, (23)-(25), line 27 of algorithm 1 in its appendix's form. Line 27 prints the power
outside the bracket, ``(phi W)^R``; the second line of (24) prints a minus that makes the loss
unbounded below.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..base.validate import tensor
from ..ops.coef.label_powers import FLOATS as FLOATS
from ..ops.coef.label_powers import PowerCoefficients as PowerCoefficients
from ..ops.coef.label_powers import label_coefficients as label_coefficients

FORMS = ("label_scalar", "feature_expanded")


def cross_entropy(scores: Tensor, targets: Tensor) -> Tensor:
    """Return ``sum_l y softplus(-s) + (1 - y) softplus(s)``, ``[B]``: (23), (24) with a plus.

    Args:
        scores: ``[B, M]``.
        targets: ``[B, M]``, 0 or 1, or unbiased estimates of these.

    Raises:
        InvalidInput: shapes that do not fit.
    """
    _alike(scores, targets)
    return (targets * F.softplus(-scores) + (1 - targets) * F.softplus(scores)).sum(1)


def feature_coefficients(hidden: Tensor, targets: Tensor) -> PowerCoefficients:
    """Return ``(1/2 - y) hbar_e`` and ``hbar_e hbar_g / 8``: the form of lemma 5.

    They depend on the current network, and gradients pass through ``hidden``.

    Args:
        hidden: ``[B, H]``.
        targets: ``[B, M]``.

    Raises:
        InvalidInput: shapes that do not fit.
    """
    tensor(targets=targets, shape=(None, None), dtypes=FLOATS)
    tensor(hidden=hidden, shape=(len(targets), None), dtypes=FLOATS)
    linear = (0.5 - targets)[:, :, None] * hidden[:, None, :]
    square = hidden[:, None, :, None] * hidden[:, None, None, :] / 8
    return PowerCoefficients(
        math.log(2), linear, square.expand(-1, targets.shape[1], -1, -1).contiguous()
    )


def label_scalar(scores: Tensor, coefficients: PowerCoefficients) -> Tensor:
    """Return ``sum_l phi0 + phi1 s + phi2 s^2``, ``[B]``, for scores ``[B, M]``.

    Raises:
        InvalidInput: shapes that do not fit.
    """
    constant, linear, quadratic = coefficients
    _alike(scores, linear)
    _alike(scores, quadratic)
    return (constant + linear * scores + quadratic * scores.square()).sum(1)


def feature_expanded(weight: Tensor, coefficients: PowerCoefficients) -> Tensor:
    """Return ``sum_l phi0 + phi1 .

    W_l + W_l . phi2 W_l``, ``[B]``, for weights ``[M, H]``.

    Raises:
        InvalidInput: shapes that do not fit.
    """
    constant, linear, quadratic = coefficients
    tensor(weight=weight, shape=(None, None), dtypes=FLOATS)
    classes, width = weight.shape
    tensor(linear=linear, shape=(None, classes, width), dtypes=FLOATS)
    tensor(quadratic=quadratic, shape=(len(linear), classes, width, width), dtypes=FLOATS)
    first = torch.einsum("bmh,mh->b", linear, weight)
    second = torch.einsum("bmhg,mh,mg->b", quadratic, weight, weight)
    return classes * constant + first + second


def _alike(scores: Tensor, other: Tensor) -> None:
    tensor(scores=scores, shape=(None, None), dtypes=FLOATS)
    tensor(targets=other, shape=scores.shape, dtypes=FLOATS, device=scores.device)
