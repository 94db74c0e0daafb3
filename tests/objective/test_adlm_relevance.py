"""The network that relevances come from: pre-trained well enough, or refused."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from dpkern.base.errors import InvalidInput
from dpkern.objective.adlm import (
    AdlmSchedule,
    AdlmTraining,
    build,
    clean,
    pretrained,
    relevance_of,
    setting,
)
from dpkern.objective.adlm_data import Labelled
from dpkern.privacy.mechanisms import AdLM
from dpkern.train.data import load
from tests.objective.adlm_data import CLASSES, labelled

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def digits() -> Labelled:
    pytest.importorskip("sklearn")
    found = load("digits")
    return Labelled(
        x=found.x_train,
        y=found.y_train,
        x_test=found.x_test,
        y_test=found.y_test,
        classes=10,
    )


@pytest.fixture(scope="module")
def network(digits: Labelled) -> nn.Sequential:
    return pretrained(digits, "digits")


def mechanism_of(data: Labelled, network: nn.Sequential) -> AdLM:
    sizes = setting(network, data.row_shape, records=len(data.x), batch=50)
    return AdLM(epsilon=1, setting=sizes, relevance_from="public")


def test_informative_pixels_get_more_budget_than_constant_ones(
    digits: Labelled, network: nn.Sequential
) -> None:
    mechanism = mechanism_of(digits, network)
    betas = mechanism.betas(relevance_of(mechanism, network, digits))
    variance = digits.x.double().var(0).flatten()
    constant = variance < 1e-3
    assert 5 < int(constant.sum()) < 30
    assert float(betas[~constant].mean()) > 1.02 * float(betas[constant].mean())
    assert float(torch.corrcoef(torch.stack([betas, variance]))[0, 1]) > 0.3


def test_a_network_with_negative_scores_turns_the_budget_around(
    digits: Labelled, network: nn.Sequential
) -> None:
    negative = copy.deepcopy(network)
    with torch.no_grad():
        negative[-1].weight.neg_()
    mechanism = mechanism_of(digits, network)
    with pytest.raises(InvalidInput, match=r"^network: expected positive scores .*upside down"):
        relevance_of(mechanism, negative, digits)
    # Of a public network on secret records the question is not asked: its answer would tell.
    secret = replace(mechanism, relevance_from="public_network")
    upside_down = secret.betas(relevance_of(secret, negative, digits))
    variance = digits.x.double().var(0).flatten()
    assert float(torch.corrcoef(torch.stack([upside_down, variance]))[0, 1]) < 0


def test_a_network_below_the_bar_is_refused(digits: Labelled) -> None:
    with pytest.raises(InvalidInput, match=r"^pretraining: expected a network .*90%"):
        pretrained(digits, "digits", epochs=1, least_steps=1)
    with pytest.raises(InvalidInput, match=r"^bar: expected"):
        pretrained(digits, "digits", bar=1.5)


def test_adam_is_the_plain_rule_of_each_run_alone() -> None:
    data = labelled()
    networks = [build("dense", data.row_shape, CLASSES, seed=seed).double() for seed in range(2)]
    released = clean(data, batch=20, network=networks[0], input_range="unit")
    assert released.targets is not None
    inputs, targets = released.inputs.double(), released.targets.double()
    released = replace(released, inputs=inputs, targets=targets)
    schedule = AdlmSchedule(lr=0.01, epochs=3, optimizer="adam", loss="cross_entropy")
    both = AdlmTraining(data, [released] * 2, networks, schedule, seeds=[0, 1])
    both.run()
    alone = AdlmTraining(data, [released], networks[1:], schedule, seeds=[1])
    plain = build("dense", data.row_shape, CLASSES, seed=1).double().train()
    rule = torch.optim.Adam(plain.parameters(), lr=0.01)
    for step in range(alone.total_steps):
        epoch, place = divmod(step, alone.steps_per_epoch)
        rows = alone._order(1, epoch)[place]
        scores = plain(inputs[rows])
        rule.zero_grad()
        each = nn.functional.binary_cross_entropy_with_logits(
            scores, targets[rows], reduction="none"
        )
        each.sum(1).mean().backward()
        rule.step()
    for mine, torchs in zip(both.stack.network(1).parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, torchs.detach(), rtol=1e-6, atol=1e-8)


def test_a_resumed_run_of_adam_ends_where_the_whole_one_does() -> None:
    data = labelled()
    network = build("dense", data.row_shape, CLASSES, seed=0)
    released = clean(data, batch=20, network=network, input_range="unit")
    schedule = AdlmSchedule(lr=0.01, epochs=2, optimizer="adam")

    def fresh() -> AdlmTraining:
        return AdlmTraining(data, [released], [network], schedule, seeds=[0])

    whole, first, second = fresh(), fresh(), fresh()
    whole.run()
    for _ in range(3):
        first.one_step()
    second.load_state_dict(first.state_dict())
    second.run()
    for name, weight in whole.stack.state_dict().items():
        assert torch.equal(second.stack.state_dict()[name], weight)
