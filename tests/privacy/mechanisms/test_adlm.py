"""AdLM and ILM: what is claimed, what is certified, and what a release really shows."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from dpkern.base.errors import InvalidInput
from dpkern.base.rng import Key, Purpose, Stream
from dpkern.objective.adlm import pretrained
from dpkern.objective.adlm_networks import build, setting
from dpkern.objective.adlm_release import release, relevance_of
from dpkern.privacy.accounting import accountants, events
from dpkern.privacy.mechanisms import ILM, AdLM, adlm_noise
from dpkern.privacy.theory import adlm
from dpkern.privacy.theory.adlm import CIFAR10, MNIST, AdlmSetting, FirstLayer
from tests.objective.adlm_data import labelled

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = AdlmSetting(
    name="tiny",
    layer=FirstLayer(features=2, maps=1),
    records=20_000,
    batch=20,
    classes=3,
    hidden=2,
)


def betas_of(mechanism: AdLM) -> torch.Tensor:
    d = mechanism.setting.layer.features
    return mechanism.betas(torch.linspace(-1, 2, d, dtype=torch.float64))


@pytest.mark.parametrize("kind", [AdLM, ILM])
@pytest.mark.parametrize("labels", ["response", "laplace"])
@pytest.mark.parametrize("sizes", [MNIST, CIFAR10], ids=["mnist", "cifar10"])
@pytest.mark.parametrize("epsilon", [0.25, 8.0])
def test_corrected_keeps_its_promise(
    kind: type[AdLM], labels: str, sizes: AdlmSetting, epsilon: float
) -> None:
    mechanism = kind(epsilon=epsilon, setting=sizes, labels=labels)
    certified = mechanism.epsilon_certified(visits=10_000)
    assert certified <= epsilon == mechanism.epsilon_claimed()
    assert certified == pytest.approx(epsilon, rel=1e-9)
    # The scales that are drawn with are those that it was computed from.
    scales = mechanism.input_scales(betas_of(mechanism))
    cost = adlm.input_cost(scales, reach=mechanism.reach)
    assert cost == pytest.approx(mechanism.costs()["inputs"], rel=1e-12)
    assert cost <= mechanism.budgets[1]
    if labels == "laplace":
        assert mechanism.label_scale == pytest.approx(2 / mechanism.costs()["labels"], rel=1e-12)
    else:
        assert mechanism.costs()["labels"] <= mechanism.channel.epsilon == mechanism.budgets[2]
    if kind is AdLM:
        bound = sizes.layer.features / sizes.records
        spent = bound / mechanism.relevance_scale
        assert spent == pytest.approx(mechanism.costs()["relevances"], rel=1e-12)
    assert 0 < mechanism.certified_delta() < 1e-20
    assert mechanism.notes == ()


def test_published_costs_are_those_of_the_audit() -> None:
    third = 1 / 3
    for sizes, labels in ((MNIST, 1.98620690), (CIFAR10, 5.64705882)):
        options: dict[str, Any] = {"epsilon": 0.3, "setting": sizes, "mode": "published"}
        public = AdLM(**options, relevance_from="public_network")
        costs = public.costs()
        assert costs["inputs"] == pytest.approx(28.125 * 0.1)
        assert costs["labels"] == pytest.approx(labels * 0.1)
        assert costs["relevances"] == pytest.approx(0.05)  # relevances in [0, 1]: half the bound
        assert public.epsilon_certified() == pytest.approx(sum(costs.values()), rel=1e-6)
        assert public.epsilon_certified() > sum(costs.values())
        signed = replace(public, relevance_range="signed")
        assert signed.costs()["relevances"] == pytest.approx(0.1)
        assert public.epsilon_claimed() == 0.3
        assert public.budgets == pytest.approx((0.1,) * 3)
        identical = ILM(**options)
        assert identical.budgets == pytest.approx((0, 0.15, 0.15))
        assert identical.costs()["inputs"] == pytest.approx(28.125 * 0.15)
        units = replace(identical, h0_count="units", shares=(third, third, third))
        expected = {"MNIST": 0.0359, "CIFAR-10": 0.0275}[sizes.name]
        assert units.costs()["inputs"] / 0.15 == pytest.approx(expected, abs=6e-5)
        scales = public.input_scales(betas_of(public))
        assert adlm.input_cost(scales, reach=1.0) == pytest.approx(costs["inputs"])
        small = replace(identical, input_range="unit_l2")
        root = math.sqrt(sizes.layer.features)
        assert small.costs()["inputs"] == pytest.approx(28.125 * 0.15 / root)


@pytest.mark.parametrize(
    ("options", "part", "note"),
    [
        ({}, "relevances", "A2"),
        ({"noise_sharing": "shared_per_feature"}, "inputs", "A1"),
        ({"coefficient_form": "feature_expanded"}, "labels", "A3"),
    ],
    ids=["a2_network_of_the_data", "a1_shared", "a3_expanded"],
)
def test_what_certifies_nothing(options: dict[str, str], part: str, note: str) -> None:
    public = {} if part == "relevances" else {"relevance_from": "public_network"}
    mechanism = AdLM(epsilon=1, setting=MNIST, mode="published", **public, **options)
    costs = mechanism.costs()
    assert [name for name, cost in costs.items() if math.isinf(cost)] == [part]
    assert mechanism.epsilon_certified() == math.inf
    assert mechanism.event_spec() == events.non_private()
    assert mechanism.certified_for == "nothing"
    assert note in [each.id for each in mechanism.notes]
    assert mechanism.certificate(seeded=False).to_dict()["epsilon"] == "inf"


def test_notes_and_relation_say_what_is_done() -> None:
    options: dict[str, Any] = {"epsilon": 1, "setting": MNIST, "mode": "published"}
    assert [n.id for n in AdLM(**options).notes] == ["A1", "A2", "A3", "A4", "A5", "A6"]
    assert [n.id for n in ILM(**options).notes] == ["A1", "A3", "A4", "A5"]
    floor = AdLM(**options, beta_min=0.2, relevance_from="public")
    assert [n.id for n in floor.notes] == ["A1", "A3", "A4", "A5"]
    assert floor.costs().keys() == {"inputs", "labels"}
    assert floor.relation == "replace_one, local, one record"
    assert AdLM(epsilon=1, setting=MNIST).relation == "replace_one, one record"


def test_a6_floor_of_shares() -> None:
    relevance = torch.tensor([1e-9, 1.0, 2.0], dtype=torch.float64)
    layer = FirstLayer(features=3, maps=1)
    sizes = replace(TINY, layer=layer)
    published = AdLM(epsilon=1, setting=sizes, mode="published")
    assert float(published.input_scales(published.betas(relevance)).max()) > 1e8
    corrected = AdLM(epsilon=1, setting=sizes)
    assert float(corrected.betas(relevance).min()) > 0.09
    assert float(corrected.betas(relevance).sum()) == pytest.approx(3)


@pytest.mark.parametrize("labels", ["response", "laplace"])
def test_event_and_certificate_agree(labels: str) -> None:
    mechanism = AdLM(epsilon=1.5, setting=MNIST, labels=labels)
    certificate = mechanism.certificate(seeded=False)
    assert certificate.epsilon == mechanism.epsilon_certified()
    assert certificate.delta == mechanism.tail()
    assert json.loads(json.dumps(mechanism.to_dict()))["setting"]["name"] == "MNIST"
    leaves = events.leaves(json.loads(certificate.event))
    pure = 0.0
    for leaf in leaves:
        values = dict(leaf.parameters)
        if leaf.kind == events.LAPLACE_EVENT:  # two records differ by twice the bound
            pure += leaf.count * 2 / values["noise_multiplier"]
        else:
            k, noise = values["num_buckets"], values["noise_parameter"]
            pure += leaf.count * math.log(k / noise - k + 1)
    assert pure == pytest.approx(certificate.epsilon, rel=1e-9)
    assert mechanism.certificate(seeded=True).epsilon == math.inf
    if labels == "laplace":  # which accountants take as they are
        bounds = accountants.upper_bounds(leaves, "replace_one", 1e-9, 784)
        assert certificate.epsilon * 0.9 < min(bounds.values()) <= certificate.epsilon * 1.005


def test_nothing_is_certified_where_the_cut_tails_weigh() -> None:
    # One feature may have all of a large budget; identical shares spread it.
    options: dict[str, Any] = {"epsilon": 100, "setting": MNIST, "labels": "laplace"}
    adaptive = AdLM(**options, shares=(0.1, 0.8, 0.1))
    assert adaptive.epsilon_certified() == math.inf
    assert adaptive.tail() > 2.0**-40
    identical = ILM(**options, shares=(0.1, 0.8, 0.1))
    assert 99 < identical.epsilon_certified() <= 100
    assert identical.certified_delta() < 1e-20
    large = ILM(epsilon=1e5, setting=MNIST, labels="laplace")
    assert large.epsilon_certified() == math.inf
    assert large.certified_delta() == 0


def test_a1_one_record_shows_more_than_claimed() -> None:
    """The likelihood ratio of an event, estimated: above the claim as published, not corrected."""
    count = TINY.records
    low = torch.zeros(count, 2)
    x = torch.cat([low, low + 1])
    found = {}
    for mode in ("published", "corrected"):
        mechanism = ILM(epsilon=0.4, setting=TINY, mode=mode)
        scales = mechanism.input_scales(mechanism.betas())
        key = Key.from_unsafe_seed(3)
        noisy = adlm_noise.private_inputs(
            x.double(),
            scales,
            reach=1.0,
            stream=key.stream(Purpose.LAPLACE, 0),
            rounding=key.stream(Purpose.ROUNDING, 0),
        )
        above = (noisy >= 1).all(1)
        found[mode] = math.log(float(above[count:].sum()) / float(above[:count].sum()))
    assert found["published"] == pytest.approx(2.0, abs=0.15)  # |L| eps2 / (2 |h_0|) = 10 eps2
    assert found["published"] > 4 * 0.4
    assert found["corrected"] == pytest.approx(0.2, abs=0.1)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"epsilon": 0}, "epsilon"),
        ({"epsilon": math.nan}, "epsilon"),
        ({"epsilon": 1e-7}, "epsilon"),
        ({"epsilon": 200}, "epsilon"),
        ({"mode": "local"}, "mode"),
        ({"shares": (0.5, 0.5)}, "shares"),
        ({"shares": (0.5, 0.5, 0.5)}, "shares"),
        ({"shares": (0.5, 0.5, 0.0)}, "shares"),
        ({"beta_min": 2.0}, "beta_min"),
        ({"noise_sharing": "shared_per_feature"}, "noise_sharing"),
        ({"h0_count": "units"}, "h0_count"),
        ({"coefficient_form": "feature_expanded"}, "coefficient_form"),
        ({"relevance_from": "trained_on_data"}, "relevance_from"),
        ({"labels": "coefficients"}, "labels"),
        ({"labels": "laplace", "mode": "published"}, "labels"),
        ({"setting": replace(MNIST, batch=60_001)}, "setting.batch"),
        ({"setting": replace(MNIST, classes=1)}, "setting.classes"),
        ({"setting": "mnist"}, "setting"),
    ],
)
def test_refused(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput, match=field.replace(".", r"\.")):
        AdLM(**{"epsilon": 1.0, "setting": MNIST, **options})


def sizes_of(architecture: str = "digits", batch: int = 20) -> AdlmSetting:
    data = labelled()
    network = build(architecture, data.row_shape, data.classes, seed=0)
    return setting(network, data.row_shape, records=len(data.x), batch=batch)


def test_release_is_what_the_configuration_says() -> None:
    data, key = labelled(), Key.from_unsafe_seed(7)
    relevance = torch.linspace(0.1, 1, 64, dtype=torch.float64)
    clean = data.x.flatten(1)
    mechanism = AdLM(epsilon=2.0, setting=sizes_of())
    found = release(mechanism, data, key, relevance=relevance)
    again = release(mechanism, data, Key.from_unsafe_seed(7), relevance=relevance)
    assert torch.equal(found.inputs, again.inputs)
    assert found.relevance is not None
    assert found.targets is not None
    assert not torch.equal(found.relevance, relevance)
    assert torch.equal(found.betas, mechanism.betas(found.relevance))
    drawn = (found.inputs - clean).double().abs().mean(0) / found.scales
    assert float(drawn.mean()) == pytest.approx(1, abs=0.05)  # 60 draws of each of 64 features
    assert found.bias_noise is None
    assert found.coefficients is None
    assert found.offset is None
    assert len(found.targets.unique()) == 2  # the truth and a lie, unbiased
    told = (found.targets.argmax(1) == data.y).double().mean()
    assert float(told) == pytest.approx(mechanism.channel.truth, abs=0.15)
    other = release(mechanism, data, Key.from_unsafe_seed(8), relevance=relevance)
    assert not torch.equal(other.inputs, found.inputs)

    published = AdLM(epsilon=2.0, setting=sizes_of(), mode="published")
    found = release(published, data, key, relevance=relevance)
    assert found.coefficients is not None
    assert found.targets is None
    assert found.bias_noise is not None
    assert found.bias_noise.shape == (8,)
    quadratic = (found.coefficients.quadratic - 1 / 8).abs().mean()
    assert float(quadratic) == pytest.approx(published.label_scale, rel=0.25)
    public = replace(published, relevance_from="public")
    assert torch.equal(release(public, data, key, relevance=relevance).relevance, relevance)

    shared = ILM(
        epsilon=2.0, setting=sizes_of(), mode="published", noise_sharing="shared_per_feature"
    )
    found = release(shared, data, key)
    assert found.offset is not None
    assert float(found.offset.abs().mean()) > 1
    torch.testing.assert_close(found.inputs, clean + found.offset, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"labels": "laplace"}, {"mode": "published"}])
def test_every_release_has_streams_of_its_own(
    options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int, int]] = []
    plain = Key.stream

    def spy(key: Key, purpose: Purpose, step: int, stream: int = 0) -> Stream:
        seen.append((int(purpose), step, stream))
        return plain(key, purpose, step, stream)

    monkeypatch.setattr(Key, "stream", spy)
    mechanism = AdLM(epsilon=2.0, setting=sizes_of(), **options)  # type: ignore[arg-type]
    release(mechanism, labelled(), Key.from_unsafe_seed(1), relevance=torch.ones(64).double())
    assert len(seen) == len(set(seen)) >= 5


@pytest.mark.parametrize("mode", ["published", "corrected"])
def test_relevances_and_targets_get_the_noise_that_is_accounted(mode: str) -> None:
    data, key = labelled(), Key.from_unsafe_seed(5)
    labels = "laplace" if mode == "corrected" else None
    mechanism = AdLM(epsilon=3.0, setting=sizes_of(), mode=mode, labels=labels)
    relevance = torch.full((64,), 0.5, dtype=torch.float64)
    found = release(mechanism, data, key, relevance=relevance)
    assert found.relevance is not None
    bound = 2 * 64 / 60 if mode == "published" else 64 / 60
    drawn = (found.relevance - relevance).abs().mean()  # of 64
    assert float(drawn) == pytest.approx(bound / 1.0, rel=0.35)
    if found.targets is not None:
        true = torch.nn.functional.one_hot(data.y, data.classes)
        drawn = (found.targets - true).abs().mean()  # of 180
        assert float(drawn) == pytest.approx(2.0, rel=0.2)


def test_nothing_is_drawn_without_noise() -> None:
    data = labelled()
    mechanism = ILM(epsilon=math.inf, setting=sizes_of(), input_range="unit_l2")
    assert mechanism.epsilon_certified() == math.inf
    assert set(mechanism.costs().values()) == {math.inf}
    assert mechanism.event_spec() == events.non_private()
    assert mechanism.to_dict()["epsilon"] == "inf"
    found = release(mechanism, data, Key.from_unsafe_seed(0))
    torch.testing.assert_close(found.inputs, data.x.flatten(1) / 8)
    assert found.targets is not None
    assert torch.equal(found.targets.argmax(1), data.y)
    assert found.coefficients is None
    assert found.bias_noise is None


def test_release_refuses_what_does_not_fit() -> None:
    data, key = labelled(), Key.from_unsafe_seed(0)
    with pytest.raises(InvalidInput, match="relevance"):
        release(AdLM(epsilon=1, setting=sizes_of()), data, key)
    with pytest.raises(InvalidInput, match="relevance"):
        release(ILM(epsilon=1, setting=sizes_of()), data, key, relevance=torch.ones(64).double())
    with pytest.raises(InvalidInput, match="data"):
        release(ILM(epsilon=1, setting=MNIST), data, key)


def test_relevance_finds_the_bars() -> None:
    data = labelled()
    network = pretrained(data, "digits", epochs=8, batch=20)
    mechanism = AdLM(epsilon=1, setting=sizes_of())
    mean = relevance_of(mechanism, network, data)
    # Sums are exact, so one record moves them by its own relevance and no rounding besides.
    sums = mean * len(data.x) * 2**24
    assert float((sums - sums.round()).abs().max()) < 1e-5
    relevance = mean.view(8, 8)
    assert float(relevance[:6].mean()) > float(relevance[6:].mean())
    predicted = relevance_of(replace(mechanism, relevance_target="predicted"), network, data)
    assert predicted.shape == (64,)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"x": labelled().x * 2}, "x"),
        ({"x": labelled().x - 0.5}, "x"),
        ({"x": labelled().x.masked_fill(labelled().x > 0.8, math.nan)}, "x"),
        ({"x_test": labelled().x_test[:, :4]}, "x_test"),
        ({"x": torch.zeros(0, 8, 8), "y": torch.zeros(0).long()}, "x"),
        ({"y": torch.zeros(60).long()}, "y"),
        ({"y": labelled().y + 1}, "y"),
        ({"y_test": labelled().y_test - 1}, "y_test"),
        ({"classes": 1}, "classes"),
    ],
)
def test_bad_data_is_refused(change: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidInput) as error:
        replace(labelled(), **change)
    assert str(error.value).startswith(name)
