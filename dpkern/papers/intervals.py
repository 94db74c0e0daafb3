"""Means of few seeds: Student's intervals and his test, without a statistics library."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

_TINY = 1e-300


class Interval(NamedTuple):
    """A mean and half the length of its two-sided 95 % interval; infinite for a single value."""

    mean: float
    half: float


def student_cdf(t: float, freedom: float) -> float:
    """Pr[T <= t] of Student's law with so many degrees of freedom.

    ``1 - I_x(f/2, 1/2) / 2`` for t > 0 with ``x = f / (f + t^2)``: the regularised incomplete beta
    function, by its continued fraction.
    """
    tail = _beta(freedom / (freedom + t * t), freedom / 2, 0.5) / 2
    return 1 - tail if t > 0 else tail


def student_quantile(probability: float, freedom: float) -> float:
    """The t whose ``student_cdf`` is ``probability``, by bisection."""
    low, high = -1e6, 1e6
    for _ in range(100):
        middle = (low + high) / 2
        if student_cdf(middle, freedom) < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def interval(values: Sequence[float]) -> Interval:
    """Mean and half its 95 % interval; NaN where there is no value."""
    count = len(values)
    if count == 0:
        return Interval(math.nan, math.nan)
    mean = statistics.fmean(values)
    if count == 1:
        return Interval(mean, math.inf)
    error = statistics.stdev(values) / math.sqrt(count)
    return Interval(mean, student_quantile(0.975, count - 1) * error if error else 0.0)


def paired_test(first: Sequence[float], second: Sequence[float]) -> float:
    """Two-sided probability, under equal means, of a difference as large as this one: paired t.

    1 for a single pair, or where nothing differs.
    """
    differences = [a - b for a, b in zip(first, second, strict=True)]
    if len(differences) < 2 or not any(differences):
        return 1.0
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    if not error:
        return 0.0
    t = statistics.fmean(differences) / error
    return 2 * student_cdf(-abs(t), len(differences) - 1)


def _beta(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function, by Lentz's continued fraction."""
    if x <= 0 or x >= 1:
        return min(max(x, 0.0), 1.0)
    if x > (a + 1) / (a + b + 2):
        return 1 - _beta(1 - x, b, a)
    scale = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    front = math.exp(scale + a * math.log(x) + b * math.log1p(-x)) / a
    c, d = 1.0, 1 / _away(1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, 300):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            c, d = _away(1 + term / c), 1 / _away(1 + term * d)
            value *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return front * value


def _away(value: float) -> float:
    """From zero, by which is divided."""
    return value if abs(value) > _TINY else _TINY
