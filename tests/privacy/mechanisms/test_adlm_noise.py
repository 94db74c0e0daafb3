"""AdLM's releases: where draws stand, what is shared, what labels cost, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dpkern.base.errors import InvalidInput, PrivacyError
from dpkern.base.rng import Key, Purpose, Stream
from dpkern.nn import polynomial
from dpkern.ops import noise
from dpkern.privacy.mechanisms import RandomizedResponse, adlm_noise
from dpkern.privacy.theory import adlm

KEY = Key.from_unsafe_seed(4)
LAPLACE = KEY.stream(Purpose.LAPLACE, 0)
ROUNDING = KEY.stream(Purpose.ROUNDING, 0)
SYMBOLS = KEY.stream(Purpose.SYMBOLS, 0)

pytestmark = pytest.mark.usefixtures("one_thread")


def unit(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(*shape, generator=generator, dtype=torch.float64)


def inputs(x: Tensor, scales: Tensor, **options: object) -> Tensor:
    given = {"reach": 1.0, "stream": LAPLACE, "rounding": ROUNDING, **options}
    return adlm_noise.private_inputs(x, scales, **given)  # type: ignore[arg-type]


def test_inputs_are_the_lattice_release_of_each_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    x, scales = unit(6, 40), 0.5 + unit(40)
    before = x.clone()
    found = inputs(x, scales, position=300)
    plain = noise.add_noise(
        x.clone(),
        stream=LAPLACE,
        position=300,
        distribution="laplace",
        scale=scales.repeat(6, 1),
        rounding=ROUNDING,
    )
    assert torch.equal(found, plain)
    assert torch.equal(x, before)
    # Pieces of any size, by the function itself or by its caller, give the same bits.
    monkeypatch.setattr(adlm_noise, "_ENTRIES_AT_ONCE", 80)
    assert torch.equal(inputs(x, scales, position=300), found)
    assert torch.equal(inputs(x[2:], scales, position=300 + 2 * 40), found[2:])
    assert torch.equal(inputs(x.T.contiguous().T, scales, position=300), found)


def test_noise_is_laplace_of_each_features_scale() -> None:
    # Lemma 4 prints a density that grows with |x| (A5); ours has 1 - 1/e within one scale.
    scales = torch.tensor([0.5, 4.0], dtype=torch.float64)
    drawn = inputs(torch.zeros(20_000, 2, dtype=torch.float64), scales).abs() / scales
    assert drawn.mean(0).tolist() == pytest.approx([1, 1], abs=0.03)
    share = (drawn < 1).double().mean(0).tolist()
    assert share == pytest.approx([1 - 1 / math.e] * 2, abs=0.015)


def test_a1_sharing() -> None:
    x, batch = unit(300, 6), 300
    layer = adlm.FirstLayer(features=6, maps=2)
    scales = adlm.input_scales(torch.ones(6).double(), layer=layer, batch=batch, epsilon=0.5)
    shared = inputs(x, scales, noise_sharing="shared_per_feature")
    # Published, shared: differences of records are released exactly.
    assert torch.allclose(shared[1:] - shared[:-1], x[1:] - x[:-1], rtol=0, atol=1e-12)
    assert float((shared - x).abs().max()) > 0
    # Published, iid: they are not, but a batch's sum has only 1 / |L| of the printed variance.
    own = inputs(x, scales) - x
    printed = adlm.sum_variance(float(scales[0]), batch, noise_sharing="shared_per_feature")
    measured = float(own.sum(0).square().mean())
    assert measured < 6 * printed / batch
    assert adlm.input_cost(scales, reach=1.0) == pytest.approx(batch * 0.5 / 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normalised_inputs_never_exceed_what_the_noise_is_scaled_for(dtype: torch.dtype) -> None:
    for features in range(2, 40):
        rho = adlm.reach("unit_l2", features)
        x = adlm.normalised_inputs(torch.full((1, features), 255, dtype=dtype), 0.0, 255.0)
        assert x.double().max() <= rho
        assert float(x.max()) == pytest.approx(rho, rel=2e-7)
        found = inputs(x, torch.ones(features).to(x), reach=rho)
        assert found.dtype == dtype


def test_coefficients_are_perturbed_label_scalars() -> None:
    targets = F.one_hot(torch.arange(150) % 4, 4).double()
    found = adlm_noise.private_coefficients(
        targets, scale=1.5, stream=LAPLACE, rounding=ROUNDING, position=10
    )
    assert found.constant == math.log(2)
    clean = polynomial.label_coefficients(targets)
    assert adlm_noise.quadratic_position(10, 600) == 1024
    assert adlm_noise.quadratic_position(0, 512) == 512
    for mine, start, position in (
        (found.linear, clean.linear, 10),
        (found.quadratic, clean.quadratic, 1024),
    ):
        again = noise.add_noise(
            start.clone(),
            stream=LAPLACE,
            position=position,
            distribution="laplace",
            scale=1.5,
            rounding=ROUNDING,
        )
        assert torch.equal(mine, again)
    assert float((found.linear - clean.linear - found.quadratic + clean.quadratic).std()) > 1


def test_relevance_and_bias_are_released_at_their_scale() -> None:
    mean = unit(500)
    for release in (adlm_noise.private_relevance, adlm_noise.private_bias):
        found = release(mean, scale=0.1, stream=LAPLACE, rounding=ROUNDING)
        assert float((found - mean).abs().mean()) == pytest.approx(0.1, rel=0.15)
        cells = found / (0.1 / 64)
        assert torch.allclose(cells, cells.round(), rtol=0, atol=1e-6)


def test_an_exactly_irrelevant_feature_still_gets_finite_noise() -> None:
    # Noisy relevances stand on a lattice: exact zeros happen, which (16) would divide by.
    noisy = adlm_noise.private_relevance(
        torch.zeros(2000, dtype=torch.float64), scale=0.1, stream=LAPLACE, rounding=ROUNDING
    )
    assert bool((noisy == 0).any())
    scales = adlm.local_scales(adlm.budget_shares(noisy), epsilon=1.0)
    assert bool(inputs(torch.zeros(1, 2000, dtype=torch.float64), scales).isfinite().all())


def test_corrected_labels_are_unbiased_and_so_is_the_loss() -> None:
    labels = torch.arange(3).repeat(20_000)
    one_hot = F.one_hot(labels, 3).double()
    scores = torch.tensor([[0.3, -1.0, 0.6]], dtype=torch.float64).expand(len(labels), -1)
    true = polynomial.label_scalar(scores, polynomial.label_coefficients(one_hot))
    told = adlm_noise.randomized_targets(labels, classes=3, epsilon=1.0, stream=SYMBOLS)
    noisy = adlm_noise.noisy_targets(one_hot, epsilon=1.0, stream=LAPLACE, rounding=ROUNDING)
    for targets in (told, noisy):
        for label in range(3):
            mean = targets[labels == label].mean(0)
            assert mean.tolist() == pytest.approx(one_hot[label].tolist(), abs=0.06)
        loss = polynomial.label_scalar(scores, polynomial.label_coefficients(targets))
        assert float(loss.mean()) == pytest.approx(float(true.mean()), abs=0.03)
    assert float((noisy - one_hot).abs().mean()) == pytest.approx(2, rel=0.03)
    # Lap(2 / eps) at an L1 distance of 2, and a channel of at most eps.
    channel = RandomizedResponse(epsilon=1.0, categories=3)
    assert channel.ldp_epsilon <= 1
    kept = (told.argmax(1) == labels).double().mean()
    assert float(kept) == pytest.approx(channel.truth, abs=0.01)


def test_labels_cost_more_than_printed() -> None:
    scale = adlm.label_scale(classes=10, hidden=25, batch=1800, epsilon=0.1)
    targets = torch.eye(10, dtype=torch.float64)[:2]
    clean = polynomial.label_coefficients(targets)
    distance = (clean.linear[0] - clean.linear[1]).abs().sum()
    assert float(distance) / scale == pytest.approx(1.986 * 0.1, rel=3e-4)


def test_bad_input_is_refused() -> None:
    x, scales = unit(3, 4), torch.ones(4, dtype=torch.float64)
    zero = scales.clone()
    zero[1] = 0
    streams: dict[str, Stream] = {"stream": LAPLACE, "rounding": ROUNDING}
    for call in (
        lambda: inputs(x + 1, scales),
        lambda: inputs(x - 1, scales),
        lambda: inputs(x * torch.nan, scales),
        lambda: inputs(x, scales, reach=0.01),
        lambda: inputs(x, scales[:3]),
        lambda: inputs(x, zero),
        lambda: inputs(x, scales, noise_sharing="none"),
        lambda: inputs(x[0], scales),
        lambda: adlm_noise.private_coefficients(x, scale=1.0, **streams),
        lambda: adlm_noise.noisy_targets(torch.zeros(2, 3), epsilon=1.0, **streams),
        lambda: adlm_noise.noisy_targets(torch.eye(3), epsilon=0.0, **streams),
        lambda: adlm_noise.private_relevance(x, scale=1.0, **streams),
        lambda: adlm_noise.private_bias(x[0], scale=0.0, **streams),
        lambda: adlm_noise.randomized_targets(
            torch.tensor([0, 3]), classes=3, epsilon=1.0, stream=SYMBOLS
        ),
    ):
        with pytest.raises(InvalidInput):
            call()
    with pytest.raises(PrivacyError):
        inputs(x, scales, rounding=LAPLACE)
