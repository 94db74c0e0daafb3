"""Updates of replayed steps: optimizers' numbers and state that change in every way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dpkern.engine.program import known_optimizer
from dpkern.engine.program.packed_update import PackedUpdate
from dpkern.ops import direct
from tests.engine.replayed_loops import STEPS, Loop, both, loop

ADAMS: dict[str, dict[str, Any]] = {
    "Adam": {"optimizer": torch.optim.Adam, "numbers": {"lr": 0.01}},
    "AdamW": {"optimizer": torch.optim.AdamW, "numbers": {"lr": 0.01, "weight_decay": 0.1}},
    "two groups": {
        "optimizer": torch.optim.Adam,
        "numbers": {"lr": 0.01, "eps": 1e-3},
        "groups": lambda net: [
            {"params": list(net.head.parameters()), "lr": 0.1, "betas": (0.5, 0.9)},
            {"params": [p for n, p in net.named_parameters() if "head" not in n]},
        ],
    },
}


@pytest.mark.parametrize("name", ADAMS)
def test_adam_is_packed(name: str) -> None:
    run = both(**ADAMS[name])
    packed = run.engine.adapter.packed
    assert packed.replays >= STEPS - 3, packed.reason
    with torch._C.DisableTorchFunctionSubclass():
        counts = [state["step"] for state in run.optimizer.state.values()]
    assert set(map(float, counts)) == {STEPS}


def set_number(name: str, value: Any) -> Callable[[Loop], None]:
    def change(run: Loop) -> None:
        run.optimizer.param_groups[0][name] = value

    return change


def older(run: Loop) -> None:
    next(iter(run.optimizer.state.values()))["step"].add_(3)


def other_count(run: Loop) -> None:
    for state in run.optimizer.state.values():
        state["step"] = state["step"].clone()


def reload(run: Loop) -> None:
    run.optimizer.load_state_dict(run.optimizer.state_dict())


def forget(run: Loop) -> None:
    run.optimizer.state.clear()


def freeze(run: Loop) -> None:
    run.module.extra.weight.requires_grad_(False)


CHANGES = {
    "another learning rate": set_number("lr", 0.1),
    "other betas": set_number("betas", (0.5, 0.6)),
    "decay": set_number("weight_decay", 0.3),
    "amsgrad": set_number("amsgrad", True),
    "maximize": set_number("maximize", True),
    "one parameter is older": older,
    "counts are other tensors": other_count,
    "state is loaded": reload,
    "state is forgotten": forget,
    "a parameter is frozen": freeze,
}


@pytest.mark.parametrize("name", CHANGES)
def test_change_of_adam_in_the_middle_gives_the_same_bits(name: str) -> None:
    if name == "amsgrad":  # torch's own state has no maximum then: both ways say so
        with pytest.raises(KeyError):
            both(CHANGES[name], **ADAMS["Adam"])
        return
    both(CHANGES[name], **ADAMS["Adam"])


def test_an_update_that_does_not_count_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def second(self: PackedUpdate) -> bool:
        for group in self._groups or ():
            group.packed = direct.BYTES["Rule"](group.rule.packed(2))
        return True

    monkeypatch.setattr(PackedUpdate, "_count", second)
    with pytest.raises(AssertionError):
        both(**ADAMS["Adam"])


def with_rate_in_a_tensor(kind: Any) -> Loop:
    """Train replayed and recorded with a learning rate that is written in place; the first run."""

    def change(run: Loop) -> None:
        run.optimizer.param_groups[0]["lr"].fill_(0.5)

    runs = []
    for replayed in (True, False):
        run = loop(replayed, optimizer=kind, numbers={"lr": torch.tensor(0.01)})
        run.train(STEPS, change, 6)
        runs.append(run)
    assert runs[0].replays > 0
    assert all(map(torch.equal, runs[0].weights, runs[1].weights))
    return runs[0]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_learning_rate_in_a_tensor_is_read_at_every_step(kind: Any) -> None:
    assert "tensors" in with_rate_in_a_tensor(kind).engine.adapter.packed.reason


def test_a_rate_that_is_not_read_again_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_optimizer, "_shows_changes", lambda numbers: True)
    with pytest.raises(AssertionError):
        with_rate_in_a_tensor(torch.optim.SGD)


def test_gradients_of_frozen_parameters_are_cleared() -> None:
    run = loop(True)
    frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
    run.optimizer.add_param_group({"params": [frozen]})
    frozen.grad = torch.ones(2)
    run.optimizer.zero_grad()
    assert frozen.grad is None


def test_a_zero_grad_of_the_users_own_is_called() -> None:
    calls = []

    class Own(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            calls.append(set_to_none)
            super().zero_grad(set_to_none)

    run = loop(True, optimizer=Own)
    run.train(6)
    assert len(calls) == 6
