"""Compare means of few seeds: Student's intervals and his paired test."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from ..base.validate import require


class Interval(NamedTuple):
    """A mean and half the length of its two-sided 95 % interval; infinite for a single value."""

    mean: float
    half: float


def interval(values: Sequence[float]) -> Interval:
    """Return the mean and half its 95 % interval; NaN where there is no value."""
    count = len(values)
    if count == 0:
        return Interval(math.nan, math.nan)
    mean = statistics.fmean(values)
    if count == 1:
        return Interval(mean, math.inf)
    error = statistics.stdev(values) / math.sqrt(count)
    quantile = float(require("scipy.special").stdtrit(count - 1, 0.975))
    return Interval(mean, quantile * error)


def paired_test(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the two-sided probability of so large a difference under equal means: paired t.

    It is 1 for a single pair, or where nothing differs.
    """
    differences = [a - b for a, b in zip(first, second, strict=True)]
    if len(differences) < 2 or not any(differences):
        return 1.0
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    if not error:
        return 0.0
    t = statistics.fmean(differences) / error
    return 2 * float(require("scipy.special").stdtr(len(differences) - 1, -abs(t)))
