"""Writes into parameters that torch hands to no parameter: ``.data``, aliases, NumPy."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import dpkern.engine.between_steps as between_steps
from dpkern.base.errors import PrivacyError
from dpkern.engine.parameter import ParameterData
from dpkern.engine.provenance.boundary import WRITTEN
from tests.engine.engine_run import Run
from tests.engine.test_engine_escapes import after, first, plain, train

Write = Callable[[nn.Parameter, float], Any]


def vector(run: Run) -> Tensor:
    return parameters_to_vector(run.module.parameters()).detach()


def through(write: Write) -> Callable[[Run, Any], Any]:
    """Write into the first layer's weights, gradients on as in a loop."""

    def use(run: Run, value: Any) -> None:
        with torch.enable_grad():
            write(first(run).weight, value)

    return use


LOOKED_AT: dict[str, Write] = {
    "scaled": lambda p, v: p.data.mul_(0.9),
    "scaled by a function of the loss": lambda p, v: p.data.mul_(math.exp(-v)),
    "copied": lambda p, v: p.data.copy_(torch.ones(6, 4)),
    "copied from a parameter": lambda p, v: p.data.copy_(p.flip(0)),
    "filled": lambda p, v: p.data.fill_(math.exp(-v)),
    "drawn": lambda p, v: nn.init.normal_(p.data),
    "an entry": lambda p, v: p.data.__setitem__((0, 0), math.exp(-v)),
    "a view": lambda p, v: p.data.view(-1)[3:5].add_(1.0),
    "an alias of data": lambda p, v: p.data.detach().add_(1.0),
    "a piece": lambda p, v: p.data.chunk(2)[1].add_(1.0),
    "all at once": lambda p, v: torch._foreach_mul_([p.data], 0.9),
    "out": lambda p, v: torch.mul(p.data, 0.9, out=p.data),
    "replaced": lambda p, v: setattr(p, "data", torch.full((6, 4), math.exp(-v))),
    "replaced by a sum": lambda p, v: setattr(p, "data", p.data + 1.0),
    "cut at a function of the loss": lambda p, v: p.data.clamp_(max=math.exp(v)),
}


@pytest.fixture
def without_contents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare no contents: what follows is seen as it happens."""
    monkeypatch.setattr(between_steps.BetweenSteps, "keep", lambda self, steps: None)


@pytest.mark.usefixtures("without_contents")
@pytest.mark.parametrize("name", LOOKED_AT)
def test_writes_through_data_are_a_condition(name: str) -> None:
    assert WRITTEN in train(after(through(LOOKED_AT[name]))).engine.step.ledger.conditions


REFUSED: dict[str, Write] = {
    "scaled": lambda p, v: p.data.mul_(v),
    "added": lambda p, v: p.data.add_(torch.ones(6, 4), alpha=v),
    "filled": lambda p, v: p.data.fill_(0.1 * v),
    "an entry": lambda p, v: p.data.__setitem__(0, v),
    "a view": lambda p, v: p.data[0].copy_(torch.ones(4)).mul_(v),
    "all at once": lambda p, v: torch._foreach_mul_([p.data], v),
    "drawn": lambda p, v: nn.init.constant_(p.data, v),
}


@pytest.mark.parametrize("name", REFUSED)
def test_numbers_of_samples_written_through_data_are_refused(name: str) -> None:
    with pytest.raises(PrivacyError, match="numbers that do not depend on the samples"):
        train(after(through(REFUSED[name])))


@pytest.mark.usefixtures("without_contents")
def test_parameters_replaced_by_a_vector_are_a_condition() -> None:
    def shrink(run: Run, value: float) -> None:
        vector_to_parameters(0.9 * vector(run), run.module.parameters())

    assert WRITTEN in train(after(shrink)).engine.step.ledger.conditions


HARMLESS: dict[str, Callable[[Run, Any], Any]] = {
    "cut": lambda r, v: [p.data.clamp_(-0.01, 0.01) for p in r.module.parameters()],
    "cleared": through(lambda p, v: p.data[0].zero_()),
    "the same again": through(lambda p, v: setattr(p, "data", p.data.clone())),
    "the same vector": lambda r, v: vector_to_parameters(vector(r), r.module.parameters()),
    "moved": lambda r, v: r.module.to("cpu", torch.float32),
    "cast and cast back": lambda r, v: r.module.double().float(),
    "gradients cleared": lambda r, v: [setattr(p, "grad", None) for p in r.module.parameters()],
    "trained as before": lambda r, v: [
        setattr(p, "requires_grad", True) for p in r.module.parameters()
    ],
    "averaged": lambda r, v: [
        torch.zeros_like(p.data).mul_(0.9).add_(p.data, alpha=0.1) for p in r.module.parameters()
    ],
    "read": through(
        lambda p, v: (p.data.norm().item(), p.data.tolist(), f"{p.data.mean():.3f}", p.data + v)
    ),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_leaves_parameters_as_they_are_is_no_condition(name: str) -> None:
    assert WRITTEN not in train(after(HARMLESS[name])).engine.step.ledger.conditions


UNSEEN: dict[str, Callable[[Run], Any]] = {
    "by numpy": lambda r: first(r).weight.data.numpy().__imul__(0.5),
    "through an alias": lambda r: first(r).weight.detach().mul_(0.5),
    "through a state dict": lambda r: r.module.state_dict()["0.weight"].mul_(0.5),
    "through a view": lambda r: first(r).weight.detach()[0].add_(1.0),
    "into the optimizer's state": lambda r: [
        state["momentum_buffer"].mul_(0.5) for state in r.optimizer.state.values()
    ],
}


@pytest.mark.parametrize("name", UNSEEN)
def test_contents_tell_what_no_call_has_shown(name: str) -> None:
    def conditions(write: Callable[[Run], Any], first: int = 0) -> Any:
        run = Run(private=False)
        run.optimizer = torch.optim.SGD(run.module.parameters(), lr=0.1, momentum=0.9)
        run.make(unsafe_seed=None)
        for i, (x, y) in enumerate(run.loader):
            run.optimizer.zero_grad()
            plain(run, x, y)
            run.optimizer.step()
            if i >= first:
                write(run)
        return run.engine.step.ledger.conditions

    assert WRITTEN in conditions(UNSEEN[name])
    assert WRITTEN in conditions(UNSEEN[name], 3)  # behind the fourth step
    assert WRITTEN not in conditions(lambda run: None)


def test_copies_of_data_are_ordinary_tensors() -> None:
    run = Run()
    weight = first(run).weight
    data = weight.data
    assert type(data) is ParameterData
    assert data.data_ptr() == weight.data_ptr()
    stream = io.BytesIO()
    torch.save({"weight": data}, stream)
    stream.seek(0)
    others: list[Any] = [copy.deepcopy(data), pickle.loads(pickle.dumps(data)), data + 0]
    others += [data.clone(), data.double().float(), torch.load(stream)["weight"]]
    for other in others:
        assert type(other) is Tensor
        assert torch.equal(other, weight)
    parameter = nn.Parameter(data)
    assert isinstance(copy.deepcopy(parameter), nn.Parameter)
    assert type(copy.deepcopy(parameter)) is nn.Parameter
    assert repr(data).startswith("tensor(")


def test_data_is_ordinary_again_after_detach() -> None:
    run = Run()
    run.engine.detach()
    assert type(first(run).weight.data) is Tensor
