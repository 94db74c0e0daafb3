"""Sensitivities as curves over the expansion point a, as printed and as defined, and their minima.

Source: SPOF, equations (57), (58), and the text behind them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from ...base.validate import choice, positive
from ...privacy.theory.spof_loss import log1p_exp, sigmoid

CURVES = ("printed", "correct")


class Minimum(NamedTuple):
    """The smallest value of a curve, and its place."""

    at: float
    value: float


def spof_curve(a: float, *, form: str = "printed") -> float:
    """Return the sensitivity of one feature's three coefficients, expanded at a.

        (58)  log(1 + e^a) + 2 (log(1 + e^-a) / log(1 + e^a) + 2 e^a / (1 + e^a)^2 + s(a))
        (57)  2 max over x of |alpha_1| + |alpha_2| + |alpha_3|
                = 2 max(phi(a), phi(-a)),   phi(a) = log(1 + e^a) + s(a) + s(a) (1 - s(a))

    (58) makes a sum of logarithms a ratio, loses the factor 2 of the first, and counts
    (1 + x) e^a / (1 + e^a)^2 where the copies add up to 1. (57) is smallest exactly at a = 0.

    Raises:
        InvalidInput: an unknown form.
    """
    if choice(CURVES, form=form) == "correct":
        return 2 * max(_phi(a), _phi(-a))
    spread = 2 * sigmoid(a) * sigmoid(-a)
    return log1p_exp(a) + 2 * (log1p_exp(-a) / log1p_exp(a) + spread + sigmoid(a))


def sgd_curve(a: float, *, form: str = "printed") -> float:
    """Return D_SGD(1)(i), ``2 e^a / (1 + e^a)``.

    Twice the largest |s(a) - x| is ``2 max(s(a), s(-a))``.

    The other branch is the constant ``2 C``.

    Raises:
        InvalidInput: an unknown form.
    """
    if choice(CURVES, form=form) == "correct":
        return 2 * sigmoid(abs(a))
    return 2 * sigmoid(a)


def minimum(curve: Callable[[float], float], low: float, high: float) -> Minimum:
    """Return the smallest point of a curve with one valley in [low, high], by golden section.

    Raises:
        InvalidInput: an empty interval.
    """
    positive(length=high - low)
    golden = (math.sqrt(5) - 1) / 2
    left, right = high - golden * (high - low), low + golden * (high - low)
    at_left, at_right = curve(left), curve(right)
    for _ in range(80):
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - golden * (high - low)
            at_left = curve(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + golden * (high - low)
            at_right = curve(right)
    at = (low + high) / 2
    return Minimum(at, curve(at))


def _phi(a: float) -> float:
    return log1p_exp(a) + sigmoid(a) + sigmoid(a) * sigmoid(-a)
