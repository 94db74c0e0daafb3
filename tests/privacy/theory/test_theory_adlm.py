"""AdLM's formulas: printed numbers, and what each of its claims really costs."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from dpkern.base.errors import InvalidInput
from dpkern.papers.adlm import loss as adlm_loss
from dpkern.privacy.theory import adlm

near = partial(pytest.approx, rel=1e-6)
PUBLISHED = torch.tensor([0.1, -0.3, 0.2, 0.4], dtype=torch.float64)

pytestmark = pytest.mark.usefixtures("one_thread")


def toy(**sizes: int) -> adlm.FirstLayer:
    return adlm.FirstLayer(**{"features": 4, "maps": 3, "positions": 2, "patch": 2, **sizes})


def test_v27_lemma_7() -> None:
    assert adlm_loss.LEMMA_7 == pytest.approx(0.3146624, abs=5e-8)
    assert adlm_loss.published_bound(10) == pytest.approx(3.1466238, abs=5e-8)
    e = math.e
    terms = 4 * e / (1 + e) ** 3 + e * (e - 1) / (1 + e) ** 3 - (1 - e) / (e * (1 + e) ** 3)
    assert terms == near(adlm_loss.LEMMA_7, rel=1e-14)


def test_v28_loss_sensitivity() -> None:
    assert adlm.loss_sensitivity(10, 25) == 1812.5
    assert adlm.loss_sensitivity(10, 30) == 2550


def test_v29_budget_shares() -> None:
    found = adlm.budget_shares(PUBLISHED)
    assert found.tolist() == near([0.4, 1.2, 0.8, 1.6], rel=1e-14)
    assert float(found.sum()) == near(4)


@pytest.mark.parametrize(
    ("setting", "h0_count", "neurons", "sensitivity", "scale", "cost", "cost_l2"),
    [
        ("MNIST", "units", 25088, 39_337_984, 21854.4, 0.0359, 0.00128),
        ("MNIST", "maps", 32, 50_176, 27.88, 28.125, 1.004),
        ("MNIST", "one", 1, 1568, 0.871, 900, None),
        ("MNIST", "patch", 32, 1600, 0.889, None, None),
        ("CIFAR-10", "units", 131072, 805_306_368, 111848, 0.0275, 0.0005),
        ("CIFAR-10", "maps", 128, 786_432, 109.2, 28.125, 0.507),
    ],
)
def test_a3_readings_of_the_first_layer(
    setting: str,
    h0_count: str,
    neurons: int,
    sensitivity: float,
    scale: float,
    cost: float | None,
    cost_l2: float | None,
) -> None:
    (case,) = [c for c in adlm.table() if (c.setting, c.h0_count) == (setting, h0_count)]
    assert (case.neurons, case.sensitivity) == (neurons, sensitivity)
    assert case.scale == pytest.approx(scale, rel=6e-4)
    if cost is not None:
        assert case.cost == pytest.approx(cost, rel=3e-3)
    if cost_l2 is not None:
        assert case.cost_l2 == pytest.approx(cost_l2, rel=2e-2)


def test_a3_costs_of_labels_under_the_printed_scale() -> None:
    for setting, ratio in ((adlm.MNIST, 1.986), (adlm.CIFAR10, 5.647)):
        cost = adlm.published_label_cost(
            classes=setting.classes, hidden=setting.hidden, batch=setting.batch, epsilon=0.1
        )
        assert cost == pytest.approx(0.1 * ratio, rel=3e-4)


@pytest.mark.parametrize("h0_count", adlm.COUNTS)
def test_published_input_cost_is_that_of_its_scales(h0_count: str) -> None:
    shares = adlm.budget_shares(PUBLISHED)
    given = {"layer": toy(), "batch": 7, "epsilon": 0.3, "h0_count": h0_count}
    cost = adlm.published_input_cost(reach=0.5, **given)
    assert adlm.input_cost(adlm.input_scales(shares, **given), reach=0.5) == near(cost)
    if h0_count != "patch":
        assert cost == near(7 * 0.5 * 0.3 / (2 * toy().counted(h0_count)[0]))


def test_a1_noise_of_a_batch_sum() -> None:
    batch, scale = 50, 0.7
    printed = 2 * (batch * scale) ** 2
    assert adlm.sum_variance(scale, batch, noise_sharing="shared_per_feature") == near(printed)
    own = adlm.sum_variance(scale, batch, noise_sharing="iid_per_example")
    assert own == near(printed / batch)
    drawn = torch.distributions.Laplace(0.0, scale)
    torch.manual_seed(3)
    sums = drawn.sample((4000, batch)).double().sum(1)
    assert float(sums.var()) == pytest.approx(own, rel=0.1)


def test_a1_published_claims_fail_and_the_local_form_keeps_them() -> None:
    shares = adlm.budget_shares(PUBLISHED, beta_min=0.1)
    published = adlm.input_scales(
        shares, layer=adlm.FirstLayer(features=4, maps=1), batch=9, epsilon=0.5
    )
    assert adlm.input_cost(published, reach=1.0) == near(4.5 * 0.5)
    shared = adlm.input_cost(published, reach=1.0, noise_sharing="shared_per_feature")
    assert shared == math.inf
    for reach in (1.0, 0.5):
        local = adlm.local_scales(shares, epsilon=0.5, reach=reach)
        assert adlm.input_cost(local, reach=reach) == near(0.5)


def test_a2_one_record_moves_everybodys_relevance() -> None:
    """Least squares: 99 records (1, 1) leave open which weight counts; the last one decides."""

    def mean_relevance(last: list[float]) -> Tensor:
        x = torch.tensor([[1.0, 1.0]] * 99 + [last], dtype=torch.float64)
        weight = torch.linalg.pinv(x) @ torch.ones(100, dtype=torch.float64)
        parts = x * weight  # the rule (8) of one linear layer with mu = 0 and F = z
        low, high = parts.amin(1, keepdim=True), parts.amax(1, keepdim=True)
        return ((parts - low) / (high - low)).mean(0)

    moved = float((mean_relevance([1.0, 0.0]) - mean_relevance([0.0, 1.0])).abs().sum())
    claimed = adlm.relevance_sensitivity(2, 100)
    assert claimed == 0.04
    assert moved == near(2)
    # What is left without the claim: relevances are bounded.
    kept = adlm.published_relevance_cost(100, epsilon=1.0)
    assert moved / (claimed / 1.0) <= kept * (1 + 1e-9)
    assert kept == 50
    assert adlm.published_relevance_cost(100, epsilon=1.0, network="public") == 0.5


def test_relevance_sensitivities() -> None:
    assert adlm.relevance_sensitivity(784, 60_000) == pytest.approx(0.02613, rel=2e-4)
    assert adlm.relevance_sensitivity(3072, 60_000) == near(0.1024)
    assert adlm.relevance_sensitivity(3072, 50_000) == near(0.12288)
    assert adlm.exact_relevance_sensitivity(784, 60_000) == near(784 / 60_000)
    signed = adlm.exact_relevance_sensitivity(784, 60_000, relevance_range="signed")
    assert signed == adlm.relevance_sensitivity(784, 60_000)


def test_a4_lemma_7_is_no_bound_of_what_it_says() -> None:
    z, h = 0.8, 1e-3

    def f1(t: float) -> float:
        return math.log1p(math.exp(-t))

    slope = (f1(z + 2 * h) - 2 * f1(z + h) + 2 * f1(z - h) - f1(z - 2 * h)) / (2 * h**3)
    assert adlm_loss.third_derivative(z) == pytest.approx(slope, rel=1e-4)
    assert abs(adlm_loss.printed_third_derivative(z) - slope) > 0.1
    # Corrected: exact at 1 (V13), and bounds that hold for every product of H terms.
    assert -adlm_loss.remainder(1) == pytest.approx(0.004885493, rel=2e-7)
    assert adlm_loss.corrected_bound(1) == near(1 / 192)
    assert -adlm_loss.remainder(1) <= adlm_loss.corrected_bound(1) < adlm_loss.LAGRANGE
    assert pytest.approx(0.015143, abs=5e-7) == adlm_loss.LAGRANGE
    for bound in (0.1, 1, 2, 3, 3.1, 5, 25):
        for share in (-1, -0.6, 0.3, 1):
            assert -adlm_loss.corrected_bound(bound) <= adlm_loss.remainder(share * bound) <= 0
    # Scores of a hidden layer of 25 units in [0, 1] leave |s| <= 1, and lemma 7 with them.
    assert -adlm_loss.remainder(5) > adlm_loss.LEMMA_7


def test_a6_tiny_shares() -> None:
    relevance = torch.tensor([1e-9, 0.0, 0.5, 0.5], dtype=torch.float64)
    published = adlm.budget_shares(relevance)
    scales = adlm.local_scales(published, epsilon=1.0)
    assert bool(scales.isfinite().all())
    assert float(scales.max()) > 1e8
    assert float(published[1]) == float(published[0])  # the guard, not a division by zero
    floored = adlm.budget_shares(relevance, beta_min=0.05)
    assert float(floored.sum()) == near(4)
    assert float(floored.min()) >= 0.05 / 1.05
    assert float(adlm.local_scales(floored, epsilon=1.0).max()) <= 4 * 1.05 / 0.05
    assert adlm.budget_shares(torch.zeros(3)).tolist() == [1, 1, 1]
    smallest = torch.tensor([5e-324, 1.0], dtype=torch.float64)
    assert bool(adlm.budget_shares(smallest).isfinite().all())


def test_inputs_end_at_one_or_have_norm_one() -> None:
    x = torch.tensor([[0.0, 255.0, 255.0, 51.0], [255.0] * 4])
    unit = adlm.normalised_inputs(x, 0.0, 255.0, input_range="unit")
    assert unit[0].tolist() == pytest.approx([0, 1, 1, 0.2])
    printed = adlm.normalised_inputs(x, torch.zeros(4), torch.full((4,), 255.0))
    assert torch.equal(printed, unit / 2)
    assert float(printed.norm(dim=1).max()) <= 1


@pytest.mark.parametrize(
    "call",
    [
        lambda: adlm.normalised_inputs(torch.tensor([[math.nan]]), 0, 1),
        lambda: adlm.normalised_inputs(torch.tensor([[1.5]]), 0, 1),
        lambda: adlm.normalised_inputs(torch.tensor([[1.0]]), 1, 1),
        lambda: adlm.normalised_inputs(torch.ones(3), 0, 1),
        lambda: adlm.budget_shares(torch.tensor([1.0, math.inf])),
        lambda: adlm.budget_shares(torch.ones(0)),
        lambda: adlm.budget_shares(torch.ones(2), beta_min=1.5),
        lambda: adlm.FirstLayer(features=4, maps=0),
        lambda: adlm.FirstLayer(features=4, maps=1, patch=5),
        lambda: adlm.hidden_sensitivity(toy(), h0_count="all"),
        lambda: adlm.reach("other", 3),
        lambda: adlm.sum_variance(1.0, 3, noise_sharing="none"),
        lambda: adlm.input_cost(torch.ones(2), reach=1.0, noise_sharing="none"),
        lambda: adlm.published_relevance_cost(3, epsilon=1.0, network="mine"),
        lambda: adlm.exact_relevance_sensitivity(3, 3, relevance_range="mine"),
        lambda: adlm.label_scale(classes=2, hidden=3, batch=0, epsilon=1.0),
        lambda: adlm_loss.corrected_bound(0),
    ],
)
def test_bad_input_is_refused(call: object) -> None:
    assert callable(call)
    with pytest.raises(InvalidInput):
        call()
