"""Directional noise: the printed numbers, what they really certify, and the corrected forms."""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import Any

import numpy as np
import pytest
import torch

from dpkern import DPStep
from dpkern.base.errors import InvalidInput
from dpkern.papers.directional import optimum as theory
from dpkern.privacy import accounting
from dpkern.privacy.mechanisms import DPSGD, AdaClip, Directional, _shape
from dpkern.privacy.mechanisms.release import DiagonalMap
from dpkern.privacy.theory import rdp

SHAPES = [(3, 4), (5,)]
BUDGET: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-5, "steps": 100, "sample_rate": 0.01}


def published(**changes: Any) -> Directional:
    return Directional(**{"max_grad_norm": 0.5, "mode": "published", **BUDGET, **changes})


def corrected(**changes: Any) -> Directional:
    return Directional(**{"max_grad_norm": 0.5, "noise_multiplier": 1.3, **changes})


def near(value: float, rel: float = 1e-6) -> Any:
    return pytest.approx(value, rel=rel)


def test_printed_noise_of_one_two_four() -> None:
    w = (1, 2, 4)
    assert theory.C1 == near(1.8898816, 5e-8)
    assert theory.multiplier(w, theory.printed_delta(w, 1), 1) == near(3.382980855, 1e-9)
    sigma = theory.printed_sigma(w, 1, 1)
    assert sigma.tolist() == near([0.6855462, 0.8637341, 1.0882368], 1e-7)
    assert theory.objective(w, sigma) == near(6.765962, 1e-7)
    assert 1 / sigma.min() ** 2 == near(2.127779, 5e-7)
    assert np.sum((theory.printed_delta(w, 1) / sigma) ** 2) == near(1, 1e-12)
    # The kernel's form of the same, without any Delta, for every scale of w.
    for factor in (1.0, 1e-150, 1e150):
        (scale,) = _shape.printed([factor * torch.tensor(w, dtype=torch.float64)], 1e-12)
        assert scale.tolist() == near(sigma.tolist(), 1e-12)


def test_the_true_worst_direction_makes_the_noise_isotropic() -> None:
    generator = np.random.default_rng(1)
    for alpha, tau in ((1.0, 1.0), (0.3, 7e-4)):
        w = generator.standard_normal(50)
        sigma = theory.sigma(w, theory.worst_delta(w, alpha), tau)
        np.testing.assert_allclose(sigma, alpha / math.sqrt(tau), rtol=1e-12)
        best = np.sum((theory.worst_delta(w, 1) * np.abs(w)) ** (2 / 3))
        printed = np.sum((theory.printed_delta(w, 1) * np.abs(w)) ** (2 / 3))
        directions = np.abs(generator.standard_normal((2000, 50)))
        directions /= np.linalg.norm(directions, axis=1, keepdims=True)
        tried = np.sum((directions * np.abs(w)) ** (2 / 3), axis=1)
        assert printed < best
        assert tried.max() < best


def test_energy_and_objective_of_an_importance_that_is_pure_noise() -> None:
    w = np.random.default_rng(0).standard_normal(1_000_000)
    sigma = theory.printed_sigma(w, 1, 1)
    assert float(np.mean(sigma**2)) == pytest.approx(0.6667, abs=1e-3)
    ratio = theory.objective(w, sigma) / np.abs(w).sum()
    assert ratio == pytest.approx(0.9492, abs=1e-3)


@pytest.mark.parametrize(("size", "kappa"), [(1000, 11.35), (61_706, 39.39), (1_000_000, 114.0)])
def test_kappa_of_pure_noise(size: int, kappa: float) -> None:
    w = np.random.default_rng(0).standard_normal(size)
    assert theory.kappa(theory.printed_sigma(w, 1, 1), 1, 1) == pytest.approx(kappa, rel=1e-3)
    (scale,) = _shape.printed([torch.from_numpy(w)], 1e-12)
    assert 1 / scale.min().item() == pytest.approx(kappa, rel=1e-3)


def test_kappa_of_released_noise_is_that_of_continuous_noise() -> None:
    """A weight on the noise's lattice would be 0 now and then, and kappa in the thousands."""
    size, steps = 20_000, 5
    mechanism = published()
    step = DPStep(
        mechanism,
        [torch.zeros(size)],
        expected_batch_size=1,
        sample_rate=0.01,
        unsafe_seed=0,
    )
    found = []
    for _ in range(steps):
        step.add([torch.zeros(1, size)])
        step.finish()
        found.append(mechanism.realised(step.memory)["kappa"])
    drawn = np.random.default_rng(0).standard_normal((200, size))
    laws = [theory.kappa(theory.printed_sigma(w, 1, 1), 1, 1) for w in drawn]
    assert min(laws) < statistics.median(found) < max(laws)
    assert max(found) < 2 * max(laws)


