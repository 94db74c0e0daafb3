"""Reserve delta for the cut tails, where the noise distributions leave their certified ideal.

An ideal law goes on for ever; the real one agrees with it up to 12 standard deviations (Gaussian)
or 68 scales (Laplace) and ends soon after. So a record that moves one coordinate by more than that
is seen with certainty, whatever an accountant says of the ideal: at multipliers near 2^-4 no
epsilon holds at a small delta, and none is certified.

**Lemma.** Let ``kappa_t`` bound how much the delta of step ``t`` exceeds its ideal's, at every
``epsilon >= 0`` and in both directions. Then the delta of all steps together exceeds the ideal one
by at most the sum of the ``kappa_t``. *Proof.* For ``a = e^epsilon < 1``, ``H_a(P | Q) = 1 - a +
a H_(1/a)(Q | P)``, so the bound holds at every ``a > 0``. Given the other steps' outputs, a step is
asked about one such ``a``: replace the steps by their ideals one after the other, last one first. ∎
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, lru_cache

from ...base.laws import (
    ESCAPE,
    GAUSSIAN,
    LAPLACE,
    LAPLACE_RESTARTS,
    SCALE_CELLS,
    TOTAL,
    gaussian_tail,
)
from .events import GAUSSIAN_EVENT, LAPLACE_EVENT, ElementaryEvent

_CARRIES = 8
"""Cells that cover what the carries of a sum can add to a shift."""
_FAR_CELLS = 16


def variation_cost(epsilon: float) -> float:
    """Return what a total variation distance on both sides adds to delta, per unit."""
    return 1 + math.exp(epsilon) if epsilon < 700 else math.inf


@cache
def _survival(law: str, magnitude: int) -> float:
    """Return P(k >= magnitude) of the committed law."""
    if magnitude <= 0:
        return 1.0
    if law == LAPLACE_EVENT:
        rounds, rest = divmod(magnitude, ESCAPE)
        escape = LAPLACE.counts[ESCAPE] / TOTAL
        return float(escape**rounds * (sum(LAPLACE.counts[rest:]) / TOTAL))
    if magnitude <= ESCAPE:
        return sum(GAUSSIAN.counts[magnitude:]) / TOTAL
    tail = gaussian_tail()
    index = magnitude - ESCAPE - 1
    return GAUSSIAN.counts[ESCAPE] / TOTAL * (tail[index] / 2**128 if index < len(tail) else 0.0)


@cache
def tail_cutoff(law: str) -> tuple[int, float]:
    """Return where a law leaves its certified ideal: first magnitude (cells), and the mass beyond.

    Gaussian: 2^-109.2 beyond 12 standard deviations; Laplace: all 17 draws escape, 2^-96.8.
    """
    if law == LAPLACE_EVENT:
        first = ESCAPE * (LAPLACE_RESTARTS + 1)
    else:
        first = next(k for k in range(ESCAPE, 2 * ESCAPE * 8) if _survival(law, k) < 2.0**-109)
    return first, _survival(law, first)


def _reaches(law: str, cells: float) -> float:
    """Return P(K >= cells), with K = k or -1 - k, equally likely."""
    least = math.floor(cells)
    if least >= 0:
        return _survival(law, least) / 2
    return 1 - _survival(law, -least) / 2


@lru_cache(maxsize=4096)
def outcomes_beyond(law: str, shift: float, dimension: int) -> float:
    """Bound the probability that some coordinate's noise is cut, here or for the neighbour.

    Where that happens to no coordinate, real and ideal probabilities are equal for both neighbours,
    so the real delta of the release exceeds the ideal one by at most this. A coordinate shifted by
    ``s`` cells has it with at most ``F(s) = P(K >= cut - 8 - s)`` and twice ``F(0)``. The shifts'
    2-norm (Laplace: 1-norm) is at most ``S``: the ones of more than 16 cells sum to at most
    ``S^p max F(s) / s^p``.

    Args:
        law: event of the noise.
        shift: S, in output cells.
        dimension: coordinates.
    """
    first, _ = tail_cutoff(law)
    room = first - _CARRIES
    power = 1 if law == LAPLACE_EVENT else 2
    total = dimension * (
        2 * _reaches(law, room) + _reaches(law, room - min(shift, float(_FAR_CELLS)))
    )
    if shift <= _FAR_CELLS:
        return total
    steepest = 0.0
    # F is a step function of s: its value at the upper end of a cell over s at the lower end.
    for upper in range(_FAR_CELLS + 1, min(math.ceil(shift), 2 * first) + 1):
        reaches = _reaches(law, room - min(float(upper), shift))
        steepest = max(steepest, reaches / float(upper - 1) ** power)
    far = min(shift**power * steepest, dimension * _reaches(law, room - shift))
    return total + far


def tail_delta(leaf: ElementaryEvent, relation: str, dimension: int, epsilon: float) -> float:
    """Return the delta to set aside for the cut tails of a leaf's releases.

    The smaller of two bounds, over ``T`` releases of ``d`` coordinates, with cut mass ``tau``:

    * total variation, used on both sides of the inequality: ``(1 + e^epsilon) T d tau``;
    * outcomes (the lemma above): ``q T`` times ``outcomes_beyond`` for a record that takes part
      with probability ``q``. *Proof.* Write ``R`` for the law without the record and ``S`` with it,
      ``a >= 1``. ``(1-q) R + q S`` against ``R`` is ``q H_a'(S | R)``, ``a' = 1 + (a-1)/q``. ``R``
      against it is ``(1 - a (1-q)) H_a''(R | S)``, ``a'' = a q / (1 - a (1-q))``, or 0: the factor
      is at most ``q``. Two records that replace each other are ``q`` times one with against
      mixtures of without and the other (``subsets``): twice as many outcomes under Poisson
      sampling, where without is the empty place.
    """
    if leaf.parts:
        return leaf.count * math.fsum(
            tail_delta(part, relation, dimension, epsilon) for part in leaf.parts
        )
    if leaf.kind not in (GAUSSIAN_EVENT, LAPLACE_EVENT):
        return 0.0
    releases = float(leaf.count)
    variation = variation_cost(epsilon) * releases * dimension * tail_cutoff(leaf.kind)[1]
    replaced = relation == "replace_one"
    shift = SCALE_CELLS * (2.0 if replaced else 1.0) / leaf.multiplier
    outcomes = outcomes_beyond(leaf.kind, shift, dimension)
    if replaced and leaf.rate < 1:
        outcomes *= 2
    return min(variation, leaf.fraction * releases * outcomes)


def why_infinite(
    leaves: Sequence[ElementaryEvent], relation: str, dimension: int, delta: float
) -> tuple[str, ...]:
    """Return why epsilon is infinite: the cut tails alone take all of delta; else nothing."""
    certain = math.fsum(tail_delta(leaf, relation, dimension, math.inf) for leaf in leaves)
    if certain < delta:
        return ()
    return (
        "the noise ends 12 standard deviations out (Laplace: 68 scales), and a record moves it "
        "further than delta allows: raise the noise multiplier or delta",
    )
