"""Weights that share output gradients share one norm in exact arithmetic, rounding included."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dpkern.engine import clipping
from dpkern.engine.capture import Capture
from dpkern.engine.exact_sums import rounding_error
from dpkern.engine.per_sample_gradients import LinearGradients
from dpkern.engine.uses import CapturedGradients
from dpkern.ops.clip import ClipResult
from dpkern.privacy.mechanisms import DPSGD
from dpkern.privacy.mechanisms.plan import Plan

B, T = 6, 9


class Model(nn.Module):
    """A recurrent layer and a head on its last state."""

    def __init__(self, layer: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer = layer(24, 32, batch_first=True)
        self.head = nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


def captured(
    layer: type[nn.RNNBase],
    arithmetic: str = "exact",
    *,
    samples: slice = slice(None),
    scale: float = 50.0,
) -> tuple[Capture, Plan]:
    """A pass forward and backward of samples from tiny to huge."""
    torch.manual_seed(0)
    module = Model(layer)
    capture = Capture(module, loss_reduction="sum")
    mechanism = DPSGD(noise_multiplier=1.1, max_grad_norm=0.5, arithmetic=arithmetic)
    plan = mechanism.plan([p.shape for p in capture.parameters])
    clipping.prepare(capture, lambda: plan)
    capture.attach()
    x = torch.randn(B, T, 24) * torch.tensor([1e-6, 0.1, 1, 10, 1e3, 0])[:, None, None]
    module(x[samples]).mul(scale).sum().backward()  # type: ignore[no-untyped-call]
    return capture, plan


def weights(capture: Capture) -> list[CapturedGradients]:
    """What arrived for the two weights of the recurrent layer."""
    return [slot.arrivals[0] for slot in capture.slots[:2]]


def squares_of(arrivals: list[CapturedGradients]) -> list[Tensor]:
    return [each.square for each in arrivals if each.square is not None]


def summed(capture: Capture, plan: Plan) -> ClipResult:
    result = clipping.clipped_sums(capture, plan)
    assert isinstance(result, ClipResult)
    return result


def test_a_shared_norm_bounds_the_parts_with_their_rounding() -> None:
    capture, _ = captured(nn.LSTM)
    arrivals = weights(capture)
    squares = squares_of(arrivals)
    assert not squares[1].any()
    apart = torch.zeros(B, dtype=torch.float64)
    for each in arrivals:
        assert isinstance(each.record, LinearGradients)
        real = torch.bmm(each.record.g.double().mT, each.record.a.double()).flatten(1).norm(dim=1)
        error = rounding_error(each.record)
        assert error is not None
        apart += (real + error).square()
    assert bool((squares[0] >= apart * (1 - 1e-12)).all())
    assert bool((squares[0] <= apart * (1 + 1e-2)).all())
    capture.detach()


def test_sums_differ_by_little_from_norms_apart() -> None:
    capture, plan = captured(nn.LSTM)
    shared = summed(capture, plan)
    capture.detach()
    capture, plan = captured(nn.LSTM)
    for arrival in weights(capture):
        arrival.square = None
    apart = summed(capture, plan)
    capture.detach()
    for one, other in zip(shared.sums, apart.sums, strict=True):
        assert int((one.long() - other.long()).abs().max()) <= 2 * B
    torch.testing.assert_close(shared.norms, apart.norms, rtol=1e-4, atol=0)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3, 1e20])
@pytest.mark.parametrize("layer", [nn.LSTM, nn.RNN])
def test_no_sample_exceeds_the_bound(layer: type[nn.RNNBase], scale: float) -> None:
    for number in range(B):
        capture, plan = captured(layer, samples=slice(number, number + 1), scale=scale)
        sums = [part.flatten().tolist() for part in summed(capture, plan).sums]
        capture.detach()
        most = plan.blocks[0].integer_bound
        assert most is not None
        assert sum(q * q for part in sums for q in part) <= most * most


def test_float_sums_share_norms_without_rounding() -> None:
    capture, _ = captured(nn.LSTM, "float")
    joined = weights(capture)
    assert not squares_of(joined)[1].any()
    total = sum(squares_of(joined))
    apart = sum(each.record.squared_norms() for each in joined)
    torch.testing.assert_close(total, apart, rtol=1e-4, atol=0)
    capture.detach()
