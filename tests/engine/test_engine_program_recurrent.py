"""Replayed steps of recurrent layers: the bits of recorded ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpkern.engine.program import recurrent
from tests.engine.replayed_loops import STEPS, Loop, both

ARITHMETICS = ("float", "exact")


class Recurrent(nn.Module):
    """A recurrent layer between linear ones, with what a test may change of it."""

    def __init__(self, layer: type[nn.RNNBase], hidden: int = 6, **options: Any) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.layer = layer(5, hidden, batch_first=True, **options)
        self.head = nn.Linear(hidden * (2 if self.layer.bidirectional else 1), 3)
        self.skips = self.twice = self.starts = self.ends = False

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x))
        state: Any = None
        if self.starts:
            count = self.layer.num_layers * (2 if self.layer.bidirectional else 1)
            ones = x.new_ones(count, len(x), self.layer.hidden_size)
            state = (ones, ones) if isinstance(self.layer, nn.LSTM) else ones
        y, last = self.layer(y, state)
        if self.ends:
            last = last[0] if isinstance(last, tuple) else last
            y = y + last[-1][:, None]
        if self.twice:
            y = self.layer(y[..., :5])[0]
        return self.head(y.mean(1))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "tanh": lambda: Recurrent(nn.RNN),
    "relu": lambda: Recurrent(nn.RNN, nonlinearity="relu"),
    "without biases": lambda: Recurrent(nn.LSTM, bias=False),
    "two layers": lambda: Recurrent(nn.GRU, num_layers=2),
    "both directions": lambda: Recurrent(nn.LSTM, bidirectional=True),
    "wide": lambda: Recurrent(nn.LSTM, 40),
    "wide gru": lambda: Recurrent(nn.GRU, 40),
}


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize("length", [1, 4, 12])
@pytest.mark.parametrize("name", LAYERS)
def test_recurrent_layers_are_replayed(name: str, length: int, arithmetic: str) -> None:
    run = both(make=LAYERS[name], arithmetic=arithmetic, length=length, keep_budget=0)
    assert run.replays >= STEPS - 3, run.reasons
    assert run.reasons[-1] == ""
    assert run.engine.adapter.packed.replays >= STEPS - 3


def set_flag(name: str) -> Callable[[Loop], None]:
    def change(run: Loop) -> None:
        setattr(run.module, name, True)

    return change


def freeze_bias(run: Loop) -> None:
    run.module.layer.bias_ih_l0.requires_grad_(False)


def two_losses(run: Loop) -> None:
    run.losses = 2


def evaluate(run: Loop) -> None:
    run.module.eval()
    with torch.no_grad():
        run.module(torch.randn(3, 4, 5))
    run.module.train()


CHANGES = {
    "another use": set_flag("twice"),
    "given states": set_flag("starts"),
    "last states": set_flag("ends"),
    "a frozen bias": freeze_bias,
    "two losses": two_losses,
    "an evaluation pass": evaluate,
}


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize("name", CHANGES)
def test_changes_in_the_middle_give_the_same_bits(name: str, arithmetic: str) -> None:
    both(CHANGES[name], make=LAYERS["lstm"], arithmetic=arithmetic, keep_budget=0)


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize(
    "options",
    [
        {"sampling": "poisson", "steps": 16},
        {"max_physical_batch_size": 3, "steps": 24},
        {"nan": True, "steps": 16},
    ],
)
def test_other_loops_give_the_same_bits(arithmetic: str, options: dict[str, Any]) -> None:
    run = both(make=LAYERS["gru"], arithmetic=arithmetic, keep_budget=0, **options)
    assert run.replays > 1


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
def test_kept_gradients_are_replayed(arithmetic: str) -> None:
    for change in (None, set_flag("twice"), two_losses):
        options: dict[str, Any] = {"keep_budget": 10.0, "length": 64, "arithmetic": arithmetic}
        run = both(change, make=LAYERS["lstm"], **options)
        if change is None and arithmetic == "float":  # integers of so small a layer are not
            assert any(site.kept for site in run.engine.capture.program.flat.sites)


def test_a_program_that_takes_any_weights_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    class Two(nn.Module):
        """Two layers with one input weight; a test exchanges their other weights."""

        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.RNN(5, 6, batch_first=True), nn.RNN(5, 6, batch_first=True)
            self.head = nn.Linear(6, 3)
            self.turned = False

        def forward(self, x: Tensor) -> Tensor:
            names = ("weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
            layers = (self.two, self.one) if self.turned else (self.one, self.two)
            found = 0.0
            for layer, other in zip(layers, (self.one, self.two), strict=True):
                weights = [other.weight_ih_l0, *(getattr(layer, name) for name in names)]
                start = x.new_zeros(1, len(x), 6)
                found = found + torch.rnn_tanh(x, start, weights, True, 1, 0.0, True, False, True)[
                    0
                ].mean(1)
            return self.head(found)

    def turn(run: Loop) -> None:
        run.module.turned = True

    both(turn, make=Two, keep_budget=0)
    monkeypatch.setattr(recurrent.RecurrentSite, "trains", lambda *_: True)
    with pytest.raises(AssertionError):
        both(turn, make=Two, keep_budget=0)
