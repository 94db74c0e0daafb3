"""Compute the least weighted distortion at a given rate by reverse water-filling.

    beta_i = w_i^2 exp(2 h(g_i)) / (2 pi e)         entropy power; w_i^2 var_i for a Gaussian
    D_i    = min(level, beta_i)
    R      = sum_i max(0, log(beta_i / level) / 2)
    D*(R)  = sum_i D_i

For independent g_i it bounds ``E sum w_i^2 (out_i - g_i)^2`` of every release with
``I(g; out) <= R`` from below, tightly for Gaussians. The paper describes the roles of level and
component reversed in words; its formulas are these.

Source: directional noise for DP-SGD, theorem 3 and lemma 4, equations (14)-(16).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ...base.errors import InvalidInput
from ...base.validate import positive


class Filling(NamedTuple):
    """Water level, distortion of every component, rate in nats."""

    level: float
    distortions: tuple[float, ...]
    rate: float

    @property
    def distortion(self) -> float:
        """The sum of the distortions over all components."""
        return math.fsum(self.distortions)


def gaussian_entropy(variance: float) -> float:
    """Return the differential entropy of a normal variable in nats.

    Raises:
        InvalidInput: the variance is not positive.
    """
    return (1 + math.log(2 * math.pi * positive(variance=variance))) / 2


def laplace_entropy(scale: float) -> float:
    """Return the differential entropy of Lap(scale) in nats.

    Raises:
        InvalidInput: the scale is not positive.
    """
    return 1 + math.log(2 * positive(scale=scale))


def uniform_entropy(width: float) -> float:
    """Return the differential entropy of a uniform variable on an interval in nats.

    Raises:
        InvalidInput: the width is not positive.
    """
    return math.log(positive(width=width))


def entropy_powers(weights: Sequence[float], entropies: Sequence[float]) -> tuple[float, ...]:
    """Return ``beta_i = w_i^2 exp(2 h_i) / (2 pi e)`` (15a).

    Raises:
        InvalidInput: not one entropy per weight.
    """
    if len(weights) != len(entropies):
        raise InvalidInput(
            "entropies",
            expected=f"{len(weights)} numbers, one per weight",
            got=str(len(entropies)),
            remedy="Give one entropy per component.",
        )
    unit = 2 * math.pi * math.e
    return tuple(w * w * math.exp(2 * h) / unit for w, h in zip(weights, entropies, strict=True))


def distortion_at(betas: Sequence[float], rate: float) -> Filling:
    """Return the least distortion at ``rate`` nats.

    Raises:
        InvalidInput: a negative rate, or entropy powers that are not positive.
    """
    if not (math.isfinite(rate) and rate >= 0):
        raise InvalidInput(
            "rate", expected="a number >= 0", got=rate, remedy="Pass a finite number of nats."
        )
    falling = _falling(betas)
    logs = 0.0
    for active, beta in enumerate(falling, start=1):
        logs += math.log(beta)
        level = math.exp((logs - 2 * rate) / active)
        if active == len(falling) or level >= falling[active]:
            break
    return _filling(betas, min(level, falling[0]))


def rate_at(betas: Sequence[float], distortion: float) -> Filling:
    """Return the least rate at which the distortion is at most ``distortion``.

    It is the inverse of ``distortion_at``.

    Raises:
        InvalidInput: a distortion that is not positive, or entropy powers that are not.
    """
    falling = _falling(betas)
    left = positive(distortion=distortion) - math.fsum(falling)
    if left >= 0:
        return _filling(betas, falling[0])
    rest = math.fsum(falling)
    for active, beta in enumerate(falling, start=1):
        rest -= beta
        level = (distortion - rest) / active
        if active == len(falling) or level >= falling[active]:
            break
    return _filling(betas, level)


def _falling(betas: Sequence[float]) -> list[float]:
    if not betas or not all(math.isfinite(beta) and beta > 0 for beta in betas):
        raise InvalidInput(
            "betas",
            expected="at least one positive number",
            got=betas,
            remedy="Leave components of weight 0 away: they cost nothing.",
        )
    return sorted(betas, reverse=True)


def _filling(betas: Sequence[float], level: float) -> Filling:
    rate = math.fsum(max(0.0, math.log(beta / level) / 2) for beta in betas)
    return Filling(level, tuple(min(level, beta) for beta in betas), rate)
