"""Renyi privacy as printed: the sampled Gaussian at integer orders.

    RDP(alpha) = log( sum_j C(alpha, j) (1-q)^(alpha-j) q^j exp((j^2 - j) / (2 z^2)) ) / (alpha - 1)
    epsilon    = min over alpha of  T RDP(alpha) + log(1 / delta) / (alpha - 1)

Certificates use ``dpkern.accounting``, which takes real orders and a tighter conversion.

Sources: Mironov, Talwar and Zhang, Renyi Differential Privacy of the Sampled Gaussian Mechanism,
2019; GReDP, definition 3, proposition 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...base.errors import InvalidInput
from ...base.validate import integer, open_unit, positive, probability

ORDERS = (*range(2, 257), 300, 400, 512, 800, 1024, 2000)
"""Orders that the sources' accountants try."""


class Renyi(NamedTuple):
    """The ``epsilon`` and the order that attains it."""

    epsilon: float
    order: int


def sampled_gaussian_rdp(rate: float, multiplier: float, order: int) -> float:
    """Return RDP of one Poisson-sampled Gaussian release at an integer order.

    Raises:
        InvalidInput: a number out of its range.
    """
    q, alpha = probability(rate=rate), integer(2, order=order)
    scale = 2 * positive(multiplier=multiplier) ** 2
    if q == 1:
        return alpha / scale
    j = np.arange(alpha + 1)
    logs = _log_binomials(alpha) + (alpha - j) * math.log1p(-q) + j * math.log(q)
    logs += (j * j - j) / scale
    top = float(logs.max())
    return (top + math.log(float(np.exp(logs - top).sum()))) / (alpha - 1)


@lru_cache(maxsize=512)
def _log_binomials(n: int) -> NDArray[np.float64]:
    """Return log C(n, j) for j = 0 .. n."""
    whole = math.lgamma(n + 1)
    return np.array([whole - math.lgamma(j + 1) - math.lgamma(n - j + 1) for j in range(n + 1)])


def rdp_epsilon(
    rate: float, multiplier: float, steps: int, delta: float, orders: Sequence[int] = ORDERS
) -> Renyi:
    """Return the smallest epsilon over the orders, by the plain conversion.

    Raises:
        InvalidInput: a number out of its range, or no order.
    """
    integer(0, steps=steps)
    if not orders:
        raise InvalidInput(
            "orders", expected="at least one order", got=orders, remedy="Pass integers >= 2."
        )
    return min(
        Renyi(convert(steps * sampled_gaussian_rdp(rate, multiplier, a), a, delta), a)
        for a in orders
    )


def rdp_multiplier(rate: float, steps: int, epsilon: float, delta: float) -> float:
    """Return the smallest multiplier, rounded up by at most 1e-6, whose epsilon is not above.

    Raises:
        InvalidInput: a number out of its range, or an epsilon that no multiplier below 2^20 meets.
    """
    target = positive(epsilon=epsilon)
    low, high = 2.0**-6, 2.0**-5
    while rdp_epsilon(rate, high, steps, delta).epsilon > target:
        low, high = high, 2 * high
        if high > 2.0**20:
            raise InvalidInput(
                "epsilon",
                expected="an epsilon that integer orders up to 2000 can show",
                got=epsilon,
                remedy="Raise epsilon or delta.",
            )
    while high > low * (1 + 1e-6):
        middle = math.sqrt(low * high)
        meets = rdp_epsilon(rate, middle, steps, delta).epsilon <= target
        low, high = (low, middle) if meets else (middle, high)
    return high


def convert(rdp: float, order: float, delta: float) -> float:
    """Convert (alpha, rdp)-RDP to epsilon ``rdp + log(1 / delta) / (alpha - 1)`` (proposition 1).

    Raises:
        InvalidInput: an order of at most 1, or no delta.
    """
    positive(remedy="Pass an order above 1.", order=order - 1)
    return rdp + math.log(1 / open_unit(delta=delta)) / (order - 1)
