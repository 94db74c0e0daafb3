"""AdaClip against a loop in numpy; its event does not depend on what it has learnt."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dpkern import DPStep
from dpkern.base.errors import InvalidInput, PrivacyError
from dpkern.ops import clip, update
from dpkern.privacy.mechanisms import DPSGD, AdaClip
from dpkern.privacy.mechanisms.release import DiagonalMap

SHAPES = [(3, 4), (5,)]
BATCH = 6


def adaclip(**changes: Any) -> AdaClip:
    return AdaClip(**{"noise_multiplier": 1.3, "expected_batch_size": BATCH, **changes})


def gradients(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(BATCH, *s, generator=generator, dtype=torch.float64) for s in SHAPES]


def step_of(mechanism: AdaClip, **more: Any) -> DPStep:
    params = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    return DPStep(mechanism, params, expected_batch_size=BATCH, sample_rate=0.1, **more)


def run(step: DPStep, steps: range) -> list[np.ndarray]:
    outputs = []
    for seed in steps:
        step.add(per_sample=gradients(seed))
        released = step.finish()
        assert released is not None
        outputs.append(np.concatenate([g.numpy().ravel() for g in released if g is not None]))
    return outputs


def printed(steps: int, *, z: float, c: float, gamma: float, start: float) -> list[np.ndarray]:
    """The algorithm with the noise left out, as a loop over numpy vectors."""
    beta1, beta2, h1, h2 = 0.99, 0.9, 1e-12, 10.0
    size = 17
    mean, scale = np.zeros(size), np.full(size, start)
    outputs = []
    for seed in range(steps):
        b = np.sqrt(scale) * np.sqrt(scale.sum()) / np.sqrt(gamma)
        total = np.zeros(size)
        for row in torch.cat([g.flatten(1) for g in gradients(seed)], dim=1).numpy():
            u = (row - mean) / b
            total += u / max(1.0, float(np.linalg.norm(u)) / c)
        noisy = b * (total / BATCH) + mean
        variance = np.clip((noisy - mean) ** 2 - (b * z * c / BATCH) ** 2, h1, h2)
        scale = np.sqrt(beta2 * scale**2 + (1 - beta2) * variance)
        mean = beta1 * mean + (1 - beta1) * noisy
        outputs.append(noisy)
    return outputs


@pytest.mark.parametrize("gamma", [None, 0.01])
@pytest.mark.parametrize("bound", [1.0, 0.3])
def test_twenty_steps_without_noise_equal_the_loop(gamma: float | None, bound: float) -> None:
    mechanism = adaclip(
        noise_multiplier=0.0,
        gamma=gamma,
        max_grad_norm=bound,
        initial_scale=0.2,
        arithmetic="float",
    )
    ours = run(step_of(mechanism), range(20))
    theirs = printed(20, z=0.0, c=bound, gamma=gamma or 1.0, start=0.2)
    for mine, wanted in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("arithmetic", ["exact", "float"])
def test_noise_is_scaled_and_its_variance_taken_off(arithmetic: str) -> None:
    mechanism = adaclip(initial_scale=0.5, arithmetic=arithmetic)
    step = step_of(mechanism, unsafe_seed=1)
    scale = step.plan.blocks[0].release
    assert isinstance(scale, DiagonalMap)
    assert scale.scale is not None
    b = scale.scale.flatten()[0].item()
    assert b == pytest.approx(0.5 * np.sqrt(17))
    (noisy,) = run(step, range(1))
    (clean,) = run(step_of(adaclip(noise_multiplier=0.0, initial_scale=0.5, arithmetic="float")),
                   range(1))  # fmt: skip
    noise = noisy - clean
    assert np.std(noise) == pytest.approx(b * 1.3 / BATCH, rel=0.6)
    assert step.memory is not None
    left = np.concatenate([t.numpy().ravel() for t in step.memory["square"]])
    wanted = 0.9 * 0.25 + 0.1 * np.clip(noisy**2 - (b * 1.3 / BATCH) ** 2, 1e-12, 10)
    np.testing.assert_allclose(left, wanted, rtol=1e-9)


@pytest.mark.parametrize("arithmetic", ["exact", "float"])
def test_the_event_is_dpsgds_whatever_was_learnt(arithmetic: str) -> None:
    mechanism = adaclip(arithmetic=arithmetic)
    wanted = DPSGD(noise_multiplier=1.3, max_grad_norm=1.0, arithmetic=arithmetic).plan(SHAPES)
    memory = mechanism.memory([torch.zeros(s) for s in SHAPES])
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        for name in ("mean", "square"):
            for held in memory[name]:
                held.copy_(torch.rand(held.shape, generator=generator) * 10.0 ** (3 * seed - 6))
        plan = mechanism.plan(SHAPES, memory)
        assert plan.spec == wanted.spec
        assert plan.private
        for block in plan.blocks:
            assert isinstance(block.release, DiagonalMap)
            assert block.release.norm == "release"
    assert mechanism.event_spec(17) == mechanism.plan(SHAPES).event_spec()


def test_default_scale_is_the_geometric_mean_of_the_limits() -> None:
    memory = adaclip().memory([torch.zeros(3)])
    assert memory["square"][0].sqrt().tolist() == pytest.approx([(1e-12 * 10) ** 0.5] * 3)


def test_a_resumed_run_goes_on_with_what_it_had_learnt() -> None:
    rule = update.SGD(lr=0.1)
    straight, first = (step_of(adaclip(), unsafe_seed=4, optimizer=rule) for _ in range(2))
    for seed in range(4):
        straight.add(per_sample=gradients(seed))
        straight.finish()
    for seed in range(2):
        first.add(per_sample=gradients(seed))
        first.finish()
    second = step_of(adaclip(), unsafe_seed=4, optimizer=rule)
    second.load_state_dict(first.state_dict())
    for mine, saved in zip(second.params, first.params, strict=True):
        mine.copy_(saved)
    for seed in range(2, 4):
        second.add(per_sample=gradients(seed))
        second.finish()
    for mine, wanted in zip(second.params, straight.params, strict=True):
        assert torch.equal(mine, wanted)


def test_the_gloss_of_gamma_is_noted_in_published_mode() -> None:
    assert [n.id for n in adaclip(mode="published", gamma=0.01).plan(SHAPES).notes] == ["D7"]
    assert adaclip(gamma=0.01).plan(SHAPES).notes == ()


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"gamma": 0.0}, "gamma"),
        ({"gamma": 2.0}, "gamma"),
        ({"beta1": 1.0}, "beta1"),
        ({"beta2": -0.1}, "beta2"),
        ({"h1": 11.0}, "h1"),
        ({"expected_batch_size": 0}, "expected_batch_size"),
        ({"initial_scale": -1.0}, "initial_scale"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidInput, match=name):
        adaclip(**changes)


def test_a_sum_clipped_by_its_own_norm_is_no_sum_of_scaled_coordinates() -> None:
    mechanism = AdaClip(
        noise_multiplier=1.0, expected_batch_size=2, arithmetic="float", initial_scale=1e-6
    )
    step = DPStep(
        mechanism, [torch.zeros(4)], expected_batch_size=2, sample_rate=0.1, unsafe_seed=1
    )
    result = clip.clip_sum([torch.ones(2, 4)], 1.0)
    release = step.plan.blocks[0].release
    assert release is not None
    # What one sample would have moved, against a certified bound of 1.
    assert float(release.forward(result.sums[0] / 2).norm()) > 1e5
    other = replace(mechanism, initial_scale=1e-3).plan([(4,)]).blocks[0].release
    for taken in (None, (None,), (other,)):
        with pytest.raises(PrivacyError, match="another norm"):
            step.add(sum=replace(result, clipped_as=taken))
    assert not step.unfinished
