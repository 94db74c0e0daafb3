"""Replayed steps of parameters that several uses share: gradients are added before their norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpkern.engine.program import joined
from tests.engine.replayed_loops import STEPS, Loop, both, loop

ARITHMETICS = ("float", "exact")


class Tied(nn.Module):
    """One weight as table and head."""

    def __init__(self, padding_idx: int | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 5, padding_idx=padding_idx)
        self.head = nn.Linear(5, 7)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        ids = (x[..., 0].abs() * 3).long() % 7
        return self.head(torch.tanh(self.table(ids))).mean(1)[:, :3]


class Twice(nn.Module):
    """Layers of each kind that run twice, over different positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 5)
        self.inner = nn.Linear(5, 5)
        self.conv = nn.Conv1d(4, 4, 3, padding=1)
        self.head = nn.Linear(5, 3)
        self.once = False

    def forward(self, x: Tensor) -> Tensor:
        ids = (x[..., 0].abs() * 3).long() % 7
        y = x + self.table(ids)
        if not self.once:
            y = y + self.table((ids + 1) % 7)
        y = torch.tanh(self.inner(torch.tanh(self.inner(y))))
        y = self.conv(torch.relu(self.conv(y)))
        return self.head(torch.tanh(self.inner(y.mean(1))))


class Vectors(nn.Module):
    """A layer over one position that runs three times, and two layers with one bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(20, 6)
        self.again = nn.Linear(6, 6)
        self.again.bias = self.first.bias
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x.flatten(1)))
        for _ in range(3):
            y = torch.tanh(self.again(y))
        return self.head(y)


class Biases(nn.Module):
    """Convolutions with one bias, and layers over positions with one weight and two biases."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv1d(4, 4, 3, padding=1), nn.Conv1d(4, 4, 1)
        self.two.bias = self.one.bias
        self.left, self.right = nn.Linear(5, 5), nn.Linear(5, 5)
        self.right.weight = self.left.weight
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.two(torch.tanh(self.one(x))))
        return self.head(torch.tanh(self.right(torch.tanh(self.left(y)))).mean(1))


class NormedTwice(nn.Module):
    """A normalisation that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(torch.tanh(self.norm(self.first(x)))).mean(1))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied": Tied,
    "tied with padding": lambda: Tied(2),
    "twice": Twice,
    "vectors": Vectors,
    "biases": Biases,
}


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("length", [4, 20])
def test_shared_parameters_are_replayed(name: str, arithmetic: str, length: int) -> None:
    if length == 20 and name not in ("tied", "tied with padding"):
        pytest.skip("sizes are those of four positions")
    run = both(make=MODELS[name], arithmetic=arithmetic, length=length)
    assert run.replays >= STEPS - 3
    assert run.reasons[-1] == ""
    assert run.engine.adapter.packed.replays >= STEPS - 3


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize(
    "options",
    [
        {"sampling": "poisson", "steps": 16},
        {"max_physical_batch_size": 3, "steps": 24},
        {"nan": True, "steps": 16},
        {"keep_budget": 0},
        {"keep_budget": 10.0},
    ],
)
def test_loops_of_shared_parameters_give_the_same_bits(
    arithmetic: str, options: dict[str, Any]
) -> None:
    assert both(make=Twice, arithmetic=arithmetic, **options).replays > 1


class OneBias(nn.Module):
    """Layers over many positions with one bias, whose weights' gradients are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.two.bias = self.one.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.two(torch.tanh(self.one(x)))).mean(1))


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
def test_a_shared_bias_beside_kept_gradients(arithmetic: str) -> None:
    run = both(keep_budget=10.0, make=OneBias, length=128, arithmetic=arithmetic)
    assert any(site.kept for site in run.engine.capture.program.flat.sites)

    def two_losses_at_last(run: Loop) -> None:
        run.losses = 2

    options = {"keep_budget": 10.0, "length": 128, "arithmetic": arithmetic}
    both(two_losses_at_last, make=OneBias, **options)


def use_once(run: Loop) -> None:
    run.module.once = True


def two_losses(run: Loop) -> None:
    run.losses = 2


def untie(run: Loop) -> None:
    run.module.table.weight.requires_grad_(False)


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize("change", [use_once, two_losses, untie])
def test_changes_in_the_middle_give_the_same_bits(
    change: Callable[[Loop], None], arithmetic: str
) -> None:
    both(change, make=Twice, arithmetic=arithmetic)


def test_other_orders_of_arrival_give_the_same_bits() -> None:
    class Branches(nn.Module):
        """Two uses, whose gradients arrive in the order of the losses."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(5, 5)
            self.head = nn.Linear(5, 3)
            self.turned = False

        def forward(self, x: Tensor) -> Tensor:
            one, two = self.inner(x), self.inner(x * 2)
            parts = (two, one) if self.turned else (one, two)
            return self.head(torch.tanh(parts[0]).mean(1)) + self.head(torch.tanh(parts[1]).mean(1))

    def turn(run: Loop) -> None:
        run.module.turned = True

    for arithmetic in ARITHMETICS:
        both(turn, make=Branches, arithmetic=arithmetic)


def test_what_is_not_joined_is_recorded_and_says_why() -> None:
    run = both(replays=False, make=NormedTwice)
    assert "norm.weight" in run.reasons[-1]


def test_gradients_that_are_normed_one_by_one_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    # The comparison of both ways fails where a use is left out.
    own = joined.merge
    monkeypatch.setattr(joined, "merge", lambda records: own(records[:1]))
    with pytest.raises(AssertionError):
        both(make=Tied)


def test_an_operand_of_a_shared_parameter_that_is_changed_is_refused() -> None:
    run = loop(True, make=Tied)
    run.train(5)

    def edit() -> None:
        held = next(h for h in run.engine.capture.program.run.held if h)
        with torch.no_grad():
            held[1].mul_(2)

    run.between = edit
    with pytest.raises(Exception, match="changed in place"):
        run.train(1)
