"""The batch-dimension probe sends those samples backward that reach the uses it looks at."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from dpkern.base.errors import UnsupportedModule
from dpkern.engine import probe
from dpkern.engine.capture import Capture

B, T, E = 12, 9, 5


class Packed(nn.Module):
    """The last state of an LSTM over sequences of many lengths."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head = nn.LSTM(E, 7, batch_first=True), nn.Linear(7, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        output: Tensor = self.head(self.layer(packed)[1][0][-1])
        return output


def step(module: nn.Module, *inputs: Tensor) -> Capture:
    """A capture after the forward and backward pass of one batch, which is then closed."""
    capture = Capture(module)
    capture.attach()
    try:
        capture.new_samples()
        module(*inputs).mean().backward()
        capture.check_closed()
    finally:
        capture.detach()
    return capture


@pytest.mark.parametrize("place", range(B))
def test_one_long_sequence_anywhere_is_enough(place: int) -> None:
    lengths = torch.ones(B, dtype=torch.int64)
    lengths[place] = T
    step(Packed(), torch.randn(B, T, E), lengths)


def test_lengths_at_random() -> None:
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, T + 1, (B,), generator=generator)
        step(Packed(), torch.randn(B, T, E, generator=generator), lengths)


class Gated(nn.Module):
    """A layer that only one sample of the batch reaches, and then whatever mixes there."""

    def __init__(self, place: int, mixes: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.place, self.mixes = nn.Linear(E, E), place, mixes

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        open_for = (torch.arange(len(x)) == self.place).float()[:, None]
        # Behind the gate the sample takes a gradient from its neighbour, and no number.
        other = h.roll(1, 0)
        output: Tensor = (h + (other - other.detach() if self.mixes else 0.0)) * open_for
        return output


@pytest.mark.parametrize("place", range(0, B, 3))
def test_a_sample_that_alone_reaches_a_use_is_looked_at(place: int) -> None:
    x = torch.randn(B, E)
    assert not step(Gated(place, mixes=False), x)._inconclusive
    with pytest.raises(UnsupportedModule, match="gradients in the rows of other samples"):
        step(Gated(place, mixes=True), x)


def test_what_no_sample_reaches_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []
    backward = probe.Probe._backward

    def counted(self: probe.Probe, loss: Tensor, anchor: Tensor) -> None:
        passes.append(self.sample)
        backward(self, loss, anchor)

    monkeypatch.setattr(probe.Probe, "_backward", counted)
    step(Gated(B, mixes=False), torch.randn(B, E))
    assert len(passes) == 2 + 2  # one sample, then all; the comparison of two halves
