"""Renyi privacy as printed: the sampled Gaussian at integer orders, and GReDP's corollary 2.

    RDP(alpha) = log( sum_j C(alpha, j) (1-q)^(alpha-j) q^j exp((j^2 - j) / (2 z^2)) ) / (alpha - 1)
    epsilon    = min over alpha of  T RDP(alpha) + log(1 / delta) / (alpha - 1)

Certificates use ``dpkern.accounting``, which takes real orders and a tighter conversion.

Sources: Mironov, Talwar and Zhang, Renyi Differential Privacy of the Sampled Gaussian Mechanism,
2019; GReDP, definition 3, proposition 1, corollary 2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...base.errors import InvalidInput
from ...base.validate import choice, integer, open_unit, positive, probability

ORDERS = (*range(2, 257), 300, 400, 512, 800, 1024, 2000)
"""Orders that the sources' accountants try; corollary 2 leaves them open."""

PRINTED_CONSTANT = 1.24
"""Corollary 2 prints 1.24 where the theorem it cites has 1.25."""

PLACEMENTS = ("text", "appendix")


class Renyi(NamedTuple):
    """``epsilon`` and the order that attains it."""

    epsilon: float
    order: int


def sampled_gaussian_rdp(rate: float, multiplier: float, order: int) -> float:
    """RDP of one Poisson-sampled Gaussian release at an integer order.

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
    """log C(n, j) for j = 0 .. n."""
    whole = math.lgamma(n + 1)
    return np.array([whole - math.lgamma(j + 1) - math.lgamma(n - j + 1) for j in range(n + 1)])


def rdp_epsilon(
    rate: float, multiplier: float, steps: int, delta: float, orders: Sequence[int] = ORDERS
) -> Renyi:
    """The smallest epsilon over the orders, by the plain conversion.

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
    """The smallest multiplier, rounded up by at most 1e-6 of it, whose epsilon is not above.

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
    """(alpha, rdp)-RDP is ``(rdp + log(1 / delta) / (alpha - 1), delta)``-DP (proposition 1).

    Raises:
        InvalidInput: an order of at most 1, or no delta.
    """
    positive(remedy="Pass an order above 1.", order=order - 1)
    return rdp + math.log(1 / open_unit(delta=delta)) / (order - 1)


def corollary2_sigma(rdp: float, order: float, delta: float, *, placement: str = "text") -> float:
    """GReDP's corollary 2: the multiplier whose training it calls ``(alpha, rdp)``-RDP per batch.

    With ``e = rdp + log(1 / delta) / (alpha - 1)``: ``text`` prints ``sqrt(2 log(1.24 / delta) /
    e)``, ``appendix`` ``sqrt(2 log(1.24 / delta)) / e``. It reads proposition 1 backwards, from DP
    to RDP, which no theorem allows.

    Raises:
        InvalidInput: a number out of its range.
    """
    choice(PLACEMENTS, placement=placement)
    epsilon = convert(positive(rdp=rdp), order, delta)
    root = 2 * math.log(PRINTED_CONSTANT / delta)
    return math.sqrt(root / epsilon) if placement == "text" else math.sqrt(root) / epsilon


def corollary2_epsilon(
    rdp: float, order: float, delta: float, *, epochs: int, dataset_size: int, batch_size: int
) -> float:
    """Corollary 2's total: ``(epochs N / B) rdp + log(1 / delta) / (alpha - 1)``, unamplified.

    Raises:
        InvalidInput: a number out of its range.
    """
    integer(1, epochs=epochs)
    integer(1, dataset_size=dataset_size)
    batches = epochs * dataset_size / integer(1, batch_size=batch_size)
    return convert(batches * positive(rdp=rdp), order, delta)
