"""Compute a lower bound on the epsilon of a stated event; an accountant below it is wrong.

One pair of neighbours is enough for a lower bound. Here one record contributes its whole bound in
one direction and all others nothing, or their whole bound against it. The release then has the
distribution ``P`` with the record and ``Q`` without, and ``T`` steps have the products of these:

    delta(epsilon) = sum over outcomes of max(P - e^epsilon Q, 0)
                   = E_P max(0, 1 - exp(epsilon - Y_1 - ... - Y_T)),        Y = log(P / Q)

Three steps each can only lower it, so the end is a proof up to the rounding of floats:

1. The outcomes are put into cells, which can only lose information.
2. Losses go to the nearest multiple of ``h``. Rounding errors less their mean are independent, of
   mean 0 and within an interval of length ``h``: all together they exceed
   ``eta = h sqrt(T/2 log(2 / spare))`` with probability at most ``spare``, and ``eta`` is taken
   from epsilon and ``spare`` from what is proved about delta (Gopi, Lee and Wutschitz, Numerical
   composition of differential privacy, 2021, section 5; Hoeffding's inequality).
3. Mass beyond the grid, and releases that are not known here, are left out.

Unsampled Gaussian releases have a closed form (``theory.gaussian``). Shuffled batches: the largest
coordinate of an epoch with every other record at its bound against the canary (Chua et al., How
private are DP-SGD implementations?, 2024, section 4).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.validate import choice, integer, open_unit, positive, require
from ..privacy.accounting import events
from ..privacy.accounting.accountants import (
    FFT_MASS_ONCE,
    FFT_MASS_PER_STEP,
    RELATIONS,
    non_private,
)
from ..privacy.accounting.events import ElementaryEvent
from ..privacy.theory.gaussian import exact_epsilon

Floats = NDArray[np.float64]

_CELLS = 1 << 14
"""Cells of one release: so fine that what they hide is far below the grid's error."""
_REACH = 9.5
"""Standard deviations on either side; the mass beyond is 1e-21."""
_SPARE = 1e-3
"""Share of delta given to the rounding of losses."""
_MAX_POINTS = 2.0**18
_LARGEST = 700.0
_PRECISION = 0.004
"""Part of epsilon that rounding may cost, if the grid has room."""


@dataclass(frozen=True)
class Laws:
    """Probabilities of the same outcomes with (``p``) and without (``q``) the record, per step."""

    p: Floats
    q: Floats
    count: int = 1


def epsilon_lower(
    event: Mapping[str, Any], relation: str, delta: float, *, steps: int = 1
) -> float:
    """Return an epsilon that some neighbours reach at ``delta``: no valid accountant says less.

    Args:
        event: event of one step; multipliers are relative to the bound of ONE record.
        relation: one of ``accounting.RELATIONS``.
        delta: a number in (0, 1).
        steps: releases of the event.

    Returns:
        A lower bound; 0 where nothing is known, infinity for a release that nothing protects.

    Raises:
        InvalidInput: no event, relation or delta.
        MissingDependency: dp-accounting is not installed.
    """
    choice(RELATIONS, relation=relation)
    open_unit(delta=delta)
    leaves = events.leaves(event, integer(steps=steps))
    if non_private(leaves):
        return math.inf
    plain = [leaf for leaf in leaves if leaf.kind == events.GAUSSIAN_EVENT and not leaf.sampled]
    others = [leaf for leaf in leaves if leaf not in plain]
    radius = 2.0 if relation == "replace_one" else 1.0
    mu = radius * math.sqrt(math.fsum(leaf.count / leaf.multiplier**2 for leaf in plain))
    alone = exact_epsilon(1 / mu, delta) * (1 - 1e-9) if mu else 0.0
    subsets = relation == "replace_one" and any(leaf.subset is not None for leaf in others)
    best = alone
    for far_end in (False, True) if subsets else (False,):
        laws = [known for leaf in others if (known := _laws(leaf, relation, far_end)) is not None]
        if laws and mu:
            laws.append(_normal(mu))
        if laws:
            best = max(best, composed(laws, delta))
    return best


