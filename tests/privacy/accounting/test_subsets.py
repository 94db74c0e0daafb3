"""Batches of fixed size: the dominating pair against the mechanism itself, pair by pair."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from numpy.typing import NDArray
from scipy.stats import laplace, norm

from dpkern.audit import epsilon_lower_bound
from dpkern.privacy import accounting
from dpkern.privacy.accounting import accountants, events, subsets
from dpkern.privacy.accounting.events import GAUSSIAN_EVENT, LAPLACE_EVENT
from tests.evidence.accounting_grid import Release, epsilon_of, gaussian_delta
from tests.privacy.accounting.accounting_cases import Event

Floats = NDArray[np.float64]
Density = Callable[[Floats, float], Floats]

GRID = np.linspace(-40, 40, 80_001)
STEP = float(GRID[1] - GRID[0])
EPSILONS = np.array([-4.0, -1.0, -0.2, -0.01, 0.0, 0.01, 0.1, 0.5, 1.0, 2.0, 4.0, 7.0])
DENSITIES: dict[str, Callable[..., Floats]] = {GAUSSIAN_EVENT: norm.pdf, LAPLACE_EVENT: laplace.pdf}
PLACES = [
    (1.0, 1.0, -1.0),
    (-1.0, 1.0, -1.0),
    (0.0, 1.0, -1.0),
    (0.3, 0.9, -0.5),
    (-1.0, -0.2, 1.0),
]
"""J, X and Y: where the batch stands with another record, the record, its replacement (C = 1)."""


def hockey_stick(p: Floats, q: Floats, epsilon: float, cell: float = STEP) -> float:
    return float(np.maximum(p - math.exp(epsilon) * q, 0).sum() * cell)


def mixtures(
    kind: str, scale: float, fraction: float, places: tuple[float, ...]
) -> tuple[Floats, Floats]:
    """Densities of one step on both datasets, given the others' part."""
    away, here, there = (DENSITIES[kind](GRID, loc=place, scale=scale) for place in places)
    return (1 - fraction) * away + fraction * here, (1 - fraction) * away + fraction * there


def bound(kind: str, scale: float, fraction: float) -> Floats:
    return subsets.profile(kind, 2 / scale, fraction, EPSILONS)


CASES = [(GAUSSIAN_EVENT, 0.5), (GAUSSIAN_EVENT, 1.1), (GAUSSIAN_EVENT, 4.0), (LAPLACE_EVENT, 1.5)]


@pytest.mark.parametrize(("kind", "scale"), CASES)
@pytest.mark.parametrize("fraction", [0.01, 0.3, 0.9])
def test_one_step_is_dominated_and_the_bound_is_attained(
    kind: str, scale: float, fraction: float
) -> None:
    """Exact hockey sticks of every arrangement, integrated; the largest is the bound itself."""
    most = np.zeros(len(EPSILONS))
    for places in PLACES:
        p, q = mixtures(kind, scale, fraction, places)
        found = [hockey_stick(p, q, epsilon) for epsilon in EPSILONS]
        most = np.maximum(most, found)
    assert np.all(most <= bound(kind, scale, fraction) + 1e-6)
    assert most == pytest.approx(bound(kind, scale, fraction), abs=1e-5)


def test_arrangements_in_the_plane_are_dominated() -> None:
    axis = np.linspace(-7, 7, 351)
    x, y = np.meshgrid(axis, axis)
    cell = float(axis[1] - axis[0]) ** 2
    spread = np.random.default_rng(5)
    limit = bound(GAUSSIAN_EVENT, 1.0, 0.2)
    for _ in range(12):
        points = spread.normal(size=(3, 2))
        points /= np.maximum(np.linalg.norm(points, axis=1, keepdims=True), 1.0)
        away, here, there = (norm.pdf(x - a) * norm.pdf(y - b) for a, b in points)
        p, q = 0.8 * away + 0.2 * here, 0.8 * away + 0.2 * there
        found = [hockey_stick(p, q, epsilon, cell) for epsilon in EPSILONS]
        assert np.all(np.array(found) <= limit + 1e-4)


