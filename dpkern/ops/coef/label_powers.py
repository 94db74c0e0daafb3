"""Coefficients of a quadratic logistic loss that depend on the label only.

Reference: AdLM, (23)-(25), lines 18 and 19 of algorithm 1.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ...base.validate import tensor

FLOATS = (torch.float32, torch.float64)


class PowerCoefficients(NamedTuple):
    """The coefficients of the powers 0, 1 and 2, by record and class.

    Attributes:
        constant: log 2; without influence on gradients.
        linear: ``[B, M]``, or ``[B, M, H]`` with the hidden layer in it.
        quadratic: ``[B, M]``, or ``[B, M, H, H]``.
    """

    constant: float
    linear: Tensor
    quadratic: Tensor


def label_coefficients(targets: Tensor) -> PowerCoefficients:
    """Return ``1/2 - y`` and ``1/8``: functions of the label only, lines 18-19.

    Args:
        targets: ``[B, M]``, float32 or float64.

    Raises:
        InvalidInput: another shape or dtype.
    """
    tensor(targets=targets, shape=(None, None), dtypes=FLOATS)
    return PowerCoefficients(math.log(2), 0.5 - targets, torch.full_like(targets, 1 / 8))