TABLE = {
    "MNIST": (
        (6445, 512 / 55000),
        {0.2: (20.98, 0.172), 0.3: (15.93, 0.227), 0.5: (11.73, 0.309), 1: (8.01, 0.456),
         2: (5.57, 0.662)},
        {0.2: 18.05, 0.3: 12.08, 0.5: 7.31, 1: 3.76, 2: 2.02},
    ),
    "SVHN": (
        (8585, 256 / 73257),
        {1: (5.53, 0.286), 5: (2.46, 0.677), 10: (1.73, 1.015)},
        {1: 1.76, 5: 0.72, 10: 0.58},
    ),
    "CIFAR": (
        (19531, 256 / 50000),
        {1: (10.16, 0.342), 5: (4.49, 0.791), 15: (2.59, 1.432)},
        {1: 3.59, 5: 1.01, 15: 0.65},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_sampling_rule_table(name: str) -> None:
    (steps, rate), ours, plain = TABLE[name]
    for epsilon, (z, renyi) in ours.items():
        given = {"epsilon": epsilon, "steps": steps, "sample_rate": rate, "generator": "ours_w1"}
        mechanism = published(**given)
        assert mechanism.noise_multiplier == pytest.approx(z, rel=3e-3)
        found = rdp.rdp_epsilon(rate, mechanism.noise_multiplier, steps, 1e-5).epsilon
        assert found == pytest.approx(renyi, rel=3e-3)
        # The moments accountant needs less noise for the same budget.
        gaussian = published(**{**given, "generator": "gaussian"})
        assert gaussian.noise_multiplier == pytest.approx(plain[epsilon], abs=6e-3)
        assert gaussian.noise_multiplier < z


@pytest.mark.parametrize("generator", ["ours_w1", "gaussian"])
def test_isotropic_generators_certify_their_multiplier(generator: str) -> None:
    mechanism = published(generator=generator)
    plan = mechanism.plan(SHAPES)
    z = mechanism.noise_multiplier
    wanted = DPSGD(noise_multiplier=z, max_grad_norm=0.5).plan(SHAPES)
    assert (plan.spec, plan.blocks) == (wanted.spec, wanted.blocks)
    average = published(generator=generator, noise_target="average", lot=32).plan(SHAPES)
    assert average.scales == pytest.approx([32 * s for s in plan.scales])
    assert average.noise_multiplier == pytest.approx(min(32 * z, 1024), rel=1e-4)


def test_ours_is_not_private_and_says_why() -> None:
    mechanism = published()
    plan = mechanism.plan(SHAPES)
    assert not plan.private
    assert plan.certified_for == mechanism.certified_for == "nothing"
    assert plan.distribution == "gaussian"
    assert plan.importance is not None
    assert [note.id for note in plan.notes] == ["D1", "D2", "D3", "D4"]
    numbers = {"sample_rate": 0.01, "steps": 100, "delta": 1e-5}
    assert accounting.epsilon(mechanism, **numbers) == math.inf
    claims = {"sample_rate": 0.01, "delta": 1e-5, "dataset_size": None}
    assert mechanism.claim(steps=100, **claims) == 1.0
    assert mechanism.claim(steps=101, **claims) == math.inf
    assert mechanism.claim(steps=0, **claims) == 0.0
    assert mechanism.claim(steps=100, **{**claims, "delta": 1e-6}) == math.inf
    assert corrected().claim(steps=1, **claims) is None


@pytest.mark.parametrize("source", ["lot", "full", "running"])
def test_a_bounded_kappa_certifies_both_releases(source: str) -> None:
    mechanism = published(kappa_max=4.0, w_source=source)
    plan = mechanism.plan(SHAPES)
    z = mechanism.noise_multiplier / 4
    w = (mechanism.importance_multiplier or math.inf) / 2
    together = 1 / math.hypot(1 / z, 1 / min(w, 1024)) if source == "lot" else z
    assert plan.noise_multiplier == pytest.approx(together, rel=1e-6)
    unsampled = plan.unsampled.get("noise_multiplier")
    if source == "full":
        assert unsampled == pytest.approx(min(w, 1024), rel=1e-6)
    else:
        assert unsampled is None
    whole = published(kappa_max=4.0, w_source="running").noise_multiplier
    assert mechanism.noise_multiplier == whole or source != "running"


@pytest.mark.parametrize("floor", [1e-12, 1e-3])
def test_the_floor_bounds_kappa(floor: float) -> None:
    bound = published(floor=floor).kappa_bound
    assert bound == near(floor ** (-1 / 3))
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for size in (1, 2, 40):
        for power in (1, 8, 60):
            w = torch.rand(size, generator=generator, dtype=torch.float64) ** power
            (scale,) = _shape.printed([w], floor)
            worst = max(worst, 1 / scale.min().item())
    # One small entry beside a large one comes near the bound.
    (scale,) = _shape.printed([torch.tensor([1.0, 0.0], dtype=torch.float64)], floor)
    assert worst <= bound
    assert 0.99 * bound < 1 / scale.min().item() <= bound
    assert _shape.printed([torch.zeros(3)], floor)[0].tolist() == [1, 1, 1]


def test_the_importance_shapes_the_noise_of_its_step() -> None:
    size = 2000
    mechanism = published(arithmetic="float", importance_multiplier=None)
    params = [torch.zeros(size), torch.zeros(size)]
    step = DPStep(mechanism, params, expected_batch_size=2, sample_rate=0.01, unsafe_seed=1)
    step.add(per_sample=[torch.full((2, size), 1e5), torch.full((2, size), -1.0)])
    released = step.finish()
    assert released is not None
    assert step.memory is not None
    held = torch.cat(step.memory["importance"])
    # The mean gradient is clipped to alpha and noised before it is used.
    noise = mechanism.importance_multiplier
    assert noise is not None
    assert held.std().item() == pytest.approx(0.5 * noise, rel=0.1)
    scales = torch.cat(_shape.printed([held], mechanism.least))
    realised = mechanism.realised(step.memory)
    assert realised["kappa"] == near(1 / scales.min().item())
    assert realised["tau_effective"] == near((realised["kappa"] / mechanism.noise_multiplier) ** 2)
    # Large and small scales show in the noise: the first parameter's signal is taken off.
    noisy = torch.cat([g for g in released if g is not None]).double()
    noisy[:size] -= 0.5 / math.sqrt(size)
    white = noisy * 2 / (0.5 * mechanism.noise_multiplier * scales)
    assert white.std().item() == pytest.approx(1, rel=0.1)
    few, many = scales.argsort()[:400], scales.argsort()[-400:]
    assert noisy[many].std() > 1.5 * noisy[few].std()
    assert step.epsilon(1e-5) == math.inf


def test_full_importance_is_the_callers() -> None:
    mechanism = published(w_source="full", kappa_max=2.0)
    params = [torch.zeros(4)]
    step = DPStep(mechanism, params, expected_batch_size=2, sample_rate=0.01, unsafe_seed=1)
    step.add(per_sample=[torch.zeros(2, 4)])
    step.set_importance([torch.ones(4)])
    assert step.finish() is not None
    assert step.memory is not None
    assert step.memory["importance"][0].abs().sum() > 0


def test_running_importance_costs_nothing_and_learns_from_noisy_gradients() -> None:
    mechanism = published(w_source="running", kappa_max=2.0)
    step = DPStep(mechanism, [torch.zeros(4)], expected_batch_size=2, sample_rate=0.01)
    step.add(per_sample=[torch.zeros(2, 4)])
    released = step.finish()
    assert released is not None
    assert released[0] is not None
    assert step.memory is not None
    wanted = 0.1 * released[0].double().abs()
    assert torch.allclose(step.memory["running"][0], wanted, rtol=1e-6)
    assert mechanism.importance is None


def test_corrected_isotropic_is_dpsgd() -> None:
    for arithmetic in ("exact", "float"):
        ours = corrected(arithmetic=arithmetic).plan(SHAPES)
        plain = DPSGD(noise_multiplier=1.3, max_grad_norm=0.5, arithmetic=arithmetic).plan(SHAPES)
        assert dataclasses.replace(ours, mechanism="dpsgd") == plain


@pytest.mark.parametrize("arithmetic", ["exact", "float"])
def test_elliptic_noise_certifies_the_multiplier_whatever_its_scales(arithmetic: str) -> None:
    mechanism = corrected(shape="elliptic", arithmetic=arithmetic)
    plain = DPSGD(noise_multiplier=1.3, max_grad_norm=0.5, arithmetic=arithmetic).plan(SHAPES)
    memory = mechanism.memory([torch.zeros(s) for s in SHAPES])
    assert memory is not None
    for running in (0.0, 1.0, 1e-9):
        memory["running"][0].fill_(running)
        memory["running"][1].fill_(0.5)
        plan = mechanism.plan(SHAPES, memory)
        assert plan.spec == plain.spec
        releases = [block.release for block in plan.blocks]
        assert all(isinstance(r, DiagonalMap) and r.norm == "release" for r in releases)
        squares = [r.scale.square().sum() for r in releases if isinstance(r, DiagonalMap)
                   and r.scale is not None]  # fmt: skip
        assert float(sum(squares)) == pytest.approx(17, rel=1e-6)
    assert mechanism.notes == ()


def test_elliptic_noise_has_the_clips_shape() -> None:
    mechanism = corrected(shape="elliptic")
    params = [torch.zeros(3000), torch.zeros(3000)]
    step = DPStep(mechanism, params, expected_batch_size=1, sample_rate=0.1, unsafe_seed=2)
    assert step.memory is not None
    step.memory["running"][0].fill_(3.0)
    step.memory["running"][1].fill_(1.0)
    step.plan = mechanism.plan([(3000,), (3000,)], step.memory)
    step.add(per_sample=[torch.zeros(1, 3000)] * 2)
    released = step.finish()
    assert released is not None
    sds = [g.std().item() for g in released if g is not None]
    root = math.sqrt(5)
    assert sds == pytest.approx([1.3 * 0.5 * 3 / root, 1.3 * 0.5 / root], rel=0.07)


def test_scales_learnt_from_their_own_noise_do_not_vanish() -> None:
    def spread(**options: Any) -> float:
        mechanism = corrected(shape="elliptic", decay=0.5, **options)
        params = [torch.zeros(50)]
        step = DPStep(mechanism, params, expected_batch_size=1, sample_rate=0.1, unsafe_seed=2)
        for _ in range(40):
            step.finish()
        (block,) = step.plan.blocks
        assert isinstance(block.release, DiagonalMap)
        assert block.release.scale is not None
        return float(block.release.scale.min() / block.release.scale.max())

    assert spread() >= 0.1
    assert spread(floor=1e-12) < 1e-4


def test_other_noise_gives_up_the_budget() -> None:
    mechanism = published(generator="ours_w1").with_noise_multiplier(2.0)
    assert (mechanism.noise_multiplier, mechanism.epsilon) == (2.0, None)
    claims = {"sample_rate": 0.01, "delta": 1e-5, "dataset_size": None}
    assert mechanism.claim(steps=5, **claims) is None
    assert mechanism.claimed_event_spec()["noise_multiplier"] == 2.0
    same = dataclasses.replace(published(), max_grad_norm=0.25)
    assert same.noise_multiplier == published().noise_multiplier


def test_epsilon_at_a_kappa_is_between_claim_and_nothing() -> None:
    mechanism = published()
    assert mechanism.epsilon_at(1.0) < mechanism.epsilon_at(4.0) < math.inf
    assert mechanism.epsilon_at(1e4) == math.inf


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"generator": "adaclip"}, "generator"),
        ({"generator": "laplace"}, "generator"),
        ({"shape": "elliptic"}, "shape"),
        ({"noise_target": "average"}, "noise_target"),
        ({"arithmetic": "exact"}, "arithmetic"),
        ({"kappa_max": 0.5}, "kappa_max"),
        ({"floor": 0.0}, "floor"),
        ({"noise_multiplier": 3.0}, "noise_multiplier"),
        ({"delta": None}, "epsilon"),
        ({"epsilon": None}, "noise_multiplier"),
        ({"epsilon": None, "noise_multiplier": 1.0}, "importance_multiplier"),
        ({"mode": "corrected", "epsilon": None}, "noise_multiplier"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidInput, match=name):
        published(**changes)


def test_the_fourth_generator_is_a_mechanism_of_its_own() -> None:
    with pytest.raises(InvalidInput, match="AdaClip"):
        published(generator="adaclip")
    assert AdaClip(noise_multiplier=1.0, expected_batch_size=1).name == "adaclip"
