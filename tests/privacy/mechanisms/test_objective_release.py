"""Objective release: its integers, its certificate, and what one record can do to its sums."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch

from dpkern.audit.subjects import sums
from dpkern.base.errors import InvalidInput
from dpkern.base.laws import SCALE_CELLS, SCALE_UNITS
from dpkern.base.rng import Key
from dpkern.objective import moments
from dpkern.privacy.mechanisms import ObjectiveRelease
from dpkern.privacy.theory.gaussian import exact_epsilon

SIZES: list[dict[str, Any]] = [
    {"epsilon": 1.0, "length": 4, "classes": 2},
    {"epsilon": 8.0, "length": 6, "classes": 3, "weight": 0.3},
    {"epsilon": 0.2, "length": 5, "classes": 10, "weight": 4.0},
    {"epsilon": 2.0, "length": 1, "classes": 2},
]


@pytest.mark.parametrize("fields", SIZES)
def test_no_record_moves_the_sums_further_than_is_certified(fields: dict[str, Any]) -> None:
    mechanism = ObjectiveRelease(**fields)
    check = sums.sensitivity_check(mechanism)
    assert check.passed, check.text
    # The bound is attained, not only respected.
    assert check.numbers["moved"] == pytest.approx(check.numbers["certified"])
    squared = mechanism.squared_sensitivity
    assert squared <= mechanism.reach**2
    assert Fraction(mechanism.noise_multiplier) ** 2 * squared <= SCALE_UNITS**2
    assert mechanism.noise_multiplier == pytest.approx(SCALE_UNITS / squared**0.5, rel=1e-4)


def test_a_factor_that_is_too_large_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moments, "ACROSS", 8)
    check = sums.sensitivity_check(ObjectiveRelease(**SIZES[0]))
    assert check.passed is False


@pytest.mark.parametrize("fields", SIZES)
def test_random_records_stay_below_the_bound(fields: dict[str, Any]) -> None:
    mechanism = ObjectiveRelease(**fields)
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        drawn = torch.randn(mechanism.length, generator=generator, dtype=torch.float64)
        feature = (drawn / drawn.norm() * mechanism.radius).trunc().to(torch.int64)
        label = torch.randint(mechanism.classes, (1,), generator=generator)
        moved = moments.contributions(mechanism, feature[None], label)
        assert sum(int(each) ** 2 for each in moved.tolist()) <= mechanism.squared_sensitivity


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 2.93, 8.0])
def test_the_certificate_meets_the_target_and_the_exact_formula(epsilon: float) -> None:
    pytest.importorskip("dp_accounting")
    mechanism = ObjectiveRelease(epsilon=epsilon, length=64, classes=10)
    found = mechanism.certificate(seeded=False)
    exact = exact_epsilon(mechanism.noise_multiplier, mechanism.delta)
    assert exact <= found.epsilon <= epsilon
    assert found.epsilon == pytest.approx(epsilon, rel=0.03)
    assert (found.relation, found.certified_for) == ("add_remove", "released bits")
    assert found.delta == mechanism.delta
    assert mechanism.epsilon_certified(visits=1000) == found.epsilon
    seeded = mechanism.certificate(seeded=True)
    assert math.isinf(seeded.epsilon)
    assert seeded.certified_for == "nothing"


def test_without_noise_nothing_is_certified() -> None:
    mechanism = ObjectiveRelease(epsilon=math.inf, length=4, classes=2)
    assert math.isinf(mechanism.epsilon_certified())
    assert mechanism.certified_for == "nothing"
    with pytest.raises(InvalidInput, match="a finite epsilon"):
        sums.SumsSubject(mechanism=mechanism)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"mode": "printed"}, "mode"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"epsilon": 0.05, "length": 9000}, "epsilon"),
        ({"delta": 1.0}, "delta"),
        ({"length": 0}, "length"),
        ({"classes": 1}, "classes"),
        ({"weight": 0.0}, "weight"),
    ],
)
def test_bad_fields_are_refused_by_name(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidInput, match=f"^{name}: expected"):
        ObjectiveRelease(**{**SIZES[0], **fields})


def test_the_released_noise_has_the_law_that_is_certified() -> None:
    stats = pytest.importorskip("scipy.stats")
    mechanism = ObjectiveRelease(epsilon=1.0, length=4, classes=2)
    zeros = torch.zeros(10_000, mechanism.coordinates, dtype=torch.int64)
    noise = moments.noised(mechanism, zeros, Key.from_unsafe_seed(7))
    # Released values stand in the middle of their cells: spread over them they are continuous.
    place = torch.rand(noise.shape, generator=torch.Generator().manual_seed(0)).double() - 0.5
    spread = ((noise + place * SCALE_UNITS / SCALE_CELLS) / SCALE_UNITS).flatten().numpy()
    # A key of its own for every test run would fail one in 10^4 of them; this one is fixed.
    assert stats.kstest(spread, "norm").pvalue > 1e-4
    narrower = stats.kstest(0.97 * spread, "norm").pvalue
    assert narrower < 1e-6, "a test that cannot see 3 % less noise shows nothing"
    correlations = torch.corrcoef(noise.T) - torch.eye(mechanism.coordinates)
    assert float(correlations.abs().max()) < 5 / 100