def shuffled_epsilon_lower(
    multiplier: float, delta: float, *, steps_per_epoch: int, epochs: int
) -> float:
    """Return the bound for Gaussian noise on batches of a fresh permutation per epoch (zero-out).

    Args:
        multiplier: noise standard deviation / bound of one record.
        delta: a number in (0, 1).
        steps_per_epoch: batches of an epoch; a record is in exactly one of them.
        epochs: permutations.

    Raises:
        InvalidInput: a number out of its range.
        MissingDependency: dp-accounting is not installed.
    """
    positive(multiplier=multiplier)
    open_unit(delta=delta)
    others = integer(minimum=1, steps_per_epoch=steps_per_epoch) - 1
    if integer(epochs=epochs) == 0:
        return 0.0
    mu = 1 / multiplier
    if not others:
        return exact_epsilon(1 / (mu * math.sqrt(epochs)), delta) * (1 - 1e-9)
    edges = np.linspace(-_REACH, _REACH + 2 * mu, _CELLS + 1)
    best = 0.0
    # The others' sums: 0, or their whole bound against the canary, which is then one step further.
    for base in (0.0, mu):
        p, q = (_largest(edges, shift, others) for shift in (base + mu, base))
        best = max(best, composed([Laws(p, q, epochs)], delta))
    return best


def _largest(edges: Floats, shift: float, others: int) -> Floats:
    """Return masses of the largest of ``others`` standard normals and one of mean ``shift``."""
    special = require("scipy.special")
    log_cdf = others * special.log_ndtr(edges) + special.log_ndtr(edges - shift)
    # Differences of the smaller of the two: distribution function below 1/2, survival above.
    below, above = np.exp(log_cdf), -np.expm1(log_cdf)
    return np.asarray(np.where(below[1:] < 0.5, np.diff(below), -np.diff(above)))


def _laws(leaf: ElementaryEvent, relation: str, far_end: bool = False) -> Laws | None:
    """Return the laws of two neighbours under one release; None if they are not known.

    With ``far_end`` all other records of a uniform subset are at their bound against the canary, as
    its replacement is. The canary is then twice as far away from the record in its place.
    """
    if leaf.parts:
        # One of the releases that a sampled step consists of; the others are left out.
        for part in leaf.parts:
            alike = replace(part, count=1, rate=leaf.rate, subset=leaf.subset)
            known = _laws(alike, relation, far_end)
            if known is not None:
                return replace(known, count=leaf.count)
        return None
    if leaf.kind == events.RANDOMIZED_RESPONSE_EVENT:
        return _response(leaf) if relation == "replace_one" and not leaf.sampled else None
    if leaf.kind not in (events.GAUSSIAN_EVENT, events.LAPLACE_EVENT):
        return None
    rate = leaf.fraction
    mu = 1 / leaf.multiplier
    away = mu if relation == "replace_one" else 0.0
    if far_end and leaf.subset is not None:
        mu, away = 2 * mu, 0.0
    masses = _normal_masses if leaf.kind == events.GAUSSIAN_EVENT else _laplace_masses
    reach = _REACH if leaf.kind == events.GAUSSIAN_EVENT else 45.0
    edges = np.linspace(-reach - away, reach + mu, _CELLS + 1)
    if leaf.kind == events.LAPLACE_EVENT:
        # The loss of Laplace noise bends at its peaks; elsewhere cells may be coarse.
        edges = np.unique(np.concatenate((edges, np.linspace(-away, mu, _CELLS + 1), [0.0])))
    nothing = masses(edges, 0.0)
    p = rate * masses(edges, mu) + (1 - rate) * nothing
    q = rate * masses(edges, -away) + (1 - rate) * nothing if away else nothing
    return Laws(p, q, leaf.count)


def _normal(shift: float) -> Laws:
    edges = np.linspace(-_REACH, _REACH + shift, _CELLS + 1)
    return Laws(_normal_masses(edges, shift), _normal_masses(edges, 0.0))


def _normal_masses(edges: Floats, shift: float) -> Floats:
    centred = edges - shift
    ndtr = require("scipy.special").ndtr
    below, above = ndtr(centred), ndtr(-centred)
    return np.asarray(np.where(centred[:-1] < 0, np.diff(below), -np.diff(above)))


def _laplace_masses(edges: Floats, shift: float) -> Floats:
    centred = edges - shift
    low, high = centred[:-1], centred[1:]
    tail = np.exp(-np.abs(centred)) / 2
    straddles = (low < 0) & (high > 0)
    return np.where(straddles, 1 - tail[:-1] - tail[1:], np.abs(np.diff(tail)))


