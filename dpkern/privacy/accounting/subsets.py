"""Account for batches of fixed size: one release from a uniform subset, a record replaced.

``gamma`` is batch size / dataset size, and ``H_a(P | Q) = sup over events E of P(E) - a Q(E)``. Let
``H`` bound ``H_a`` for releases of one batch in which one record differs: for noise on sums of
contributions of norm at most ``C`` that is the pair of laws ``2 C`` apart. Then the release from a
random subset obeys, in both directions,

    H_a <= h(a) = gamma H(1 + (a - 1) / gamma)          for a >= 1
    H_a <= h(a) = 1 - a + a h(1 / a)                    for a < 1

*Proof.* Draw the other records' part first: ``b - 1`` of them, and one more, ``j``, that stands in
the batch unless the differing record ``x`` (``y`` in the neighbour) does. Given that draw, the laws
are ``(1 - gamma) J + gamma X`` and ``(1 - gamma) J + gamma Y``, where ``J``, ``X``, ``Y`` are
releases of batches in which one record differs, so any two of them obey ``H``. ``H_a`` is convex in
the pair, so a draw that is the same on both sides may be fixed. With ``a' = 1 + (a - 1) / gamma``
and ``c = a / a'``, for ``a >= 1`` and every event

    (1-gamma) J + gamma X - a ((1-gamma) J + gamma Y) = gamma (X - a' ((1 - c) J + c Y))

which is at most ``gamma ((1 - c) H(a') + c H(a')) = h(a)``. The second line is the first with the
two sides exchanged. ∎ (Advanced joint convexity: Balle, Barthe, Gaboardi 2018.)

``h`` is convex, falls from 1 and is at least ``1 - a``: the privacy profile of a pair of laws. At
``a = 1`` the slope jumps up because ``2 Q(P > Q) + H(1) <= 1`` for laws that mirror each other.
Such a pair dominates the step, and products of dominating pairs dominate adaptive compositions
(Zhu, Dong, Wang 2022). No smaller pair does: ``J = Y`` at the far end attains ``h`` for ``a >= 1``,
``J = X`` for ``a < 1``. Neither of these two alone may be composed in place of ``h``, because
neither dominates the other (Lebeda, Regehr, Kamath, Steinke 2024); nor may the pair of a Poisson
sample, which has ``J`` in the middle and is below ``h``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base.validate import require
from .events import LAPLACE_EVENT, dp_accounting

Floats = NDArray[np.float64]

_FURTHEST = 10.4
"""Standard deviations: beyond them is less than 1.3e-25, which counts as an infinite loss."""

_IN_PARTS = 50_000


def unsampled_profile(kind: str, distance: float, epsilons: Floats) -> Floats:
    """Return ``H`` at ``a = e^epsilon >= 1`` of two laws ``distance`` scales apart.

    Gaussian (Balle, Wang 2018): ``Phi(m/2 - epsilon/m) - e^epsilon Phi(-m/2 - epsilon/m)``;
    Laplace: ``1 - e^((epsilon - m) / 2)`` up to ``epsilon = m``; ``m`` is the distance.
    """
    if kind == LAPLACE_EVENT:
        return -np.expm1(np.minimum((epsilons - distance) / 2, 0.0))
    special = require("scipy.special")
    there = special.ndtr(distance / 2 - epsilons / distance)
    here = np.exp(epsilons + special.log_ndtr(-distance / 2 - epsilons / distance))
    return np.asarray(np.clip(there - here, 0.0, 1.0))


def profile(kind: str, distance: float, fraction: float, epsilons: Floats) -> Floats:
    """Return ``h(e^epsilon)``, delta of one release from a subset with ``fraction`` of all records.

    Args:
        kind: event of the noise, Gaussian or Laplace.
        distance: how far replacing a record moves the sum, in units of the noise scale.
        fraction: gamma, in (0, 1).
        epsilons: of any sign.
    """
    size = np.abs(epsilons)
    near = np.log1p(np.expm1(np.minimum(size, 1.0)) / fraction)
    far = size - math.log(fraction) + np.log1p((fraction - 1) * np.exp(-np.maximum(size, 1.0)))
    above = fraction * unsampled_profile(kind, distance, np.where(size < 1, near, far))
    below = -np.expm1(-size) + np.exp(-size) * above
    return np.asarray(np.clip(np.where(epsilons < 0, below, above), 0.0, 1.0))


def largest_loss(kind: str, distance: float, fraction: float) -> float:
    """Return the epsilon beyond which nothing is left, or less than 1.3e-25."""
    most = distance
    if kind != LAPLACE_EVENT:
        most = distance * distance / 2 + _FURTHEST * distance
    return float(np.logaddexp(math.log1p(-fraction), math.log(fraction) + most))


def distribution(kind: str, distance: float, fraction: float, interval: float) -> Any:
    """Return the privacy loss distribution of ``h``, losses rounded up to multiples of a grid.

    The dots of ``h`` are connected (Doroshenko and others 2022): between two points of the grid the
    result's profile is the chord, which is never below a convex function.
    """
    pld = require("dp_accounting.pld.pld_pmf")
    losses = require("dp_accounting.pld.privacy_loss_distribution")
    edge = math.ceil(largest_loss(kind, distance, fraction) / interval)
    grid = np.arange(-edge, edge + 1, dtype=np.float64) * interval
    deltas = profile(kind, distance, fraction, grid)
    return losses.PrivacyLossDistribution(
        pld.create_pmf_pessimistic_connect_dots_fixed_gap(interval, -edge, edge, deltas)
    )


def self_composed(once: Any, count: int) -> Any:
    """Compose ``once`` ``count`` times; a long composition is one of shorter ones.

    Upstream cuts a result by Chernoff's bound at orders of at least one over the number of points
    of what is composed: far too large for many small losses, whose result would be tens of millions
    of points wide. The first part has enough points for the second.
    """
    if count < _IN_PARTS:
        return once.self_compose(count)
    part = math.isqrt(count)
    parts, rest = divmod(count, part)
    whole = once.self_compose(part).self_compose(parts)
    return whole.compose(once.self_compose(rest)) if rest else whole


def accountant(neighbouring: Any, interval: float) -> Any:
    """Return a ``PLDAccountant`` that also takes Gaussian and Laplace releases from subsets.

    Args:
        neighbouring: ``REPLACE_ONE``, or ``REPLACE_SPECIAL`` where multipliers are by the distance
            that replacing a record moves a sum.
        interval: of the grid of losses.
    """
    accounting = dp_accounting()
    replaced = neighbouring == accounting.NeighboringRelation.REPLACE_ONE

    class SubsetAccountant(accounting.pld.PLDAccountant):  # type: ignore[misc, name-defined]
        _pld: Any

        def _maybe_compose(self, event: Any, count: int, do_compose: bool) -> Any:
            if not isinstance(event, accounting.SampledWithoutReplacementDpEvent):
                return super()._maybe_compose(event, count, do_compose)
            if do_compose:
                once = distribution(
                    type(event.event).__name__,
                    (2.0 if replaced else 1.0) / event.event.noise_multiplier,
                    event.sample_size / event.source_dataset_size,
                    interval,
                )
                self._pld = self._pld.compose(self_composed(once, count))
            return None

    return SubsetAccountant(neighbouring, interval)
