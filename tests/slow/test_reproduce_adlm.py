"""dpkern reproduce adlm: printed numbers beside what holds, and what is certified for each."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from dpkern.papers import ComparisonRow, ItemRequest, Result, reproduce
from dpkern.papers.adlm import loss as adlm_loss
from dpkern.privacy.theory import adlm

QUICK = ItemRequest(quick=True)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


def row(result: Result, *texts: str) -> ComparisonRow:
    """The one row whose setting and quantity hold all texts."""
    (found,) = (
        r for r in result.rows if all(text in f"{r.setting}; {r.quantity}" for text in texts)
    )
    return found


@pytest.fixture(scope="module")
def scales() -> Result:
    return reproduce("adlm", "sensitivity", QUICK)


@pytest.mark.parametrize(
    ("reading", "sensitivity", "scale", "cost", "cost_l2"),
    [
        ("MNIST, units (25088)", 39_337_984, 21854.4, 0.0359, 0.00128),
        ("MNIST, maps (32)", 50_176, 27.88, 28.125, 1.004),
        ("MNIST, one (1)", 1568, 0.871, 900, 32.14),
        ("MNIST, patch (32)", 1600, 0.889, 882, 31.5),
        ("CIFAR-10, units (131072)", 805_306_368, 111_848, 0.0275, 0.0005),
        ("CIFAR-10, maps (128)", 786_432, 109.2, 28.125, 0.507),
    ],
)
def test_every_reading_of_the_first_layer(
    scales: Result, reading: str, sensitivity: float, scale: float, cost: float, cost_l2: float
) -> None:
    assert row(scales, f"{reading}: D_h0".replace(": ", "; ")).ours == sensitivity
    for input_range, epsilon in (("unit", cost), ("unit_l2", cost_l2)):
        found = row(scales, f"{reading}, {input_range};")
        assert found.ours == pytest.approx(scale, rel=1e-3)
        assert found.epsilon_claimed == 1
        assert found.epsilon_certified == pytest.approx(epsilon, rel=1e-2)


def test_a1_independent_draws_leave_a_share_of_the_variance(scales: Result) -> None:
    share = row(scales, "iid_per_example", "variance").ours
    whole = row(scales, "shared_per_feature", "variance").ours
    assert isinstance(share, float)
    assert isinstance(whole, float)
    assert share * adlm.MNIST.batch == pytest.approx(2, rel=0.1)
    assert whole == pytest.approx(2, rel=0.15)
    # Shared, it is certified for nothing.
    assert row(scales, "shared_per_feature", "difference").epsilon_certified == math.inf


def test_a2_relevance_of_a_network_that_saw_the_data_is_certified_for_nothing(
    scales: Result,
) -> None:
    public = row(scales, "MNIST, 60000 records, network public")
    assert public.published == pytest.approx(0.02613, abs=5e-6)
    assert public.ours == pytest.approx(784 / 60_000)
    assert (public.epsilon_certified, public.relation) == (0.5, "replace_one")
    trained = row(scales, "MNIST, 60000 records, network trained_on_data")
    assert (trained.epsilon_certified, trained.relation) == (math.inf, "-")
    assert row(scales, "CIFAR-10, 60000", "public").published == pytest.approx(0.1024)
    assert row(scales, "CIFAR-10, 50000", "public").published == pytest.approx(0.12288)


def test_the_labels_and_the_corrected_form(scales: Result) -> None:
    assert row(scales, "MNIST, M 10", "D_F").published == 1812.5
    assert row(scales, "CIFAR-10, M 10", "D_F").published == 2550
    for name, cost in (("MNIST", 1.986), ("CIFAR-10", 5.647)):
        found = row(scales, f"{name}, M 10", "label scale").epsilon_certified
        assert found == pytest.approx(cost, abs=5e-4)
        assert row(scales, f"{name}, corrected").epsilon_certified == 1


def test_a6_a_floor_bounds_the_noise(scales: Result) -> None:
    loose = row(scales, "beta_min 0;").ours
    bounded = row(scales, "beta_min 0.1").ours
    assert isinstance(loose, float)
    assert isinstance(bounded, float)
    assert loose > 1e5
    assert bounded <= 11


def test_a4_lemma_7() -> None:
    found = reproduce("adlm", "lemma7", QUICK)
    first = row(found, "one class", "Lagrange")
    assert first.published == pytest.approx(0.3146624, abs=5e-8)
    assert first.ours == pytest.approx(0.015143, abs=5e-7)
    assert row(found, "one class", "best").ours == pytest.approx(1 / 192)
    assert row(found, "one class", "lowest").ours == pytest.approx(-0.004886, abs=1e-6)
    assert row(found, "10 classes, |s| <= 1").published == pytest.approx(3.1466238, abs=5e-8)
    # The printed third derivative has not even the right sign behind 0.
    steep = row(found, "z = 1;")
    assert isinstance(steep.ours, float)
    assert isinstance(steep.published, float)
    assert steep.ours < 0 < steep.published
    # Beyond |s| = 1, where nothing keeps the scores, the printed bound fails.
    assert -adlm_loss.remainder(5.0) > adlm_loss.LEMMA_7


def test_diagrams_and_heat_maps_are_drawn(tmp_path: Path) -> None:
    paths = reproduce("adlm", "fig2", QUICK).write(tmp_path)
    assert paths["png"].stat().st_size > 10_000
    boxes = json.loads(paths["json"].read_text())["panels"][0]["boxes"]
    assert [box["text"].split("\n")[0] for box in boxes][-2:] == ["linear 25", "10 scores"]
