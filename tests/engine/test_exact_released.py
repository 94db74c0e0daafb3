"""Integers of release coordinates: their norms, their sums, and what is not made this way."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dpkern
from dpkern.engine import exact_sums
from dpkern.engine.capture import Capture
from dpkern.engine.clip_norms import NormedGradients
from dpkern.engine.exact_sums import sums_in_place
from dpkern.privacy.mechanisms import AdaClip, GReDP, Plan, SpectralDP
from tests.engine.test_exact_sums import SIGMA, B, bound_of, integers, norm_square, summed


class Images(nn.Module):
    """Convolutions with and without a stride, biases, and a dense head."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(3, 6, 3, padding=1)
        self.two = nn.Conv2d(6, 8, 3, stride=2, bias=False)
        self.wide = nn.Conv2d(8, 20, (1, 2))
        self.head = nn.Linear(20, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.two(torch.tanh(self.one(x))))
        return self.head(torch.tanh(self.wide(y)).mean((2, 3)))


def built(scale: float = 1.0) -> tuple[nn.Module, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Images(), torch.randn(B, 3, 9, 9) * scale


def plan_of(module: nn.Module, kind: type[Any] = SpectralDP, **fields: Any) -> Plan:
    given = {"noise_multiplier": SIGMA, "max_grad_norm": 0.5, "keep_fraction": 0.3}
    given |= {"clipping": "flat"} | fields
    given = {name: value for name, value in given.items() if value is not None}
    sites = dpkern.survey(module, torch.randn(2, 3, 9, 9))
    mechanism = kind(sites=sites, **given)
    plan: Plan = mechanism.plan([tuple(p.shape) for p in module.parameters()])
    return plan


def alone(module: nn.Module, x: Tensor, plan: Plan, b: int, weight: float) -> Tensor:
    """The integers of one sample, among others whose gradients are zero."""
    weights = torch.zeros(B)
    weights[b] = weight
    return integers(summed(module, x, plan, weights))


@pytest.mark.parametrize("keep", [0.1, 0.3, 1.0])
@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e4])
def test_a_sum_is_that_of_its_samples_coordinates(keep: float, scale: float) -> None:
    module, x = built(scale)
    plan = plan_of(module, keep_fraction=keep)
    together = summed(module, x, plan, torch.full((B,), 1e3))
    assert [part.shape for part in together.sums] == [block.release_shape for block in plan.blocks]
    assert together.bounded_by == "proved"
    parts = [alone(module, x, plan, b, 1e3) for b in range(B)]
    for part in parts:
        # The bound is nearly reached: clipping does not waste it.
        assert 0.98 * bound_of(plan) < math.isqrt(norm_square(part))
        assert norm_square(part) <= bound_of(plan) ** 2
    assert torch.equal(integers(together), torch.stack(parts).sum(0))


def test_groups_have_bounds_of_their_own() -> None:
    module, x = built()
    plan = plan_of(module, clipping="per_layer")
    result = summed(module, x, plan, torch.tensor([1e3] + [0.0] * (B - 1)))
    for part, block in zip(result.sums, plan.blocks, strict=True):
        assert block.integer_bound is not None
        assert norm_square(part.flatten().long()) <= block.integer_bound**2


def test_a_bound_of_half_the_coordinates_would_be_exceeded(monkeypatch: pytest.MonkeyPatch) -> None:
    squared = exact_sums.squared_norms_rounded

    def less(record: Any) -> Tensor:
        return squared(record) * (0.25 if isinstance(record, NormedGradients) else 1)

    monkeypatch.setattr(exact_sums, "squared_norms_rounded", less)
    module, x = built()
    plan = plan_of(module)
    assert norm_square(alone(module, x, plan, 0, 1e3)) > bound_of(plan) ** 2


def test_sums_are_near_those_of_floats() -> None:
    module, x = built()
    weights = torch.logspace(-6, 2, B)  # small ones are not clipped
    plan, floats = plan_of(module), plan_of(module, arithmetic="float")
    exact, floating = summed(module, x, plan, weights), summed(module, x, floats, weights)
    unit = plan.units[0]
    assert unit is not None
    for mine, theirs, block in zip(exact.sums, floating.sums, floats.blocks, strict=True):
        wanted = theirs.double()
        if block.release is not None:
            # Both clip the same released gradients: compare them, not their bases.
            wanted = block.release.to_gradient(block.release.forward(theirs))
            release = plan.blocks[block.index].release
            assert release is not None
            got = release.to_gradient(mine.double() * unit)
        else:
            got = mine.double() * unit
        slack = 1e-2 * float(wanted.abs().max()) + B * 40 * unit
        torch.testing.assert_close(got, wanted, rtol=0, atol=slack)


def test_a_sample_that_is_not_finite_is_dropped() -> None:
    module, x = built()
    plan = plan_of(module)
    whole = summed(module, x, plan, torch.tensor([1.0] * (B - 1) + [0.0]))
    x[-1] = float("inf")
    result = summed(module, x, plan)
    assert int(result.nonfinite) == 1
    assert torch.isinf(result.norms[-1]) or torch.isnan(result.norms[-1])
    assert torch.equal(integers(result), integers(whole))


def test_no_samples_are_no_integers() -> None:
    module, x = built()
    plan = plan_of(module)
    result = summed(module, x[:0], plan)
    assert not integers(result).any()
    assert [part.shape for part in result.sums] == [block.release_shape for block in plan.blocks]


def test_other_maps_are_clipped_by_their_integers() -> None:
    module, _ = built()
    slots = Capture(module).slots
    assert sums_in_place(plan_of(module), slots)
    assert sums_in_place(plan_of(module, GReDP, keep_fraction=None), slots)  # maps nothing
    assert not sums_in_place(plan_of(module, arithmetic="float"), slots)
    shapes = [tuple(p.shape) for p in module.parameters()]
    given: dict[str, Any] = {"noise_multiplier": SIGMA, "max_grad_norm": 0.5}
    adaclip = AdaClip(expected_batch_size=B, arithmetic="exact", **given)
    memory = adaclip.memory(list(module.parameters()))
    assert not sums_in_place(adaclip.plan(shapes, memory), slots)
