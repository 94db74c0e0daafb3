"""Moments of integer features: exact sums, features of rows alone, and what is fitted to them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dpkern.base.errors import InvalidInput, PrivacyError
from dpkern.base.rng import Key
from dpkern.objective import moments
from dpkern.objective.feature_maps import MAPS, FeatureMap, to_radius, wavelets
from dpkern.objective.moments import ReleasedMoments
from dpkern.privacy.mechanisms import ObjectiveRelease

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS: dict[str, dict[str, Any]] = {
    "affine": {"map": "affine", "row_shape": (7,)},
    "centred": {"map": "centred", "row_shape": (9, 10)},
    "random": {"map": "random", "row_shape": (7,), "size": 33},
    "scattering": {"map": "scattering", "row_shape": (2, 9, 10)},
}


def images(shape: tuple[int, ...], count: int = 37) -> torch.Tensor:
    return torch.rand(count, *shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("fields", KINDS.values(), ids=KINDS)
def test_features_of_a_row_are_whole_numbers_that_no_company_changes(
    fields: dict[str, Any],
) -> None:
    mapped, radius = FeatureMap(**fields), 176
    x = images(mapped.row_shape)
    together = mapped(x, radius=radius)
    assert together.shape == (len(x), mapped.length)
    assert together.dtype == torch.int64
    alone = torch.cat([mapped(row[None], radius=radius) for row in x])
    backwards = mapped(x.flip(0), radius=radius).flip(0)
    assert torch.equal(together, alone)
    assert torch.equal(together, backwards)
    norms = together.double().norm(dim=1)
    assert float(norms.max()) <= radius
    assert float(norms.min()) > 0.9 * radius


def test_the_test_of_company_sees_a_mean_over_the_batch() -> None:
    mapped = FeatureMap(**KINDS["centred"])
    x = images(mapped.row_shape)
    less = (x - x.mean(0)).abs()  # what no public map may do
    assert not torch.equal(
        mapped(less, radius=176),
        mapped((x[:9] - x[:9].mean(0)).abs(), radius=176).repeat(5, 1)[:37],
    )


@pytest.mark.parametrize(
    "row",
    [
        torch.zeros(8, 8),
        torch.ones(8, 8),
        torch.eye(64)[3].view(8, 8),
        (torch.arange(64) % 2).float().view(8, 8),
        torch.full((8, 8), 0.5),
    ],
    ids=["black", "white", "one pixel", "stripes", "grey"],
)
@pytest.mark.parametrize("kind", MAPS)
def test_adversarial_rows_keep_the_radius(kind: str, row: torch.Tensor) -> None:
    mapped = FeatureMap(map=kind, row_shape=(8, 8), size=20)
    for radius in (11, 176, 4096):
        found = mapped(row[None], radius=radius)[0]
        assert sum(int(each) ** 2 for each in found.tolist()) <= radius**2


def test_vectors_are_rounded_within_their_radius() -> None:
    generator = torch.Generator().manual_seed(3)
    drawn = torch.randint(-(2**20), 2**20, (200, 50), generator=generator)
    found = to_radius(drawn, 100)
    assert int(found.square().sum(1).max()) <= 100**2
    cosine = torch.nn.functional.cosine_similarity(found.double(), drawn.double())
    assert float(cosine.min()) > 0.999
    # Rounding to the nearest alone would not keep it.
    norms = drawn.double().norm(dim=1, keepdim=True)
    assert int((drawn / norms * 100).round().square().sum(1).max()) > 100**2


def test_wavelets_ignore_a_constant_and_see_their_orientation() -> None:
    bank = wavelets(6, 0.8, 0.75 * torch.pi)
    # Rounding leaves half a unit for each of the 25 taps at most.
    assert float(bank.sum((1, 2, 3)).abs().max()) <= 12.5
    stripes = torch.cos(0.75 * torch.pi * torch.arange(16, dtype=torch.float64)).expand(
        1, 1, 16, 16
    )
    energy = (
        torch.nn.functional.conv2d(stripes, bank).unflatten(1, (6, 2)).square().sum((0, 2, 3, 4))
    )
    assert int(energy.argmax()) == 0


def _sums(mechanism: ObjectiveRelease, p: torch.Tensor, y: torch.Tensor) -> list[int]:
    d, (on, off) = mechanism.length, mechanism.targets
    rows = [(row.tolist(), int(label)) for row, label in zip(p, y, strict=True)]
    squares = [5 * sum(row[j] ** 2 for row, _ in rows) for j in range(d)]
    across = [
        7 * sum(row[j] * row[k] for row, _ in rows) for j in range(d) for k in range(j + 1, d)
    ]
    first = [
        sum((on if label == k else off) * row[j] for row, label in rows)
        for k in range(mechanism.classes)
        for j in range(d)
    ]
    return squares + across + first


def test_sums_are_those_of_whole_numbers() -> None:
    mechanism = ObjectiveRelease(epsilon=1.0, length=8, classes=3)
    mapped = FeatureMap(map="affine", row_shape=(7,))
    p = mapped(images((7,), 60), radius=mechanism.radius)
    y = torch.arange(60) % 3
    assert moments.contributions(mechanism, p, y).tolist() == _sums(mechanism, p, y)
    empty = moments.contributions(mechanism, p[:0], y[:0])
    assert not empty.any()


def test_without_noise_the_fit_is_ridge_regression() -> None:
    mechanism = ObjectiveRelease(epsilon=float("inf"), length=8, classes=3)
    p = FeatureMap(map="affine", row_shape=(7,))(images((7,), 300), radius=mechanism.radius)
    y = (p[:, 0] > p[:, 1]).long() + (p[:, 2] > 0).long()
    released = moments.release(mechanism, p, y, Key.from_unsafe_seed(0))
    weights = released.solve(ridge=0.5)
    phi = (p.double() / mechanism.radius).numpy()
    target = np.eye(3)[y.numpy()] - 1 / 3
    expected = np.linalg.solve(phi.T @ phi + 0.5 * np.eye(8), phi.T @ target).T
    expected -= expected.mean(0)
    assert np.allclose(weights.numpy(), expected, atol=1e-9)
    logistic = released.solve(surrogate="logistic", ridge=0.5)
    assert torch.equal(logistic.argmax(0), weights.argmax(0))
    assert torch.allclose(logistic, 3 * weights)


def test_any_number_of_fits_read_one_release() -> None:
    mechanism = ObjectiveRelease(epsilon=2.0, length=8, classes=3)
    p = FeatureMap(map="affine", row_shape=(7,))(images((7,), 50), radius=mechanism.radius)
    released = moments.release(mechanism, p, torch.arange(50) % 3, Key.fresh())
    again = ReleasedMoments.from_state(released.state_dict())
    for ridge in (0.1, 1.0):
        assert torch.equal(again.solve(ridge=ridge), released.solve(ridge=ridge))
    other = moments.release(mechanism, p, torch.arange(50) % 3, Key.fresh())
    assert not torch.equal(other.second, released.second)
    with pytest.raises(InvalidInput, match="second, first and edge"):
        ReleasedMoments.from_state({"second": released.second})


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"features": torch.full((2, 8), 1000)}, "features"),
        # The square of this entry is 0 modulo 2^64.
        ({"features": torch.tensor([[1 << 32] + [0] * 7] * 2)}, "features"),
        ({"labels": torch.tensor([0, 3])}, "labels"),
        ({"labels": torch.tensor([0, -1])}, "labels"),
        ({"labels": torch.tensor([0])}, "labels"),
    ],
)
def test_records_beyond_the_bounds_are_refused(change: dict[str, Any], name: str) -> None:
    mechanism = ObjectiveRelease(epsilon=1.0, length=8, classes=3)
    given = {"features": torch.zeros(2, 8, dtype=torch.int64), "labels": torch.tensor([0, 1])}
    with pytest.raises(InvalidInput, match=f"^{name}: expected"):
        moments.contributions(mechanism, **{**given, **change})


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"map": "fourier"}, "map"),
        ({"map": "scattering", "row_shape": (7,)}, "map"),
        ({"size": 0}, "size"),
        ({"bandwidth": -1.0}, "bandwidth"),
        ({"window": 100, "map": "scattering"}, "window"),
    ],
)
def test_bad_maps_are_refused_by_name(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidInput, match=f"^{name}: expected"):
        FeatureMap(**{"row_shape": (8, 8), **fields})


@pytest.mark.parametrize("value", [1.5, -0.1, float("nan")])
def test_rows_outside_their_public_range_are_refused(value: float) -> None:
    with pytest.raises(InvalidInput, match=r"^x: expected entries in \[0, 1\]"):
        FeatureMap(row_shape=(3,))(torch.tensor([[0.0, value, 1.0]]), radius=100)


def test_the_least_integer_which_nan_becomes_is_refused() -> None:
    mechanism = ObjectiveRelease(epsilon=1.0, length=4, classes=2)
    rows = torch.rand(50, 4)
    rows[7, 2] = float("nan")
    features = (rows * 80).long()
    features[7, 2] = -(2**63)  # what x86 makes of NaN
    with pytest.raises(InvalidInput, match=r"^features: expected"):
        moments.contributions(mechanism, features, torch.zeros(50, dtype=torch.int64))
    with pytest.raises(PrivacyError, match=r"^features: expected"):
        to_radius(torch.tensor([[-(2**63), 0]]), 100)


def test_a_list_of_sizes_is_a_shape() -> None:
    mapped = FeatureMap(map="scattering", row_shape=[9, 10])  # type: ignore[arg-type]
    assert mapped == FeatureMap(map="scattering", row_shape=(9, 10))
    assert mapped(images((9, 10), 3), radius=99).shape == (3, mapped.length)


@pytest.mark.parametrize("fields", KINDS.values(), ids=KINDS)
def test_no_rows_have_no_features(fields: dict[str, Any]) -> None:
    mapped = FeatureMap(**fields)
    assert mapped(torch.zeros(0, *mapped.row_shape), radius=9).shape == (0, mapped.length)


@pytest.mark.parametrize("shape", [(), 28, (0, 3), (28, 2.5), "28"])
def test_shapes_that_are_none_are_refused(shape: Any) -> None:
    with pytest.raises(InvalidInput, match=r"^row_shape: expected"):
        FeatureMap(row_shape=shape)


def test_arrays_and_radii_below_one_are_refused() -> None:
    mapped = FeatureMap(row_shape=(7,))
    with pytest.raises(InvalidInput, match=r"^x: expected a torch.Tensor"):
        mapped(np.zeros((2, 7)), radius=9)  # type: ignore[arg-type]
    for radius in (0, -3, 2.5):
        with pytest.raises(InvalidInput, match=r"^radius: expected"):
            mapped(images((7,)), radius=radius)  # type: ignore[arg-type]


@pytest.mark.parametrize("weight", [1e300, 1e-300, 1e4, 0.0])
def test_weights_that_leave_one_sum_without_noise_are_refused(weight: float) -> None:
    with pytest.raises(InvalidInput, match=r"^weight: expected"):
        ObjectiveRelease(epsilon=1.0, length=4, classes=2, weight=weight)