@pytest.mark.parametrize("others", [(-1.0, -1.0, -1.0), (1.0, -1.0, 1.0), (0.4, -0.6, 0.1)])
def test_the_whole_mechanism_is_dominated(others: tuple[float, ...]) -> None:
    """Two of four records, all six subsets, replaced record at either end."""
    scale = 1.3
    laws = []
    for first in (1.0, -1.0):
        sums = [sum(pair) for pair in combinations((first, *others), 2)]
        laws.append(np.mean([norm.pdf(GRID, loc=s, scale=scale) for s in sums], axis=0))
    for p, q in (laws, laws[::-1]):
        found = np.array([hockey_stick(p, q, epsilon) for epsilon in EPSILONS])
        assert np.all(found <= bound(GAUSSIAN_EVENT, scale, 0.5) + 1e-6)


def poisson_profile(scale: float, fraction: float) -> Floats:
    """What a Poisson sample's pair allows: J in the middle."""
    p, q = mixtures(GAUSSIAN_EVENT, scale, fraction, (0.0, 1.0, -1.0))
    return np.array([hockey_stick(p, q, epsilon) for epsilon in EPSILONS])


def test_wrong_pairs_are_refused() -> None:
    """Negative controls: an arrangement exceeds each pair that is not the dominating one."""
    scale, fraction = 1.1, 0.1
    p, q = mixtures(GAUSSIAN_EVENT, scale, fraction, (-1.0, 1.0, -1.0))
    removed = np.array([hockey_stick(p, q, epsilon) for epsilon in EPSILONS])
    added = np.array([hockey_stick(q, p, epsilon) for epsilon in EPSILONS])
    assert np.any(removed > poisson_profile(scale, fraction) + 1e-3)
    assert np.any(removed > subsets.profile(GAUSSIAN_EVENT, 1 / scale, fraction, EPSILONS) + 1e-3)
    assert np.any(added > removed + 1e-3)
    assert np.any(removed > added + 1e-3)


def composed_delta(scale: float, fraction: float, steps: int, epsilon: float) -> float:
    once = subsets.distribution(GAUSSIAN_EVENT, 2 / scale, fraction, 1e-3)
    return float(once.self_compose(steps).get_delta_for_epsilon(epsilon))


@pytest.mark.parametrize(("scale", "fraction"), [(1.1, 0.1), (2.0, 0.5)])
def test_two_steps_are_dominated(scale: float, fraction: float) -> None:
    """All pairs of arrangements, the second step's fixed in advance, in two dimensions."""
    coarse = slice(None, None, 250)
    cell = (250 * STEP) ** 2
    limits = {at: composed_delta(scale, fraction, 2, at) for at in (0.1, 2.0)}
    for one, two in product(PLACES, repeat=2):
        p1, q1 = (law[coarse] for law in mixtures(GAUSSIAN_EVENT, scale, fraction, one))
        p2, q2 = (law[coarse] for law in mixtures(GAUSSIAN_EVENT, scale, fraction, two))
        p, q = np.outer(p1, p2), np.outer(q1, q2)
        for epsilon, limit in limits.items():
            assert hockey_stick(p, q, epsilon, cell) <= limit + 1e-5


def adaptive_delta(scale: float, fraction: float, epsilon: float) -> float:
    """A first step at one end, a second one whose arrangement follows from the first's output."""
    p, q = mixtures(GAUSSIAN_EVENT, scale, fraction, (-1.0, 1.0, -1.0))
    kept = (p > 1e-30) & (q > 1e-30)
    left = epsilon + np.log(q[kept] / p[kept])
    best = subsets.profile(GAUSSIAN_EVENT, 2 / scale, fraction, left)
    return float((p[kept] * best).sum() * STEP)


def test_one_sided_pairs_may_not_be_composed() -> None:
    """Two adaptive steps exceed the worst pair of one step composed with itself; never ours."""
    scale, fraction = 1.1, 0.3
    one_sided = privacy_loss_distribution.from_gaussian_mechanism(
        scale / 2, sampling_prob=fraction, value_discretization_interval=1e-3
    ).self_compose(2)
    for epsilon in (0.0, 0.1, 0.5, 1.0, 2.0):
        adaptive = adaptive_delta(scale, fraction, epsilon)
        assert adaptive <= composed_delta(scale, fraction, 2, epsilon) + 1e-6
    assert adaptive_delta(scale, fraction, 0.1) > one_sided.get_delta_for_epsilon(0.1) + 1e-3


