"""Compute the printed optimum of directional noise, and what is wrong with it.

Minimise ``sum |w_i| s_i`` over standard deviations with ``sum Delta_i^2 / s_i^2 <= tau`` for every
``||Delta|| <= alpha``. For one Delta:

    (11)  s_i = (2 lambda Delta_i^2 / |w_i|)^(1/3)
    (12)  lambda = ( 3 tau / (c1 sum (Delta_i |w_i|)^(2/3)) )^(-3/2),   c1 = 3 / 2^(2/3)
    (13)  Delta_i = alpha |w_i| / ||w||_2                 printed as the worst Delta

The worst Delta is ``alpha sqrt(|w_i| / ||w||_1)``, for which s is constant: the optimum is
isotropic whatever w is. With (13) the noise grows with |w_i|, and in the direction of the smallest
s the constraint is violated by ``kappa^2 = alpha^2 / (tau min s^2)``.

Source: directional noise for DP-SGD, equations (8)-(13).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

C1 = 3 / 2 ** (2 / 3)
"""The constant of (12), which is not printed: ``2^(1/3) + 2^(-2/3)``."""

Array = NDArray[np.float64]


def printed_delta(w: ArrayLike, alpha: float) -> Array:
    """Return ``alpha |w| / ||w||_2`` (13)."""
    size = np.abs(np.asarray(w, dtype=np.float64))
    found: Array = alpha * size / np.linalg.norm(size)
    return found


def worst_delta(w: ArrayLike, alpha: float) -> Array:
    """Return ``alpha sqrt(|w| / ||w||_1)``, which maximises ``sum (Delta_i |w_i|)^(2/3)``."""
    size = np.abs(np.asarray(w, dtype=np.float64))
    found: Array = alpha * np.sqrt(size / size.sum())
    return found


def multiplier(w: ArrayLike, delta: ArrayLike, tau: float) -> float:
    """Return lambda (12)."""
    size = np.abs(np.asarray(w, dtype=np.float64))
    total = np.sum((np.asarray(delta) * size) ** (2 / 3))
    return float((3 * tau / (C1 * total)) ** -1.5)


def sigma(w: ArrayLike, delta: ArrayLike, tau: float) -> Array:
    """Return the standard deviations (11) that are optimal against one Delta."""
    size = np.abs(np.asarray(w, dtype=np.float64))
    factor = 2 * multiplier(size, delta, tau)
    found: Array = np.cbrt(factor * np.asarray(delta, dtype=np.float64) ** 2 / size)
    return found


def printed_sigma(w: ArrayLike, alpha: float, tau: float) -> Array:
    """Return (11) with (13): ``alpha / sqrt(tau) |w|^(1/3) (sum |w|^(4/3))^(1/2) / ||w||_2``."""
    return sigma(w, printed_delta(w, alpha), tau)


def kappa(sigma: ArrayLike, alpha: float, tau: float) -> float:
    """Return ``alpha / (sqrt(tau) min sigma)``: 1 if the constraint holds in every direction."""
    return alpha / math.sqrt(tau) / float(np.min(np.asarray(sigma)))


def objective(w: ArrayLike, sigma: ArrayLike) -> float:
    """Return ``sum |w_i| sigma_i``."""
    return float(np.sum(np.abs(np.asarray(w)) * np.asarray(sigma)))