def _response(leaf: ElementaryEvent) -> Laws:
    """Return the laws of the record's symbol, its neighbour's, and all others."""
    numbers = dict(leaf.parameters)
    lie = numbers["noise_parameter"] / numbers["num_buckets"]
    truth = 1 - numbers["noise_parameter"] + lie
    rest = lie * (numbers["num_buckets"] - 2)
    return Laws(np.array([truth, lie, rest]), np.array([lie, truth, rest]), leaf.count)


def composed(laws: Sequence[Laws], delta: float) -> float:
    """Return a lower bound on epsilon for independent releases with these laws, both directions.

    Raises:
        InvalidInput: delta outside (0, 1).
        MissingDependency: dp-accounting is not installed.
    """
    open_unit(delta=delta)
    swapped = [Laws(each.q, each.p, each.count) for each in laws]
    return max(_one_direction(laws, delta), _one_direction(swapped, delta))


def _one_direction(laws: Sequence[Laws], delta: float) -> float:
    laws = [each for each in laws if each.count]
    releases = sum(each.count for each in laws)
    if releases == 0:
        return 0.0
    parts = [(each.count, *_losses(each)) for each in laws]
    if releases == 1:
        ((_, masses, values),) = parts
        return _epsilon(masses, values, delta + FFT_MASS_ONCE)
    # About how far the sum of all losses reaches, to choose the grid.
    mean = math.fsum(count * float(masses @ values) for count, masses, values in parts)
    square = math.fsum(count * float(masses @ values**2) for count, masses, values in parts)
    size = abs(mean) + math.sqrt(2 * square * math.log(1 / delta)) + 1e-6
    spread = math.sqrt(releases / 2 * math.log(2 / (_SPARE * delta)))
    widest = max(float(np.ptp(values)) for _, _, values in parts)
    step = max(_PRECISION * size / spread, max(widest, 4 * size) / _MAX_POINTS)
    lowest, shift, total = 0, 0.0, np.ones(1)
    for count, masses, values in parts:
        first, probabilities, moved = _on_grid(masses, values, step, count)
        lowest += first
        shift += moved
        total = require("scipy.signal").fftconvolve(total, probabilities)
    reserve = _SPARE * delta + FFT_MASS_ONCE * len(parts) + FFT_MASS_PER_STEP * releases
    losses = (lowest + np.arange(len(total))) * step + shift - spread * step
    return _epsilon(np.asarray(total), np.asarray(losses), delta + reserve)


def _losses(laws: Laws) -> tuple[Floats, Floats]:
    """Return masses under P and losses of the outcomes that both laws have; others are left out."""
    both = (laws.p > 1e-30) & (laws.q > 1e-30)
    masses = laws.p[both]
    values = np.log(masses / laws.q[both])
    return masses, np.asarray(values)


def _on_grid(masses: Floats, values: Floats, step: float, count: int) -> tuple[int, Floats, float]:
    """Convolve ``count`` losses at multiples of ``step``.

    Returns:
        The first multiple, masses from there on, and what rounding took from the mean of the sum.
    """
    places = np.rint(values / step).astype(np.int64)
    moved = float(masses @ (values - places * step)) / float(masses.sum())
    lowest = int(places.min())
    probabilities = np.bincount(places - lowest, weights=masses)
    # What the convolution cuts off, and what wraps around, is in the reserve.
    common = require("dp_accounting.pld.common")
    offset, composed = common.self_convolve(probabilities, count, FFT_MASS_PER_STEP)
    return lowest * count + offset, np.asarray(composed), moved * count


def _epsilon(masses: NDArray[Any], losses: NDArray[Any], delta: float) -> float:
    """Return the largest epsilon >= 0 with ``sum m max(0, 1 - exp(epsilon - loss)) >= delta``.

    It is 0 where no epsilon satisfies this.
    """
    positive_losses = losses > 0
    order = np.argsort(-losses[positive_losses], kind="stable")
    # Of losses as large as this no exponential can be taken; a smaller loss is on the safe side.
    falling = np.minimum(losses[positive_losses][order], _LARGEST)
    mass = masses[positive_losses][order]
    # Sums over all losses down to each: at an epsilon just below it, delta is S - e^epsilon W.
    above, weighted = np.cumsum(mass), np.cumsum(mass * np.exp(-falling))
    following = np.append(falling[1:], 0.0)
    enough = np.nonzero(above - np.exp(following) * weighted >= delta)[0]
    if not len(enough):
        return 0.0
    k = enough[0]
    return float(min(falling[k], max(following[k], math.log((above[k] - delta) / weighted[k]))))
