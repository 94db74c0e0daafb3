"""Bound the nats that an epsilon-private release can tell: the printed bound and a sharper one.

    printed    I(g; K(g)) <= epsilon (e^epsilon - 1) / 2
    sharper    KL(P || Q) <= epsilon tanh(epsilon / 2), attained by randomized response

Pure epsilon only: the Gaussian mechanism, for which it is printed, is (epsilon, delta)-private.
Both bound the Kullback-Leibler divergence of neighbouring outputs, so they bound the mutual
information only where all inputs of the mixture are neighbours.

Sources: directional noise for DP-SGD, theorem 2; Bun and Steinke, 2016, for the sharper form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...base.errors import InvalidInput
from ...base.validate import positive


def printed_bound(epsilon: float) -> float:
    """Return ``epsilon (e^epsilon - 1) / 2``, in nats.

    Raises:
        InvalidInput: epsilon is not positive.
    """
    return positive(epsilon=epsilon) * math.expm1(epsilon) / 2


def sharp_bound(epsilon: float) -> float:
    """Return ``epsilon tanh(epsilon / 2)``, in nats.

    Raises:
        InvalidInput: epsilon is not positive.
    """
    return positive(epsilon=epsilon) * math.tanh(epsilon / 2)


def kl(p: Sequence[float], q: Sequence[float]) -> float:
    """Return the Kullback-Leibler divergence of two finite laws in nats; may be infinite.

    It is infinite where only q is zero.

    Raises:
        InvalidInput: laws of different sizes.
    """
    if len(p) != len(q):
        raise InvalidInput(
            "q",
            expected=f"{len(p)} probabilities",
            got=str(len(q)),
            remedy="Pass two laws on one finite set.",
        )
    if any(a > 0 and b == 0 for a, b in zip(p, q, strict=True)):
        return math.inf
    return math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def mutual_information(prior: Sequence[float], channel: Sequence[Sequence[float]]) -> float:
    """Return ``sum_x prior(x) KL(channel_x || mixture)``, in nats.

    Raises:
        InvalidInput: not one row per input.
    """
    if len(prior) != len(channel):
        raise InvalidInput(
            "channel",
            expected=f"{len(prior)} rows, one per input",
            got=str(len(channel)),
            remedy="Pass one row per input: row x is the law of the output for input x.",
        )
    mixture = [
        math.fsum(weight * float(value) for weight, value in zip(prior, column, strict=True))
        for column in zip(*channel, strict=True)
    ]
    return math.fsum(w * kl(row, mixture) for w, row in zip(prior, channel, strict=True) if w > 0)
