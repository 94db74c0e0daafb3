"""The noise budget of the directional mechanism: a Markov bound on the privacy loss.

Gaussian noise of variances s_i^2 on a difference Delta loses a normal variable of mean m/2 and
variance m, ``m = sum Delta_i^2 / s_i^2``, in each of k releases. With the moment of order beta,

    P(loss > epsilon) < delta   if   m <= tau = 2 (epsilon + log(delta) / beta) / (k (1 + beta)).

beta is any positive integer in print; the real one that maximises tau is
``beta* = (L + sqrt(L^2 + epsilon L)) / epsilon`` with ``L = log(1 / delta)``, which makes
``alpha / sqrt(tau)`` exactly the bound of zero-concentrated privacy with rho = k tau / 2.

Reference: directional noise for DP-SGD, equations (6)-(8).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ...base.errors import InvalidInput
from ...base.validate import choice, integer, positive

ORDERS = ("integer", "real")


class Budget(NamedTuple):
    """The bound ``tau`` on ``sum Delta_i^2 / s_i^2`` of one release, and the order ``beta`` of it.

    A per-coordinate standard deviation of ``alpha / sqrt(tau)`` spends it in every direction.
    """

    tau: float
    beta: float


def tau(epsilon: float, delta: float, count: int, order: str = "integer") -> Budget:
    """Return the largest tau for ``count`` releases, over integer or real orders.

    Args:
        epsilon: of all releases together.
        delta: of all together; positive. The printed sampling rule divides it by the sampling
            rate and may pass 1, where every order is feasible and the bound says nothing.
        count: number of releases, k.
        order: ``integer``, as printed, or ``real``.

    Raises:
        InvalidInput: a number out of its range, or delta >= 1.
    """
    positive(epsilon=epsilon)
    integer(1, count=count)
    choice(ORDERS, order=order)
    if not positive(delta=delta) < 1:
        raise InvalidInput(
            "delta",
            expected="a number below 1",
            got=delta,
            remedy="Lower delta: the sampling rule divides it by the sampling rate.",
        )
    tail = math.log(1 / delta)
    best = (tail + math.sqrt(tail * tail + epsilon * tail)) / epsilon
    if order == "real":
        return Budget(_tau(epsilon, tail, count, best), best)
    # tau rises up to beta* and falls after it.
    orders = (max(1, math.floor(best)), math.ceil(best))
    return max(Budget(_tau(epsilon, tail, count, beta), float(beta)) for beta in orders)


def _tau(epsilon: float, tail: float, count: int, beta: float) -> float:
    return 2 * (epsilon - tail / beta) / (count * (1 + beta))
