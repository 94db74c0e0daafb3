"""Models whose convolutions have their channels last in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.engine.replayed_loops import STEPS, Loop, both, loop

pytestmark = pytest.mark.usefixtures("one_thread")


class Images(nn.Module):
    """Convolutions over planes with a norm between two of them, in any order of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(1, 8, 3, padding=1)
        self.groups = nn.GroupNorm(2, 8)
        self.two = nn.Conv2d(8, 12, 3, stride=2, padding=1)
        self.three = nn.Conv2d(12, 8, 2, bias=False)
        self.head = nn.Linear(8, 3)
        self.last = True

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None]
        x = x.to(memory_format=torch.channels_last) if self.last else x
        y = F.relu(self.groups(self.one(x)))
        return self.head(self.three(torch.tanh(self.two(y))).mean((2, 3)))


def make(memory_format: Any = torch.channels_last) -> Images:
    return Images().to(memory_format=memory_format)


def turn_to_rows(run: Loop) -> None:
    run.module.last = False


def turn_the_model(run: Loop) -> None:
    run.module.to(memory_format=torch.contiguous_format)


def test_steps_are_replayed_with_the_bits_of_the_recorded_path() -> None:
    run = both(make=make)
    assert run.replays >= STEPS - 3
    assert not run.module.two.weight.is_contiguous()


@pytest.mark.parametrize("change", [turn_to_rows, turn_the_model])
def test_an_order_that_changes_in_the_middle_gives_the_same_bits(change: Any) -> None:
    both(change, make=make)


@pytest.mark.parametrize("arithmetic", ["exact", "float"])
def test_they_train_as_a_model_in_rows_does(arithmetic: str) -> None:
    """The same noise: what is left is the rounding of torch's convolutions."""
    runs = [
        loop(True, make=lambda kind=kind: make(kind), arithmetic=arithmetic)
        for kind in (torch.channels_last, torch.contiguous_format)
    ]
    for run in runs:
        run.train(STEPS)
    for one, other in zip(*(run.weights for run in runs), strict=True):
        assert torch.allclose(one, other, atol=1e-4)
    assert runs[0].weights[4].stride() != runs[1].weights[4].stride()