@pytest.mark.parametrize(("kind", "scale"), CASES)
@pytest.mark.parametrize("fraction", [1e-6, 0.01, 0.9])
@pytest.mark.parametrize("interval", [1e-4, 0.03])
def test_the_distribution_is_above_its_profile(
    kind: str, scale: float, fraction: float, interval: float
) -> None:
    """Between the points of the grid, and below 0, too; a chord is close to a smooth curve."""
    law = subsets.distribution(kind, 2 / scale, fraction, interval)
    epsilons = np.array([-0.73, -0.0312, 0.0004321, 0.0123, 0.377, 1.61, 3.33])
    exact = subsets.profile(kind, 2 / scale, fraction, epsilons)
    found = np.array([law.get_delta_for_epsilon(epsilon) for epsilon in epsilons])
    assert np.all(found >= exact - 1e-14)
    assert np.all(found <= exact + interval)


def test_long_compositions_are_made_of_shorter_ones() -> None:
    """The same curve as at once, from a result that is not padded with millions of points."""
    once = subsets.distribution(GAUSSIAN_EVENT, 0.1, 1e-3, 1e-5)
    steps = 60_000
    parts, whole = subsets.self_composed(once, steps), once.self_compose(steps)
    for epsilon in (0.02, 0.06, 0.1):
        expected = whole.get_delta_for_epsilon(epsilon)
        assert parts.get_delta_for_epsilon(epsilon) == pytest.approx(expected, rel=1e-6, abs=1e-12)
    found = fixed(127.0, 1e-4, 10**8)
    assert found.accountant == "PLD"
    # The central limit of many small losses, from below: mu = 2 q sqrt(T) / sigma.
    limit = epsilon_of(lambda eps: gaussian_delta(eps, 2e-4 * 1e4 / 127), 1e-5)
    assert limit * 0.999 < found.epsilon < limit * 1.02


@pytest.mark.parametrize(("kind", "scale"), CASES)
def test_profiles_are_those_of_a_pair(kind: str, scale: float) -> None:
    """Convex in e^epsilon, falling, at least 1 - e^epsilon; the whole dataset is not amplified."""
    factors = np.linspace(0.0005, 6, 12_000)
    for fraction in (1e-3, 0.2, 0.999):
        found = subsets.profile(kind, 2 / scale, fraction, np.log(factors))
        assert np.all(np.diff(found) <= 1e-15)
        assert np.all(np.diff(found, 2) >= -1e-12)
        assert np.all(found >= 1 - factors - 1e-15)
    whole = subsets.profile(kind, 2 / scale, 1 - 1e-12, EPSILONS[EPSILONS >= 0])
    alone = subsets.unsampled_profile(kind, 2 / scale, EPSILONS[EPSILONS >= 0])
    assert whole == pytest.approx(alone, abs=1e-9)


def test_unsampled_profiles_are_the_closed_forms() -> None:
    for epsilon in (0.0, 0.5, 3.0):
        found = subsets.unsampled_profile(GAUSSIAN_EVENT, 0.9, np.array([epsilon]))
        assert found[0] == pytest.approx(gaussian_delta(epsilon, 0.9), rel=1e-9)
    p, q = laplace.pdf(GRID, loc=2, scale=1.5), laplace.pdf(GRID, scale=1.5)
    for epsilon in (0.0, 0.4, 1.3, 1.4):
        found = subsets.unsampled_profile(LAPLACE_EVENT, 2 / 1.5, np.array([epsilon]))
        assert found[0] == pytest.approx(hockey_stick(p, q, epsilon), abs=1e-6)


def fixed(sigma: float, fraction: float, steps: int, delta: float = 1e-5, **more: Any) -> Any:
    return accounting.certify(
        more.pop("mechanism", Release(sigma)),
        sample_rate=fraction,
        steps=steps,
        delta=delta,
        sampling="fixed",
        dataset_size=100_000,
    )


