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
    assert not step(Gated(place, mixes=False), x).verification._inconclusive
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
    assert len(passes) == 2 + 2  # the comparison of two; one sample, then all


class Swapped(nn.Module):
    """A layer behind which the gradients of two samples change places, and the numbers do not."""

    def __init__(self, places: tuple[int, int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.places = nn.Linear(E, E), places

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        order = torch.arange(len(x))
        order[list(self.places)] = order[list(self.places[::-1])]
        other = torch.take_along_dim(h, order[:, None], 0)
        output: Tensor = h.detach() + other - other.detach()
        return output


@pytest.mark.parametrize("places", [(0, 1), (3, 9), (5, B - 1)])
def test_two_passes_of_all_samples_tell_every_pair(
    places: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("a pass of one sample was needed")

    monkeypatch.setattr(probe.Probe, "run", refuse)
    step(nn.Sequential(nn.Linear(E, E), nn.GELU(), nn.LayerNorm(E)), torch.randn(B, E))
    for _ in range(5):  # the factors are secret
        with pytest.raises(UnsupportedModule, match="gradients in the rows of other samples"):
            step(Swapped(places), torch.randn(B, E))


def test_operations_that_round_otherwise_have_one_sample_sent_backward() -> None:
    class Rounds(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, g: Tensor) -> Tensor:  # type: ignore[override]
            return g + g.sign() * g.abs().clamp(max=1e-7)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(E, E)

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = Rounds.apply(self.layer(x))  # type: ignore[no-untyped-call]
            return output

    assert step(Model(), torch.randn(B, E)).verification.sites


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("place", ["output", "between", "hook"])
def test_numbers_of_16_bits_between_uses_are_no_mixing(place: str, kind: torch.dtype) -> None:
    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(E, E), nn.Linear(E, E)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            if place == "hook":
                h.register_hook(lambda g: g.to(kind).float())
            output: Tensor = self.last(h.to(kind).float() if place == "between" else h)
            return output.to(kind).float() if place == "output" else output

    for seed in range(6):
        torch.manual_seed(seed)
        assert step(Narrow(), torch.randn(B, E)).verification.sites
