"""Block-circulant layers in replayed steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpkern.engine.program.circulant import CirculantSite
from dpkern.nn import BlockCirculantLinear
from dpkern.privacy.mechanisms import GReDP, SpectralDP
from tests.engine.replayed_loops import STEPS, Loop, both


class Blocks(nn.Module):
    """Circulant layers with and without a bias, in both conventions, padded and not."""

    def __init__(self, *, flat: bool = False, large: bool = False) -> None:
        super().__init__()
        hidden = 384 if large else 8
        self.first = BlockCirculantLinear(20 if flat else 5, hidden, block=2)
        self.column = BlockCirculantLinear(hidden, hidden, block=4, convention="column")
        self.bare = BlockCirculantLinear(hidden, 6, block=3, bias=False)
        self.cut = BlockCirculantLinear(6, 7, block=2, bias=False)
        self.head = nn.Linear(7, 3)
        self.flat = flat
        self.doubles = self.twice = self.edits = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.column(torch.tanh(self.first(x.flatten(1) if self.flat else x)))
        if self.twice:
            y = self.column(y)
        if self.edits:
            y = y * 2
            y.mul_(0.5)
        y = self.cut(torch.tanh(self.bare(y) * (2 if self.doubles else 1)))
        return self.head(y) if self.flat else F.relu(self.head(y)).mean(1)


class Joined(nn.Module):
    """Two circulant layers side by side, whose output gradients are parts of one."""

    def __init__(self, *, flat: bool) -> None:
        super().__init__()
        inputs = 20 if flat else 5
        self.left = BlockCirculantLinear(inputs, 8, block=2)
        self.right = BlockCirculantLinear(inputs, 4, block=4)
        self.head = nn.Linear(12, 3)
        self.flat = flat

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1) if self.flat else x
        y = self.head(torch.cat([self.left(x), self.right(x)], -1))
        return y if self.flat else y.mean(1)


def double(run: Loop) -> None:
    run.module.doubles = True


def use_twice(run: Loop) -> None:
    run.module.twice = True


def edit(run: Loop) -> None:
    run.module.edits = True


def freeze_bias(run: Loop) -> None:
    run.module.column.bias.requires_grad_(False)


def freeze_weight(run: Loop) -> None:
    run.module.column.weight.requires_grad_(False)


def turn_around(run: Loop) -> None:
    run.module.column.convention = "row"


def two_losses(run: Loop) -> None:
    run.losses = 2


ARITHMETICS = pytest.mark.parametrize("arithmetic", ["float", "exact"])
CHANGES = [None, double, use_twice, edit, freeze_bias, freeze_weight, turn_around, two_losses]


@ARITHMETICS
@pytest.mark.parametrize("flat", [False, True], ids=["positions", "one position"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__ if c else "nothing")
def test_replayed_steps_have_the_bits_of_recorded_ones(
    change: Callable[[Loop], None] | None, flat: bool, arithmetic: str
) -> None:
    run = both(change, make=lambda: Blocks(flat=flat), arithmetic=arithmetic)
    if change is None:
        assert run.replays >= STEPS - 3
        assert run.reasons[-1] == ""


@pytest.mark.parametrize("flat", [False, True], ids=["positions", "one position"])
def test_gradients_with_gaps_in_memory_are_replayed(flat: bool) -> None:
    run = both(make=lambda: Joined(flat=flat))
    assert run.replays >= STEPS - 3


@ARITHMETICS
def test_kernels_of_large_layers_are_replayed(arithmetic: str) -> None:
    run = both(make=lambda: Blocks(flat=True, large=True), arithmetic=arithmetic)
    assert run.replays >= STEPS - 3


def test_corrected_mechanisms_train_circulant_layers() -> None:
    """Corrected GReDP is DP-SGD there, in exact arithmetic; Spectral-DP has a map of its own."""
    both(make=lambda: Blocks(flat=True), mechanism=GReDP)
    kept = partial(SpectralDP, keep_fraction=0.75)
    both(make=lambda: Blocks(flat=True), mechanism=kept, replays=False)


@ARITHMETICS
def test_samples_that_are_not_finite_are_dropped(arithmetic: str) -> None:
    both(make=lambda: Blocks(flat=True), nan=True, arithmetic=arithmetic)


def test_a_bias_that_is_summed_wrongly_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    honest = CirculantSite.sum_bias
    monkeypatch.setattr(CirculantSite, "sum_bias", lambda s, g, out: honest(s, 1.01 * g, out))
    with pytest.raises(AssertionError):
        both(make=lambda: Blocks(flat=True))
