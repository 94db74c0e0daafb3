"""Valid upper bounds on epsilon for a list of elementary events, and what they must set aside.

Every number here is an upper bound by itself, so the smallest may be reported. ``dp_accounting``
does the arithmetic; this module keeps it away from the places where version 0.6.0 is not a bound:

* ``RdpAccountant(REPLACE_ONE)`` reads a multiplier as noise / sensitivity, ``PLDAccountant`` as
  noise / clip bound. Ours is the second, so RDP gets half of it; a probe notices when upstream
  changes (google/differential-privacy issue 378).
* Long self-compositions go through a fast Fourier transform whose rounding moves up to about
  ``1e-16`` of mass per composed step, either way. Ten times that, ``1e-15 T + 1e-14``, is taken
  from delta first.
* ``PLDAccountant`` composes a randomized response once, whatever its count: here it is composed
  response by response, and past ``_RESPONSES`` of them left to RDP.
* Renyi divergences near 0 are differences of rounded sums: ``1e-12`` per step is added.
* The noise laws are cut: see ``tails``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import numpy as np

from . import subsets
from .events import (
    GAUSSIAN_EVENT,
    LAPLACE_EVENT,
    NON_PRIVATE_EVENT,
    RANDOMIZED_RESPONSE_EVENT,
    ElementaryEvent,
    build,
    dp_accounting,
    gaussian,
    sampled_without_replacement,
    scaled,
)
from .tails import tail_delta, variation_cost

RELATIONS = ("add_remove", "zero_out", "replace_one")

FFT_MASS_PER_STEP = 1e-15
FFT_MASS_ONCE = 1e-14
RDP_SLACK_PER_STEP = 1e-12

_FIRST_GRID = 50.0
_REFINEMENT = 3.0
_MAX_REFINEMENTS = 3
_CONVERGED = 0.005
_MAX_POINTS = 2.0**19
_COARSEST = 0.5
_TOO_COARSE = 100.0
"""Upstream takes the exponential of an interval: beyond this a grid of losses says nothing."""
_RESPONSES = 256

Curve = Callable[[float], float]
"""delta -> the smallest epsilon that this accountant proves for it."""


def upper_bounds(
    leaves: Sequence[ElementaryEvent],
    relation: str,
    delta: float,
    dimension: int,
    variation: float = 0.0,
) -> dict[str, float]:
    """Return every bound that can be proved for the composition of ``leaves``, by accountant.

    Args:
        leaves: elementary events; none of them ``NonPrivateDpEvent``.
        relation: one of ``RELATIONS``.
        delta: the whole delta; reserves come out of it.
        dimension: an upper bound on the coordinates that one release adds noise to.
        variation: total variation distance of all outputs together from those of the events, under
            either neighbour: ``(1 + e^epsilon) variation`` comes out of delta.

    Returns:
        ``{accountant: epsilon}``; empty when no accountant takes these events, and without the
        dearer accountant when the other has proved 0. A plan, its run and its report ask for the
        same bounds: the last ones are kept.
    """
    return dict(_upper_bounds(tuple(leaves), relation, delta, dimension, variation))


@lru_cache(maxsize=512)
def _upper_bounds(
    leaves: tuple[ElementaryEvent, ...],
    relation: str,
    delta: float,
    dimension: int,
    variation: float,
) -> dict[str, float]:
    def tail(epsilon: float) -> float:
        cuts = math.fsum(tail_delta(leaf, relation, dimension, epsilon) for leaf in leaves)
        return cuts + variation_cost(epsilon) * variation if variation else cuts

    found: dict[str, float] = {}
    rdp, rdp_loosened = _rdp_form(leaves, relation)
    if rdp is not None:
        curve = _rdp_curve(rdp, relation)
        found[_label("RDP", rdp_loosened)] = _with_reserve(curve, delta, tail)
    if 0.0 in found.values():
        return found
    pld, pld_loosened = _pld_form(leaves, relation)
    if pld is not None:
        curve = _pld_curve(pld, relation, delta)
        found[_label("PLD", pld_loosened)] = _with_reserve(curve, delta, tail)
    if pld_loosened and rdp_loosened:
        split = _split_curve(leaves, relation, delta)
        if split is not None:
            found["PLD + RDP"] = _with_reserve(split, delta, tail)
    return found


def _label(accountant: str, loosened: bool) -> str:
    return f"{accountant} without amplification" if loosened else accountant


def _with_reserve(curve: Curve, delta: float, reserve: Callable[[float], float]) -> float:
    """Return the smallest epsilon found with ``curve``'s delta + ``reserve(epsilon)`` <= delta.

    The reserve grows with epsilon, up to a limit that may be below delta.
    """
    guess = curve(delta)
    for _ in range(8):
        left = delta - reserve(guess)
        if not left > 0:
            break
        epsilon = curve(left)
        # What is enough at the guess is enough below it.
        if epsilon <= guess:
            return epsilon
        guess = epsilon * (1 + 1e-9) + 1e-12 + (epsilon - guess) / 2
    left = delta - reserve(math.inf)
    return curve(left) if left > 0 else math.inf


def _neighbouring(relation: str) -> Any:
    names = {
        "add_remove": "ADD_OR_REMOVE_ONE",
        "zero_out": "REPLACE_SPECIAL",
        "replace_one": "REPLACE_ONE",
    }
    return dp_accounting().NeighboringRelation[names[relation]]


def _has_laplace(leaf: ElementaryEvent) -> bool:
    return leaf.kind == LAPLACE_EVENT or any(_has_laplace(part) for part in leaf.parts)


def _pld_relation(leaves: Sequence[ElementaryEvent], relation: str) -> str:
    """Return the relation that PLD takes.

    Replacing a record under Laplace noise is zeroing one out of twice the bound.
    """
    if relation == "replace_one" and any(_has_laplace(leaf) for leaf in leaves):
        return "zero_out"
    return relation


def _as_subset(leaf: ElementaryEvent, relation: str) -> bool:
    """Whether ``subsets`` has the loss of this leaf."""
    return (
        leaf.subset is not None
        and relation == "replace_one"
        and leaf.kind in (GAUSSIAN_EVENT, LAPLACE_EVENT)
    )


def _pld_form(
    leaves: Sequence[ElementaryEvent], relation: str
) -> tuple[list[ElementaryEvent] | None, bool]:
    """Return the leaves as PLD takes them, and whether some lost amplification by sampling."""
    used = _pld_relation(leaves, relation)
    probe = dp_accounting().pld.PLDAccountant(_neighbouring(used))
    form: list[ElementaryEvent] = []
    loosened = False
    for leaf in leaves:
        # Halving the multiplier is exact where laws twice the bound apart are compared: without
        # sampling and for subsets, but not for Poisson samples.
        halved = used != relation
        tight = not leaf.parts and not (halved and leaf.rate != 1)
        if tight and (_as_subset(leaf, relation) or probe.supports(build(leaf.spec()))):
            form.append(leaf)
            continue
        loosened = True
        for part in leaf.unsampled():
            if not probe.supports(build(part.spec())):
                return None, True
            form.append(part)
    if sum(leaf.count for leaf in form if leaf.kind == RANDOMIZED_RESPONSE_EVENT) > _RESPONSES:
        return None, True
    if used != relation:
        if any(leaf.kind not in (GAUSSIAN_EVENT, LAPLACE_EVENT) for leaf in form):
            return None, True
        form = [scaled(leaf, 0.5) for leaf in form]
    return form, loosened


def _pld_curve(form: Sequence[ElementaryEvent], relation: str, delta: float) -> Curve:
    """Compose on a grid and refine it until epsilon(delta) changes by less than half a per cent.

    All grids round the privacy loss pessimistically; the error of the last one is about an eighth
    of the last change. A grid has about 2^19 points at most.
    """
    used = _pld_relation(form, relation)
    convolved = sum(leaf.count for leaf in form if leaf.sampled or leaf.kind != GAUSSIAN_EVENT)
    reserve = FFT_MASS_ONCE * len(form) + FFT_MASS_PER_STEP * convolved
    radius = 2.0 if used == "replace_one" else 1.0
    scale = max(_epsilon_scale(form, used, delta), 0.01)
    # The composed loss is about normal with variance 2 scale: 17 deviations each way hold it.
    span = 2 * max(_largest_loss(leaf, radius) for leaf in form)
    span += min(4 * scale, 34 * math.sqrt(2 * scale))
    finest = span / _MAX_POINTS
    if finest > (_TOO_COARSE if convolved else _COARSEST):
        return _unsampled_curve(form, radius)
    interval = max(min(scale / (_FIRST_GRID * math.sqrt(max(convolved, 1))), _COARSEST), finest)

    def on_grid(interval: float) -> Curve:
        accountant = subsets.accountant(_neighbouring(used), interval)
        for leaf in form:
            event = build(leaf.spec())
            if leaf.kind == RANDOMIZED_RESPONSE_EVENT:
                for _ in range(leaf.count):
                    accountant.compose(event)
            else:
                accountant.compose(event, leaf.count)

        @cache
        def curve(target: float) -> float:
            if not target > reserve:
                return math.inf
            # Beyond epsilon = 700 a mass may underflow; upstream then answers infinity.
            with np.errstate(over="ignore"):
                return float(accountant.get_epsilon(target - reserve))

        return curve

    curve = on_grid(interval)
    now = curve(delta)
    for _ in range(_MAX_REFINEMENTS):
        if interval <= finest or now == math.inf:
            break
        before, interval = now, max(interval / _REFINEMENT, finest)
        curve = on_grid(interval)
        now = curve(delta)
        if before - now <= _CONVERGED * now + 1e-4:
            break
    return curve


def _unsampled_curve(form: Sequence[ElementaryEvent], radius: float) -> Curve:
    """Return the closed form for Gaussian releases of all records, a bound on sampled ones too."""
    if any(leaf.kind != GAUSSIAN_EVENT for leaf in form):
        return lambda _: math.inf
    mu = radius * math.sqrt(math.fsum(leaf.count / leaf.multiplier**2 for leaf in form))
    exact = dp_accounting().get_epsilon_gaussian
    # One part in 10^9 up: the root that is found is rounded.
    return lambda delta: float(exact(1 / mu, delta)) * (1 + 1e-9)


def _pure_epsilon(leaf: ElementaryEvent) -> float:
    """Return the pure epsilon of one unsampled Laplace or randomized-response release."""
    if leaf.kind == LAPLACE_EVENT:
        return 1 / leaf.multiplier
    values = dict(leaf.parameters)
    noise, buckets = values["noise_parameter"], values["num_buckets"]
    return math.log(buckets / noise - buckets + 1) if noise > 0 else math.inf


def _largest_loss(leaf: ElementaryEvent, radius: float) -> float:
    """Return the rough size of the largest privacy loss of one release; only sets the grid."""
    if leaf.kind == GAUSSIAN_EVENT:
        mu = radius / leaf.multiplier
        mu *= 1.0 if leaf.sampled else math.sqrt(leaf.count)
        loss = mu * mu / 2 + 11 * mu
    else:
        loss = _pure_epsilon(leaf)
    q = leaf.fraction
    return loss + math.log(q) if loss > 40 else math.log1p(q * math.expm1(loss))


def _epsilon_scale(form: Sequence[ElementaryEvent], relation: str, delta: float) -> float:
    """Return the rough size of epsilon by RDP and advanced composition; only sets the grid."""
    normal = [leaf for leaf in form if leaf.kind == GAUSSIAN_EVENT]
    # Poisson samples with the distance between replaced records stand for subsets: RDP is quick.
    halved = 0.5 if relation == "replace_one" else 1.0
    similar = [
        replace(scaled(leaf, halved), rate=leaf.fraction, subset=None)
        for leaf in normal
        if leaf.subset is not None
    ]
    others = [leaf for leaf in normal if leaf.subset is None]
    scale = 0.0
    for group, neighbours in ((others, relation), (similar, "add_remove")):
        rdp = _rdp_form(group, neighbours)[0] if group else None
        scale += _rdp_curve(rdp, neighbours)(delta) if rdp else 0.0
    for leaf in form:
        if leaf.kind != GAUSSIAN_EVENT:
            pure = _largest_loss(leaf, 1.0)
            advanced = pure * math.sqrt(2 * leaf.count * math.log(1 / delta))
            advanced += leaf.count * pure * math.expm1(min(pure, 40.0))
            scale += min(leaf.count * pure, advanced)
    return scale


@contextmanager
def _without_excluded_orders() -> Iterator[None]:
    """Hide warnings about orders whose series does not converge: upstream safely omits them."""
    logger = logging.getLogger("absl")

    def other(record: logging.LogRecord) -> bool:
        return "Excluding this order" not in record.getMessage()

    logger.addFilter(other)
    try:
        yield
    finally:
        logger.removeFilter(other)


@cache
def rdp_replace_one_factor(subset: bool = False) -> float:
    """Return the factor of RDP multipliers under replace-one: 1/2, or 1 once fixed upstream.

    Noise 1 and bound 1 give epsilon 9.997 exactly at delta = 1e-5 (sensitivity 2); an accountant
    that answers less has taken the sensitivity to be 1.
    """
    spec = gaussian(1.0)
    event = build(sampled_without_replacement(8, 8, spec) if subset else spec)
    accountant = dp_accounting().rdp.RdpAccountant(
        neighboring_relation=_neighbouring("replace_one")
    )
    epsilon = accountant.compose(event).get_epsilon(1e-5)
    return 0.5 if epsilon < 9.99 else 1.0


def _rdp_form(
    leaves: Sequence[ElementaryEvent], relation: str
) -> tuple[list[ElementaryEvent] | None, bool]:
    """Return the leaves as RDP takes them, and whether some lost amplification by sampling.

    Laplace releases have no place here: sampled ones are unsupported and the others are bounded
    better by their privacy loss distribution.
    """
    probe = dp_accounting().rdp.RdpAccountant(neighboring_relation=_neighbouring(relation))
    form: list[ElementaryEvent] = []
    loosened = False
    for leaf in leaves:
        tight = not leaf.parts and probe.supports(build(leaf.spec()))
        loosened |= not tight
        for part in (leaf,) if tight else leaf.unsampled():
            if part.kind not in (GAUSSIAN_EVENT, RANDOMIZED_RESPONSE_EVENT):
                return None, True
            if not probe.supports(build(part.spec())):
                return None, True
            if relation == "replace_one" and part.kind == GAUSSIAN_EVENT:
                part = scaled(part, rdp_replace_one_factor(part.subset is not None))
            form.append(part)
    return form, loosened


def _rdp_curve(form: Sequence[ElementaryEvent], relation: str) -> Curve:
    """Return the curve by RDP, which also sets the grid of PLD: the last ones are kept."""
    return _kept_rdp_curve(tuple(form), relation)


@lru_cache(maxsize=64)
def _kept_rdp_curve(form: tuple[ElementaryEvent, ...], relation: str) -> Curve:
    accounting = dp_accounting()
    accountant = accounting.rdp.RdpAccountant(neighboring_relation=_neighbouring(relation))
    with _without_excluded_orders():
        for leaf in form:
            accountant.compose(build(leaf.spec()), leaf.count)
    slack = RDP_SLACK_PER_STEP * sum(leaf.count for leaf in form)
    accountant.compose(accounting.ZCDpEvent(rho=0.0, xi=slack))
    return lambda delta: float(accountant.get_epsilon(delta))


def _split_curve(leaves: Sequence[ElementaryEvent], relation: str, delta: float) -> Curve | None:
    """Return the curve of PLD for the events that it takes, RDP for others, half of delta each."""
    ours = [leaf for leaf in leaves if not _pld_form([leaf], relation)[1]]
    others = [leaf for leaf in leaves if leaf not in ours]
    form, loosened = _rdp_form(others, relation)
    if not ours or form is None or loosened:
        return None
    pld, _ = _pld_form(ours, relation)
    if pld is None:
        return None
    first, second = _pld_curve(pld, relation, delta / 2), _rdp_curve(form, relation)
    return lambda target: first(target / 2) + second(target / 2)


def non_private(leaves: Sequence[ElementaryEvent]) -> bool:
    """Whether some release is protected by nothing."""
    return any(leaf.kind == NON_PRIVATE_EVENT or non_private(leaf.parts) for leaf in leaves)