@pytest.mark.parametrize(
    ("sigma", "fraction", "steps", "expected"),
    [
        (1.1, 0.01, 10_000, 39.95),
        (1.1, 0.01, 600, 8.824),
        (4.0, 0.01, 1000, 0.7186),
        (10.0, 0.1, 1000, 2.8224),
    ],
)
def test_certified_between_a_lower_bound_and_the_renyi_bound(
    sigma: float, fraction: float, steps: int, expected: float
) -> None:
    found = fixed(sigma, fraction, steps)
    assert (found.accountant, found.relation) == ("PLD", "replace_one")
    assert found.epsilon == pytest.approx(expected, rel=2e-3)
    event = events.sampled_without_replacement(
        100_000, round(fraction * 100_000), events.gaussian(sigma)
    )
    lower = epsilon_lower_bound.epsilon_lower(event, "replace_one", 1e-5, steps=steps)
    assert lower < found.epsilon < found.bounds["RDP"]
    assert lower > 0.75 * found.epsilon
    assert found.epsilon < fixed(sigma, 1.0, steps).epsilon


@pytest.mark.parametrize("sigma", [0.4, 1.1, 8.0])
@pytest.mark.parametrize("fraction", [1e-3, 0.2, 0.99])
def test_one_certified_step_is_exact(sigma: float, fraction: float) -> None:
    def exact(epsilon: float) -> float:
        above = subsets.profile(GAUSSIAN_EVENT, 2 / sigma, fraction, np.array([epsilon]))
        return float(above[0])

    expected = epsilon_of(exact, 1e-5)
    assert expected <= fixed(sigma, fraction, 1).epsilon <= expected * 1.01 + 1e-4


def test_monotone() -> None:
    """In noise, rate, steps and delta; the grid's error is below a per cent."""
    lists = [
        [fixed(sigma, 0.02, 300).epsilon for sigma in (8.0, 2.0, 1.0, 0.5)],
        [fixed(1.5, q, 300).epsilon for q in (1e-3, 0.03, 0.5, 1.0)],
        [fixed(1.5, 0.02, steps).epsilon for steps in (1, 3, 50, 4000)],
        [fixed(1.5, 0.02, 300, delta).epsilon for delta in (1e-2, 1e-5, 1e-8)],
    ]
    for found in lists:
        assert found == sorted(found)
        assert found[-1] < math.inf


def test_laplace_subsets_are_amplified() -> None:
    laplace_event = Event(events.laplace(4.0))
    found = fixed(0, 0.01, 50, mechanism=laplace_event)
    assert set(found.bounds) == {"PLD"}
    alone = fixed(0, 1.0, 50, mechanism=laplace_event).epsilon
    assert 0 < found.epsilon < alone / 3
    assert fixed(0, 0.01, 1, 1e-9, mechanism=laplace_event).epsilon == pytest.approx(
        math.log1p(0.01 * math.expm1(0.5)), rel=1e-3
    )


def test_other_relations_and_composites_get_no_amplification() -> None:
    """The proof is for replacing one record, and for one kind of noise."""
    leaves = events.leaves(
        events.sampled_without_replacement(1000, 10, events.gaussian(2.0)), count=5
    )
    assert "PLD" in accountants.upper_bounds(leaves, "replace_one", 1e-5, 10)
    assert "PLD" not in accountants.upper_bounds(leaves, "add_remove", 1e-5, 10)
    mixed = Event(events.composed([events.gaussian(5.0), events.laplace(50.0)]))
    assert set(fixed(0, 0.01, 10, mechanism=mixed).bounds) == {"PLD without amplification"}


def test_histories_keep_the_amplification_beside_other_samplings() -> None:
    ledger = accounting.Ledger()
    ledger.record(Release(2.0), sample_rate=0.01, sampling="fixed", dataset_size=10_000, count=500)
    ledger.record(Release(3.0), sample_rate=0.02, sampling="poisson", count=500)
    found = ledger.certify(1e-5)
    assert found.accountant == "PLD"
    alone = fixed(2.0, 0.01, 500).epsilon
    assert alone < found.epsilon < alone + 5
