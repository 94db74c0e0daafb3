"""Laplace SGD: the L1 clip that its noise needs, and the L2 clip that was printed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from dpkern import DPStep
from dpkern.base.errors import InvalidInput
from dpkern.base.laws import SCALE_UNITS
from dpkern.privacy import accounting
from dpkern.privacy.mechanisms import LaplaceSGD

SHAPES = [(3, 5), (7,), (600,)]


def laplace(**changes: Any) -> LaplaceSGD:
    return LaplaceSGD(**{"noise_multiplier": 1.5, "max_grad_norm": 0.7, **changes})


def step_of(mechanism: LaplaceSGD, params: list[torch.Tensor]) -> DPStep:
    return DPStep(mechanism, params, expected_batch_size=1, sample_rate=0.1, unsafe_seed=1)


@pytest.mark.parametrize("arithmetic", ["exact", "float"])
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_corrected_plan(arithmetic: str, clipping: str) -> None:
    plan = laplace(arithmetic=arithmetic, clipping=clipping).plan(SHAPES)
    assert (plan.p, plan.distribution, plan.clipping) == (1, "laplace", clipping)
    assert set(plan.scales) == {1.5 * 0.7}
    assert sum(plan.group_bounds) == pytest.approx(0.7, rel=1e-15)
    assert plan.spec["event"] == "LaplaceDpEvent"
    assert plan.noise_multiplier == pytest.approx(1.5, rel=1e-5)
    assert plan.notes == ()


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("arithmetic", ["exact", "float"])
def test_the_configurations_event_is_never_more_private_than_a_plans(
    clipping: str, arithmetic: str
) -> None:
    mechanism = laplace(clipping=clipping, arithmetic=arithmetic)
    for layers in (1, 3, 7):
        plan = mechanism.plan([(10,)] * layers)
        spec = mechanism.event_spec(10 * layers)
        assert spec["noise_multiplier"] <= plan.noise_multiplier
        assert spec["noise_multiplier"] == pytest.approx(1.5, rel=1e-5)


def test_exact_contributions_have_integer_l1_norms_within_the_bound() -> None:
    mechanism = laplace()
    rows = torch.zeros(6, 5000)
    rows[0] = 1.0  # every coordinate rounds
    rows[1, 0] = 1e30
    rows[2] = 0.7 / 5000 * (1 + 2**-20)
    rows[3, :2] = torch.tensor([0.7, -1e-9])
    rows[4] = torch.randn(5000, generator=torch.Generator().manual_seed(0)).sign() * 1e-3
    rows[5] = torch.linspace(-1, 1, 5000) ** 3
    (block,) = mechanism.plan([(5000,)]).blocks
    assert block.integer_bound is not None
    for row in rows:
        step = step_of(mechanism, [torch.zeros(5000)])
        step.add(per_sample=[row[None]])
        assert step._sums is not None
        norm = int(step._sums[0].long().abs().sum())
        assert 0 < norm <= block.integer_bound
        assert norm > 0.99 * block.integer_bound or row.abs().sum() < 0.7


def test_the_noise_is_laplace_of_scale_b() -> None:
    for mode, bound in (("corrected", 0.7), ("published", 0.7)):
        step = step_of(laplace(mode=mode), [torch.zeros(4000)])
        step.add(per_sample=[torch.zeros(1, 4000)])
        released = step.finish()
        assert released is not None
        noise = released[0]
        assert noise is not None
        scale = 1.5 * bound
        # E|x| = b with standard deviation b / sqrt(n); the fourth moment tells it from a Gaussian.
        assert noise.abs().mean().item() == pytest.approx(scale, rel=5 / math.sqrt(4000))
        kurtosis = noise.pow(4).mean() / noise.pow(2).mean() ** 2
        assert kurtosis.item() == pytest.approx(6, abs=1.5)


def test_epsilon_is_the_sampled_laplace_mechanisms() -> None:
    import dp_accounting as dp

    event = dp.SelfComposedDpEvent(
        dp.PoissonSampledDpEvent(0.05, dp.LaplaceDpEvent(noise_multiplier=1.5)), 40
    )
    accountant = dp.pld.PLDAccountant(dp.NeighboringRelation.ADD_OR_REMOVE_ONE)
    wanted = accountant.compose(event).get_epsilon(1e-5)
    plan = laplace().plan(SHAPES)
    found = accounting.epsilon(plan, sample_rate=0.05, steps=40, delta=1e-5)
    assert wanted == pytest.approx(found, rel=1e-3)
    assert plan.noise_multiplier >= 1.5 * (1 - 1e-9)


def test_published_certifies_a_root_d_smaller_multiplier() -> None:
    plan = laplace(mode="published").plan([(10, 5), (50,)])
    assert (plan.p, plan.arithmetic) == (2, "float")
    assert [note.id for note in plan.notes] == ["C1"]
    assert plan.noise_multiplier == pytest.approx(0.15, rel=1e-6)
    # A layer's own ball has its own dimension, and layers add: sqrt(50) + sqrt(50), half the bound.
    layers = laplace(mode="published", clipping="per_layer").plan([(10, 5), (50,)])
    assert layers.noise_multiplier == pytest.approx(1.5 / math.sqrt(50), rel=1e-6)
    assert laplace(mode="published").claimed_event_spec()["noise_multiplier"] == 1.5
    # The bound is attained: an L2 ball's corner has L1 norm sqrt(d) times its radius.
    corner = torch.full((100,), 0.07, dtype=torch.float64)
    assert corner.norm().item() == pytest.approx(0.7)
    assert corner.abs().sum().item() == pytest.approx(0.7 * 10)


def test_a_network_as_published_is_not_private() -> None:
    mechanism = laplace(mode="published")
    plan = mechanism.plan([(100, 100)])
    assert not plan.private
    assert plan.distribution == "laplace"
    assert plan.certified_for == "nothing"
    numbers: dict[str, Any] = {"sample_rate": 0.05, "steps": 10, "delta": 1e-5}
    assert accounting.epsilon(plan, **numbers) == math.inf
    assert accounting.claimed_epsilon(mechanism, **numbers) < 10


def test_published_clips_l2_and_corrected_l1() -> None:
    gradient = torch.full((1, 4), 1.0)
    for mode, wanted in (("published", 0.35), ("corrected", 0.175)):
        mechanism = laplace(mode=mode, arithmetic="float")
        step = step_of(mechanism, [torch.zeros(4)])
        step.add(per_sample=[gradient])
        assert step._sums is not None
        assert step._sums[0].tolist() == pytest.approx([wanted] * 4, rel=1e-5)


def test_what_is_refused() -> None:
    with pytest.raises(InvalidInput, match="arithmetic"):
        laplace(mode="published", arithmetic="exact")
    with pytest.raises(InvalidInput, match="clipping"):
        laplace(clipping="automatic")
    with pytest.raises(InvalidInput, match="max_grad_norm"):
        laplace(max_grad_norm=0.0)
    assert laplace(max_grad_norm=math.inf).event_spec() == {"event": "NonPrivateDpEvent"}
    assert SCALE_UNITS == 1 << 20
