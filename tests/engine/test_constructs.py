"""The table itself: models that train, and samples that meet where the table says so."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dpkern.engine.validate import static_findings
from tests.engine.construct_kit import B
from tests.engine.constructs import CONSTRUCTS, Construct, Refused

CASES = [pytest.param(case, id=case.name) for case in CONSTRUCTS]


def run(case: Construct, inputs: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
    """Losses and the gradients of their sum, of a new model: some models change when they run."""
    model = case.model()
    losses = case.losses(model(*inputs), inputs)
    assert losses.shape == (len(inputs[0]),)
    if losses.requires_grad:
        losses.sum().backward()
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            found[name] = grad.to_dense()
    return losses.detach(), found


def one_by_one(case: Construct) -> list[tuple[Tensor, dict[str, Tensor]]]:
    return [run(case, tuple(x[b : b + 1] for x in case.inputs)) for b in range(B)]


def distance(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).abs().max()) / max(float(wanted.abs().max()), 1e-300)


def test_names_are_unique() -> None:
    names = [case.name for case in CONSTRUCTS]
    assert len(set(names)) == len(names) > 100


@pytest.mark.parametrize("case", CASES)
def test_samples_meet_where_the_table_says_so(case: Construct) -> None:
    losses, together = run(case, case.inputs)
    alone = one_by_one(case)
    worst = distance(losses, torch.cat([loss for loss, _ in alone]))
    for name, grad in together.items():
        total = sum((grads[name] for _, grads in alone), torch.zeros_like(grad))
        worst = max(worst, distance(grad, total))
    assert (worst > 1e-3) if case.mixes else (worst <= case.tolerance)


@pytest.mark.parametrize("case", [case for case in CASES if case.values[0].expected == "correct"])
def test_samples_differ(case: Construct) -> None:
    """Else a wrong sample would not be noticed."""
    (_, first), (_, second), *_ = one_by_one(case)
    assert any(not torch.allclose(first[name], second[name]) for name in first)


@pytest.mark.parametrize("case", CASES)
def test_models_are_made_the_same_every_time(case: Construct) -> None:
    one, other = case.model().state_dict(), case.model().state_dict()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("case", CASES)
def test_nothing_static_is_said_against_correct_models(case: Construct) -> None:
    refused = [f for f in static_findings(case.model()) if f.severity == "refuse"]
    if isinstance(case.expected, Refused):
        assert all(case.expected.says in str(finding) for finding in refused)
    else:
        assert refused == []
