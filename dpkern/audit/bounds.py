"""Compute lower bounds on mu and epsilon from a test's counts, valid with a stated confidence.

With k events in n runs the rate is at most the Clopper-Pearson bound

    p_upper = BetaInv(1 - alpha; k + 1, n - k)

From upper bounds a of the false positive and b of the false negative rate follow

    mu      >= Phi^-1(1 - a) - Phi^-1(b)
    epsilon >= log max((1 - b - delta) / a, (1 - a - delta) / b)

Sources: Clopper and Pearson 1934; Kairouz, Oh and Viswanath 2015, theorem 2.1 (epsilon); Nasr et
al., Tight auditing of differentially private machine learning, 2023, equation 4 (mu).
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.validate import require

NORMAL = NormalDist()

Rates = NDArray[np.float64]


def rate_upper(events: Any, runs: int, alpha: float) -> Rates:
    """Return upper bounds of rates, each wrong with probability at most ``alpha``.

    Args:
        events: counts ``[...]``, 0 <= events <= runs; expected counts may be fractions.
    """
    special = require("scipy.special")
    k = np.asarray(events, dtype=np.float64)
    inner = np.minimum(k, runs - 0.5)  # where every run is an event the bound is 1
    found = special.betaincinv(inner + 1, runs - inner, 1 - alpha)
    return np.where(k >= runs, 1.0, found)


def mu_lower(fpr_upper: float, fnr_upper: float) -> float:
    """Return a lower bound of mu, at least 0."""
    if fpr_upper + fnr_upper >= 1:
        return 0.0
    return -NORMAL.inv_cdf(fpr_upper) - NORMAL.inv_cdf(fnr_upper)


def epsilon_lower(fpr_upper: float, fnr_upper: float, delta: float) -> float:
    """Return a lower bound of epsilon at ``delta``, at least 0."""
    ratios = ((1 - fnr_upper - delta) / fpr_upper, (1 - fpr_upper - delta) / fnr_upper)
    return max(0.0, math.log(max(*ratios, 1.0)))
