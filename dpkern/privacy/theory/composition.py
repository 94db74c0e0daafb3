"""Composition and amplification as (epsilon, delta) formulas, each beside its exact form.

References: Dwork, Rothblum and Vadhan, Boosting and Differential Privacy, 2010; lecture notes on
private projected SGD (which drop the second term of advanced composition and simplify
amplification); Bun and Steinke, Concentrated Differential Privacy, 2016.
"""

from __future__ import annotations

import math

from ...base.validate import half_open_unit, integer, open_unit, positive, probability

Budget = tuple[float, float]
"""(epsilon, delta)."""

SIMPLIFIED_UP_TO = 1.2564312086261697
"""The positive root of ``exp(x) - 1 = 2 x``: where the simplified amplification still holds."""


def basic(epsilon: float, delta: float, count: int) -> Budget:
    """Return the sums of ``count`` releases at (epsilon, delta) each.

    Raises:
        InvalidInput: a number out of its range.
    """
    integer(0, count=count)
    positive(epsilon=epsilon)
    half_open_unit(delta=delta)
    return count * epsilon, count * delta


def advanced(
    epsilon: float, delta: float, count: int, slack: float, *, second_term: bool = True
) -> Budget:
    """Return ``epsilon sqrt(2 k log(1 / slack)) + k epsilon (e^epsilon - 1)``, ``k delta + slack``.

    Args:
        epsilon: of one release.
        delta: of one release.
        count: how many releases, k.
        slack: the additional delta'.
        second_term: False drops the second term, as the lecture notes do; that is no theorem.

    Raises:
        InvalidInput: a number out of its range.
    """
    integer(0, count=count)
    positive(epsilon=epsilon)
    half_open_unit(delta=delta)
    leading = epsilon * math.sqrt(2 * count * math.log(1 / open_unit(slack=slack)))
    second = count * epsilon * math.expm1(epsilon) if second_term else 0.0
    return leading + second, count * delta + slack


def amplified(epsilon: float, delta: float, rate: float) -> Budget:
    """Return ``(log(1 + r (e^epsilon - 1)), r delta)`` for a uniform subset of a share ``rate``.

    Raises:
        InvalidInput: a number out of its range.
    """
    positive(epsilon=epsilon)
    half_open_unit(delta=delta)
    probability(rate=rate)
    return math.log1p(rate * math.expm1(epsilon)), rate * delta


def amplified_simplified(epsilon: float, delta: float, rate: float) -> Budget:
    """Return ``(2 r epsilon, r delta)``: above the exact form only up to ``SIMPLIFIED_UP_TO``.

    Raises:
        InvalidInput: a number out of its range.
    """
    positive(epsilon=epsilon)
    half_open_unit(delta=delta)
    probability(rate=rate)
    return 2 * rate * epsilon, rate * delta


def zcdp_epsilon(rho: float, delta: float) -> float:
    """Return ``rho + 2 sqrt(rho log(1 / delta))``, of rho-zero-concentrated privacy.

    Raises:
        InvalidInput: a number out of its range.
    """
    return positive(rho=rho) + 2 * math.sqrt(rho * math.log(1 / open_unit(delta=delta)))
