"""Pruned releases: the printed leak, and masks that are fixed before the step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from dpkern import DPStep
from dpkern.base.errors import InvalidInput, PrivacyError
from dpkern.privacy import accounting
from dpkern.privacy.mechanisms import DPSGD, Directional, ProjectedSGD, Pruned
from dpkern.privacy.mechanisms._pruned_release import TopKMap

SHAPES = [(4, 5), (10,)]


def pruned(mask: str = "previous", **changes: Any) -> Pruned:
    noise = changes.pop("noise", 1.1)
    inner = DPSGD(noise_multiplier=noise, max_grad_norm=0.5, arithmetic=changes.pop("how", "exact"))
    return Pruned(inner=inner, expected_batch_size=2, mask=mask, **{"ratio": 0.8, **changes})


def step_of(mechanism: Pruned, seed: int = 1) -> DPStep:
    params = [torch.zeros(shape) for shape in SHAPES]
    return DPStep(mechanism, params, expected_batch_size=2, sample_rate=0.1, unsafe_seed=seed)


def run(step: DPStep, grads: list[torch.Tensor]) -> list[torch.Tensor]:
    step.add(per_sample=grads)
    released = step.finish()
    assert released is not None
    return [g for g in released if g is not None]


def gradients(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, *shape, generator=generator) for shape in SHAPES]


def nonzero(values: list[torch.Tensor]) -> list[int]:
    return [int((v != 0).sum()) for v in values]


@pytest.mark.parametrize("mask", ["previous", "random"])
@pytest.mark.parametrize("how", ["exact", "float"])
def test_corrected_masks_keep_the_wrapped_event(mask: str, how: str) -> None:
    mechanism = pruned(mask, how=how)
    plan = mechanism.plan(SHAPES)
    wanted = mechanism.inner.plan(SHAPES)
    assert plan.spec == wanted.spec
    assert plan.private
    assert plan.notes == ()
    assert mechanism.mode == "corrected"
    step = step_of(mechanism)
    for seed in range(4):
        run(step, gradients(seed))
        assert step.plan.spec == wanted.spec
    assert 0 < step.epsilon_if_seed_secret(1e-5) < math.inf


def test_random_masks_change_and_do_not_see_the_data() -> None:
    plans = []
    for data in (0, 100):
        step = step_of(pruned("random", feedback=False))
        seen = []
        for seed in range(3):
            seen.append(step.plan.blocks)
            values = run(step, gradients(data + seed))
            assert nonzero(values) == [4, 2]
        plans.append(seen)
    assert plans[0] == plans[1]
    assert plans[0][0] != plans[0][1]
    assert step_of(pruned("random", seed=7)).plan.blocks != plans[0][0]


def test_previous_masks_come_from_released_values() -> None:
    step = step_of(pruned("previous", feedback=False, refresh=3))
    first = run(step, gradients(0))
    assert nonzero(first) == [20, 10]  # nothing was released before
    assert step.plan.blocks[0].release_shape == (4,)
    second = run(step, gradients(1))
    assert nonzero(second) == [4, 2]
    for before, after in zip(first, second, strict=True):
        top = before.flatten().abs().topk(int((after != 0).sum())).indices
        assert set(top.tolist()) == set(after.flatten().nonzero().flatten().tolist())
    run(step, gradients(2))
    assert nonzero(run(step, gradients(3))) == [20, 10]  # every third step is a full one


def test_only_kept_coordinates_are_clipped() -> None:
    step = step_of(pruned("random", how="float", feedback=False))
    kept = [block.release for block in step.plan.blocks]
    grads = [torch.full((2, *shape), 1e6) for shape in SHAPES]
    for gradient, release in zip(grads, kept, strict=True):
        places = release.places  # type: ignore[union-attr]
        gradient.flatten(1)[:, places] = 1e-3
    step.add(per_sample=grads)
    assert step._sums is not None
    # What is left out does not use up the norm of what is released.
    assert torch.cat(step._sums).tolist() == pytest.approx([2e-3] * 6)


def test_feedback_on_released_values_loses_nothing() -> None:
    given, plain = pruned("previous", refresh=1), pruned("previous", refresh=1, feedback=False)
    ours, theirs = step_of(given), step_of(plain)
    total, released = 0.0, 0.0
    for seed in range(5):
        total += sum(float(v.double().sum()) for v in run(theirs, gradients(seed)))
        values = run(ours, gradients(seed))
        assert nonzero(values) == [4, 2]
        released += sum(float(v.double().sum()) for v in values)
    assert ours.memory is not None
    left = sum(float(e.sum()) for e in ours.memory["error"])
    assert released + left == pytest.approx(total, abs=1e-5)


def test_published_follows_the_print_without_noise() -> None:
    step = step_of(pruned("published", noise=0.0))
    error = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    for seed in range(4):
        grads = gradients(seed)
        values = run(step, grads)
        moved = [g.double() + e for g, e in zip(grads, error, strict=True)]
        norms = torch.cat([g.flatten(1) for g in moved], dim=1).norm(dim=1)
        factors = (0.5 / norms).clamp(max=1)
        for i, gradient in enumerate(moved):
            mean = torch.einsum("b,b...->...", factors, gradient) / 2
            count = [4, 2][i]
            keep = torch.zeros(mean.numel(), dtype=torch.bool)
            keep[mean.flatten().abs().topk(count).indices] = True
            out = torch.where(keep.view(mean.shape), mean, 0.0)
            error[i] = mean - out
            assert torch.allclose(values[i].double(), out, atol=1e-6)


def test_published_noises_what_it_keeps_and_says_that_it_leaks() -> None:
    mechanism = pruned("published")
    plan = mechanism.plan(SHAPES)
    assert (plan.private, plan.distribution, plan.certified_for) == (False, "gaussian", "nothing")
    assert [note.id for note in plan.notes] == ["D5"]
    assert mechanism.mode == "published"
    assert mechanism.claimed_event_spec() == mechanism.inner.claimed_event_spec()
    numbers: dict[str, Any] = {"sample_rate": 0.1, "steps": 3, "delta": 1e-5}
    assert accounting.epsilon(mechanism, **numbers) == math.inf
    assert accounting.claimed_epsilon(mechanism, **numbers) < math.inf
    step, clean = step_of(mechanism), step_of(pruned("published", noise=0.0))
    noisy, wanted = run(step, gradients(0)), run(clean, gradients(0))
    for a, b in zip(noisy, wanted, strict=True):
        assert torch.equal(a == 0, b == 0)
        assert not torch.equal(a, b)
    # Which coordinates are released depends on one sample: the leak.
    other = gradients(0)
    other[0][0].neg_().mul_(-3)
    other[0][0].flatten()[7] = 100
    seen = run(step_of(mechanism), other)
    assert not torch.equal(seen[0] == 0, noisy[0] == 0)


def test_what_was_not_released_is_not_saved() -> None:
    for mask, saved in (("published", {"mask", "step"}), ("random", {"mask", "step", "error"})):
        step = step_of(pruned(mask))
        run(step, gradients(0))
        assert step.memory is not None
        assert set(step.memory.state_dict()) == saved


def test_a_resumed_run_has_the_same_masks() -> None:
    straight, first = step_of(pruned("previous")), step_of(pruned("previous"))
    for seed in range(2):
        run(straight, gradients(seed))
        run(first, gradients(seed))
    second = step_of(pruned("previous"))
    second.load_state_dict(first.state_dict())
    assert second.plan.blocks == straight.plan.blocks
    for a, b in zip(run(second, gradients(2)), run(straight, gradients(2)), strict=True):
        assert torch.equal(a, b)


def of_shaped_noise(mask: str = "published", **changes: Any) -> Pruned:
    inner = Directional(
        max_grad_norm=100.0,
        noise_multiplier=1.0,
        importance_multiplier=1e-3,
        w_source="full",
        mode="published",
    )
    return Pruned(inner=inner, expected_batch_size=2, mask=mask, **{"ratio": 0.8, **changes})


def test_the_printed_mask_is_that_of_the_gradient_whatever_the_noise() -> None:
    scale = torch.linspace(0.1, 2.0, 10, dtype=torch.float64)
    total = torch.linspace(-1.0, 0.8, 10, dtype=torch.float64)
    error = torch.zeros(10, dtype=torch.float64)
    kept = TopKMap(scale=scale, norm="gradient", count=3, error=error, batch=2.0)
    found = kept.noised(kept.forward(total), lambda noisy: noisy)
    largest = total.abs().topk(3).indices
    torch.testing.assert_close(
        found, torch.zeros_like(total).index_copy(0, largest, total[largest])
    )
    torch.testing.assert_close(2 * error + found, total)
    # Magnitudes in units of the noise have other places.
    assert set((total / scale).abs().topk(3).indices.tolist()) != set(largest.tolist())


def test_shaped_noise_goes_to_the_kept_coordinates_in_its_own_scale() -> None:
    mechanism = of_shaped_noise(feedback=False)
    assert not mechanism.plan(SHAPES).private
    assert {note.id for note in mechanism.notes} >= {"D1", "D5"}
    grads = [torch.zeros(2, 4, 5), torch.zeros(2, 10)]
    grads[0][:, 0, :4] = 30.0
    grads[1][:, :2] = 20.0
    weights = [torch.linspace(0.01, 3.0, 20).view(4, 5), torch.linspace(1.0, 2.0, 10)]
    own, unscaled = [], []
    for seed in range(150):
        step = step_of(mechanism, seed)
        step.set_importance(weights)
        released = run(step, grads)
        for block, value, gradient in zip(step.plan.blocks, released, grads, strict=True):
            assert isinstance(block.release, TopKMap)
            places = gradient[0] != 0
            assert not value[~places].any()
            noise = (2 * value.double() - gradient.sum(0))[places] / block.noise_scale
            unscaled.append(noise)
            assert block.release.scale is not None
            own.append(noise / block.release.scale[places])
    assert float(torch.cat(own).std()) == pytest.approx(1.0, rel=0.08)
    assert abs(float(torch.cat(unscaled).std()) - 1.0) > 0.2


@pytest.mark.parametrize("generator", ["gaussian", "ours_w1", "ours"])
def test_every_printed_generator_can_be_pruned(generator: str) -> None:
    inner = Directional(
        max_grad_norm=1.0, epsilon=2.0, delta=1e-5, steps=10, sample_rate=0.1, generator=generator,
        mode="published",
    )  # fmt: skip
    step = step_of(Pruned(inner=inner, expected_batch_size=2, ratio=0.8, mask="published"))
    for seed in range(3):
        # The noise has a lattice: a kept coordinate may be exactly 0.
        first, second = nonzero(run(step, gradients(seed)))
        assert 0 < first <= 4
        assert 0 < second <= 2


def test_a_pruned_mechanism_that_adapts_learns_from_what_was_released() -> None:
    inner = Directional(
        max_grad_norm=1.0, noise_multiplier=1.0, w_source="running", mode="published"
    )
    step = step_of(Pruned(inner=inner, expected_batch_size=2, ratio=0.8, mask="published"))
    released = run(step, gradients(0))
    assert step.memory is not None
    for held, values in zip(step.memory["running"], released, strict=True):
        torch.testing.assert_close(held, 0.1 * values.double().abs())


def test_noise_and_bound_are_the_wrapped_ones() -> None:
    mechanism = pruned()
    assert (mechanism.noise_multiplier, mechanism.max_grad_norm) == (1.1, 0.5)
    more = mechanism.with_noise_multiplier(2.0)
    assert more.inner.noise_multiplier == 2.0
    assert more.plan(SHAPES).noise_multiplier == pytest.approx(2.0, rel=1e-4)


def test_what_is_refused() -> None:
    shaped = Directional(max_grad_norm=1.0, noise_multiplier=1.0, shape="elliptic")
    with pytest.raises(InvalidInput, match="inner"):
        Pruned(inner=shaped, expected_batch_size=1).plan(SHAPES)
    # A mask that is fixed before the step keeps a share of the norm, which printed noise ignores.
    with pytest.raises(InvalidInput, match="inner"):
        of_shaped_noise(mask="previous").plan(SHAPES)
    with pytest.raises(InvalidInput, match="inner"):
        Pruned(inner=pruned(), expected_batch_size=1)
    for changes, name in (({"ratio": 1.0}, "ratio"), ({"refresh": 0}, "refresh")):
        with pytest.raises(InvalidInput, match=name):
            pruned(**changes)
    with pytest.raises(InvalidInput, match="mask"):
        pruned("largest")


def test_the_wrapped_relation_and_batch_size_hold_for_plans_of_runs() -> None:
    numbers: dict[str, Any] = {"sample_rate": 1e-3, "steps": 10, "delta": 1e-6}
    single = ProjectedSGD(n=1000, noise_multiplier=1.0)
    wrapped = Pruned(inner=single, expected_batch_size=1)
    found = accounting.certify(wrapped, **numbers)
    assert found.relation == accounting.certify(single, **numbers).relation == "replace_one"
    assert found.epsilon == accounting.epsilon(single, **numbers)
    each = DPSGD(noise_multiplier=1.0, max_grad_norm=1.0, mode="published",
                 noise_point="per_sample", batch_size=16)  # fmt: skip
    with pytest.raises(PrivacyError, match="exactly 16 samples"):
        accounting.epsilon(Pruned(inner=each, expected_batch_size=16), **numbers)
