"""Cut noise tails: what is set aside against the committed law itself, exactly."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dpkern.base.laws import ESCAPE, GAUSSIAN, SCALE_CELLS, TOTAL, gaussian_tail
from dpkern.privacy import accounting
from dpkern.privacy.accounting import events, tails
from dpkern.privacy.accounting.events import GAUSSIAN_EVENT, LAPLACE_EVENT
from tests.evidence.accounting_grid import Release, gaussian_delta
from tests.privacy.accounting.accounting_cases import Event

Floats = NDArray[np.float64]

REACH = 1100 + ESCAPE * 4
"""Cells on either side: every outcome of the law, shifted by up to 1024."""


def committed(shift: int) -> Floats:
    """The law of K + shift: the released integer at a whole number of cells, carries aside."""
    tail = [1 << 128, *gaussian_tail(), 0]
    masses = [count / TOTAL for count in GAUSSIAN.counts[:ESCAPE]]
    escape = GAUSSIAN.counts[ESCAPE] / TOTAL
    masses += [escape * ((tail[i] - tail[i + 1]) / 2**128) for i in range(len(tail) - 1)]
    law = np.zeros(2 * REACH + 1)
    for k, mass in enumerate(masses):
        law[REACH + shift + k] += mass / 2
        law[REACH + shift - 1 - k] += mass / 2
    return law


def hockey_stick(p: Floats, q: Floats, epsilon: float) -> float:
    if epsilon == math.inf:
        return float(p[q == 0].sum())
    with np.errstate(divide="ignore"):
        scaled = np.exp(np.log(q) + epsilon)
    return float(np.maximum(p - scaled, 0).sum())


def reserve(sigma: float, epsilon: float, rate: float = 1.0, **options: Any) -> float:
    leaf = events.leaves(events.poisson_sampled(rate, events.gaussian(sigma)))[0]
    relation = options.get("relation", "add_remove")
    return tails.tail_delta(leaf, relation, options.get("dimension", 1), epsilon)


SHIFTS = [400, 500, 560, 640, 700, 780, 1024]


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("rate", [1.0, 0.3, 0.001])
def test_the_real_law_is_within_the_reserve_of_its_ideal(shift: int, rate: float) -> None:
    """Both directions, all epsilons, one sampled release of one coordinate."""
    sigma, mu = SCALE_CELLS / shift, shift / SCALE_CELLS
    absent, present = committed(0), committed(shift)
    mixed = rate * present + (1 - rate) * absent
    beyond = False
    for epsilon in (0.01, 1.0, 10.0, 30.0, 60.0, 100.0, 160.0, math.inf):
        inner = math.log1p(math.expm1(epsilon) / rate) if epsilon < 500 else epsilon
        ideal = rate * gaussian_delta(inner, mu) if epsilon < math.inf else 0.0
        removed, added = hockey_stick(mixed, absent, epsilon), hockey_stick(absent, mixed, epsilon)
        allowed = min(reserve(sigma, epsilon, rate), 1.0)
        assert removed <= ideal * (1 + 1e-9) + allowed
        assert added <= ideal * (1 + 1e-9) + allowed
        beyond |= removed > ideal * 1.01 + 1e-18
    # Negative control: without the reserve the ideal is no bound.
    assert beyond


@pytest.mark.parametrize("dimension", [1, 3, 1000])
def test_no_split_of_a_shift_exceeds_the_bound(dimension: int) -> None:
    spread = np.random.default_rng(2)
    for law, power in ((GAUSSIAN_EVENT, 2), (LAPLACE_EVENT, 1)):
        room = tails.tail_cutoff(law)[0] - 8
        for _ in range(60):
            shifts = np.abs(spread.standard_cauchy(dimension)) ** 2
            shifts *= spread.uniform(1, 1.1 * room) / float(np.sum(shifts**power)) ** (1 / power)
            size = float(np.sum(shifts**power)) ** (1 / power)
            each = [tails._reaches(law, room - shift) for shift in shifts]
            whole = math.fsum(each) + 2 * dimension * tails._reaches(law, room)
            assert whole <= tails.outcomes_beyond(law, size, dimension) * (1 + 1e-12)


def test_the_bound_is_close_where_one_coordinate_takes_it_all() -> None:
    for shift in (500.0, 600.0, 700.0):
        one = tails._reaches(GAUSSIAN_EVENT, tails.tail_cutoff(GAUSSIAN_EVENT)[0] - 8 - shift)
        assert one <= tails.outcomes_beyond(GAUSSIAN_EVENT, shift, 10**9) <= one * 1.05


@pytest.mark.parametrize(
    ("rate", "steps", "delta"), [(1.0, 1, 1e-5), (0.01, 1, 1e-3), (0.01, 1000, 1e-5), (1.0, 1, 0.1)]
)
def test_finite_wherever_the_law_ends_beyond_delta(rate: float, steps: int, delta: float) -> None:
    """Infinite multipliers are those whose law really shows a record, but for a few per cent."""

    def epsilon(sigma: float) -> float:
        found = accounting.certify(Release(sigma), sample_rate=rate, steps=steps, delta=delta)
        assert found.epsilon < math.inf or any("the noise ends" in note for note in found.notes)
        return found.epsilon

    def shown(shift: int) -> float:
        """Outcomes that only the record's presence can have, in one of the steps."""
        return hockey_stick(committed(shift), committed(0), math.inf) * rate * steps

    least = next(shift for shift in range(300, 1024) if shown(shift) > 1.2 * delta)
    assert epsilon(SCALE_CELLS / least) == math.inf
    assert epsilon(1.12 * SCALE_CELLS / least) < math.inf


def test_small_multipliers_are_monotone() -> None:
    run: dict[str, Any] = {"sample_rate": 0.01, "steps": 1, "delta": 1e-3}
    found = [
        accounting.epsilon(Release(sigma), **run)
        for sigma in (0.0625, 0.08, 0.092, 0.095, 0.1, 0.12, 0.15, 0.2, 0.3, 0.5)
    ]
    assert found == sorted(found, reverse=True)
    assert found[0] == math.inf
    assert found[3] < math.inf


def test_sampling_and_relation_scale_the_reserve() -> None:
    whole = reserve(0.13, math.inf)
    assert reserve(0.13, math.inf, 0.01) == pytest.approx(0.01 * whole)
    subset = events.sampled_without_replacement(100, 1, events.gaussian(0.26))
    leaf = events.leaves(subset)[0]
    found = tails.tail_delta(leaf, "replace_one", 1, math.inf)
    assert found == pytest.approx(0.01 * whole)
    replaced = reserve(0.26, math.inf, 0.01, relation="replace_one")
    assert replaced == pytest.approx(2 * found)


def test_a_reserve_with_a_limit_leaves_a_finite_epsilon() -> None:
    """The total variation grows past delta; what outcomes can show stays below it."""
    found = accounting.certify(
        Event(events.gaussian(0.14), dimension=1 << 40), sample_rate=1.0, steps=1, delta=1e-5
    )
    alone = accounting.certify(
        Event(events.gaussian(0.14), dimension=1), sample_rate=1.0, steps=1, delta=1e-5
    )
    assert alone.epsilon <= found.epsilon < alone.epsilon * 1.01
