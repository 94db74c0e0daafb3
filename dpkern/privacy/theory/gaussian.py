"""The Gaussian mechanism: the textbook calibrations beside the exact trade-off.

    classic   s = S sqrt(2 log(c / delta)) / epsilon,   c = 1.25 (proved for epsilon < 1) or 1
    exact     delta = Phi(r/2 - e/r) - exp(e) Phi(-r/2 - e/r),   r = S / s = 1 / multiplier

References: Dwork and Roth, The Algorithmic Foundations of Differential Privacy, 2014, theorem A.1;
lecture notes on private projected SGD (c = 1); Balle and Wang, Improving the Gaussian Mechanism,
2018, theorem 8.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ...base.validate import open_unit, positive

CLASSIC = 1.25
"""The constant of the classic calibration; the lecture notes print 1."""


def classic_sigma(
    epsilon: float, delta: float, *, sensitivity: float = 1.0, constant: float = CLASSIC
) -> float:
    """Return the noise standard deviation that the classic theorem asks for.

    Raises:
        InvalidInput: a number out of its range.
    """
    positive(epsilon=epsilon)
    return classic_epsilon(1.0, delta, sensitivity=sensitivity, constant=constant) / epsilon


def classic_epsilon(
    sigma: float, delta: float, *, sensitivity: float = 1.0, constant: float = CLASSIC
) -> float:
    """Return ``sensitivity sqrt(2 log(constant / delta)) / sigma`` as printed; proved below 1.

    Raises:
        InvalidInput: a number out of its range.
    """
    positive(sigma=sigma)
    positive(sensitivity=sensitivity)
    positive(constant=constant)
    return sensitivity * math.sqrt(2 * math.log(constant / open_unit(delta=delta))) / sigma


def exact_delta(epsilon: float, multiplier: float) -> float:
    """Return the smallest delta for which noise of ``multiplier`` sensitivities is private.

    Args:
        epsilon: any finite number >= 0.
        multiplier: noise standard deviation / L2 sensitivity.

    Raises:
        InvalidInput: a multiplier that is not positive.
    """
    r = 1 / positive(multiplier=multiplier)
    lost = math.exp(_log_upper_tail(epsilon / r - r / 2))
    # exp(epsilon) may overflow where its product with the tail does not.
    kept = math.exp(epsilon + _log_upper_tail(epsilon / r + r / 2))
    return max(0.0, lost - kept)


def exact_epsilon(multiplier: float, delta: float) -> float:
    """Return the smallest epsilon of one release, to the last bits of a bisection.

    Raises:
        InvalidInput: a number out of its range.
    """
    open_unit(delta=delta)
    return _first(lambda epsilon: exact_delta(epsilon, multiplier) <= delta)


def exact_multiplier(epsilon: float, delta: float) -> float:
    """Return the smallest noise sd / sensitivity that is (epsilon, delta)-private.

    Raises:
        InvalidInput: a number out of its range.
    """
    positive(epsilon=epsilon)
    open_unit(delta=delta)
    return _first(lambda multiplier: multiplier > 0 and exact_delta(epsilon, multiplier) <= delta)


def _first(holds: Callable[[float], bool]) -> float:
    """Return the smallest x >= 0 for which a monotone condition holds, rounded up."""
    if holds(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while not holds(high):
        low, high = high, 2 * high
    while low < (middle := (low + high) / 2) < high:
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _log_upper_tail(x: float) -> float:
    """Return log P(N(0, 1) > x)."""
    if x < 25:
        return math.log(math.erfc(x / math.sqrt(2)) / 2)
    # Three terms of the asymptotic series: relative error below 15 / 25^6.
    series = 1 - x**-2 + 3 * x**-4
    return -x * x / 2 - math.log(x * math.sqrt(2 * math.pi)) + math.log(series)
