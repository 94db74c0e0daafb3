"""Compute hockey-stick divergences of finite laws, contraction of finite channels, local privacy.

    E_gamma(P || Q) = sum_i max(p_i - gamma q_i, 0)
    eta_gamma(M)    = max over inputs x, x' of E_gamma(M_x || M_x')
    M is epsilon-LDP  iff  eta_{exp(epsilon)}(M) = 0

Numbers may be floats or ``fractions.Fraction``; the latter stay exact.

Source: lecture notes on private projected SGD, subsampling and local differential privacy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import permutations
from typing import TypeVar

from ...base.errors import InvalidInput

Number = TypeVar("Number", float, Fraction)
_TOLERANCE = 1e-9


def hockey_stick(p: Sequence[Number], q: Sequence[Number], gamma: Number) -> Number:
    """Return ``sum max(p_i - gamma q_i, 0)`` of two laws on the same finite set.

    Raises:
        InvalidInput: laws of different sizes, no probabilities, or gamma < 1.
    """
    _channel([p, q])
    if not gamma >= 1:
        raise InvalidInput(
            "gamma", expected="a number >= 1", got=gamma, remedy="Pass exp(epsilon), epsilon >= 0."
        )
    return sum((max(a - gamma * b, a - a) for a, b in zip(p, q, strict=True)), p[0] - p[0])


def contraction(channel: Sequence[Sequence[Number]], gamma: Number) -> Number:
    """Return the largest hockey-stick divergence of two rows; row x is the law of M(x).

    Raises:
        InvalidInput: rows that are no laws on one finite set, or gamma < 1.
    """
    _channel(channel)
    return max(hockey_stick(p, q, gamma) for p, q in permutations(channel, 2))


def ldp_epsilon(channel: Sequence[Sequence[Number]]) -> float:
    """Return ``max over z, x, x' of log(M(z | x) / M(z | x'))``; may be infinite.

    It is infinite where a row excludes an output.

    Raises:
        InvalidInput: rows that are no laws on one finite set.
    """
    _channel(channel)
    excess = 0.0  # of the largest ratio over 1
    for column in zip(*channel, strict=True):
        low, high = min(column), max(column)
        if not high > 0:
            continue  # an output that never occurs tells nothing
        if not low > 0:
            return math.inf
        excess = max(excess, float((high - low) / low))
    return math.log1p(excess)


def _channel(rows: Sequence[Sequence[Number]]) -> None:
    sizes = {len(row) for row in rows}
    good = len(rows) >= 2 and len(sizes) == 1 and sizes != {0}
    good = good and all(min(row) >= 0 and abs(float(sum(row)) - 1) <= _TOLERANCE for row in rows)
    if not good:
        raise InvalidInput(
            "channel",
            expected="at least two rows of equal length, each of probabilities that sum to 1",
            got=rows,
            remedy="Pass probabilities by row: row x is the law of the output for input x.",
        )
