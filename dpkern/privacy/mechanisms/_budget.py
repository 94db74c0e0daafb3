"""Derive noise from a budget over k steps by the printed rules of directional noise."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from ...base.errors import InvalidInput
from ...base.validate import integer, open_unit, positive, probability
from ..theory import markov, rdp


class Multipliers(NamedTuple):
    """The noise scale / clipping bound of the gradients and, if released, of the importance."""

    gradients: float
    importance: float | None


def derive(
    generator: str,
    *,
    epsilon: float | None,
    delta: float | None,
    steps: int | None,
    sample_rate: float | None,
    order: str,
    split: float,
    amplified: bool,
) -> Multipliers:
    """Derive the multipliers of the printed rules.

    Args:
        generator: ``gaussian`` spends the budget by Renyi accounting of the sampled Gaussian; the
            others by ``1 / sqrt(tau)``.
        epsilon: of all steps.
        delta: of all steps.
        steps: k.
        sample_rate: q.
        order: of tau, ``integer`` or ``real``.
        split: share of epsilon and delta that pays for the importance; 0: none is released.
        amplified: the gradients' share is divided by q.

    Raises:
        InvalidInput: a number missing or out of its range.
    """
    if epsilon is None or delta is None or steps is None or sample_rate is None:
        raise InvalidInput(
            "epsilon",
            expected="epsilon, delta, steps and sample_rate together",
            got=f"{epsilon}, {delta}, {steps}, {sample_rate}",
            remedy="Pass all four: the printed noise follows from them.",
        )
    positive(epsilon=epsilon)
    open_unit(delta=delta)
    k, q = integer(1, steps=steps), probability(sample_rate=sample_rate)
    if generator == "gaussian":
        return Multipliers(_by_renyi(q, k, epsilon, delta), None)

    def isotropic(share: float) -> float:
        return 1 / math.sqrt(markov.tau(share * epsilon, share * delta, k, order).tau)

    gradients = isotropic((1 - split) / (q if amplified else 1.0))
    return Multipliers(gradients, isotropic(split) if split else None)


@lru_cache
def _by_renyi(rate: float, steps: int, epsilon: float, delta: float) -> float:
    return rdp.rdp_multiplier(rate, steps, epsilon, delta)
