"""DPStep: what it releases, what it records, and what it refuses."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import dpkern
from dpkern import DPStep, testing
from dpkern.mechanisms import DPSGD
from dpkern.ops import clip, update

SHAPES = ((10, 7), (10,), (513,))
FLAT = DPSGD(noise_multiplier=1.1, max_grad_norm=0.5)


def make(mechanism: DPSGD = FLAT, *, seed: int | None = 7, **more: object) -> DPStep:
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(shape, generator=generator) for shape in SHAPES]
    given = {"expected_batch_size": 16.0, "sample_rate": 0.01, "unsafe_seed": seed} | more
    return DPStep(mechanism, params, **given)  # type: ignore[arg-type]


def gradients(batch: int, seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn((batch, *shape), generator=generator) for shape in SHAPES]


@pytest.mark.parametrize("arithmetic", ["exact", "float"])
@pytest.mark.parametrize("clipping", ["flat", "per_layer", "automatic"])
def test_noise_has_the_planned_standard_deviation(arithmetic: str, clipping: str) -> None:
    mechanism = replace(FLAT, arithmetic=arithmetic, clipping=clipping)
    step = make(mechanism, seed=3)
    released = [step.finish() for _ in range(60)]
    noise = torch.cat([torch.cat([g.flatten() for g in r or []]) for r in released]) * 16
    sd = step.plan.scales[0]
    assert sd == pytest.approx(1.1 * 0.5)
    # 60 x 593 draws: the standard error of the deviation is 0.4 %.
    assert float(noise.std()) == pytest.approx(sd, rel=0.02)
    assert not math.isclose(float(noise.std()), sd * 1.5, rel_tol=0.02)
    cells = noise / (sd / 64)
    assert float((cells - cells.round()).abs().max()) < 1e-2


def test_without_noise_and_clipping_it_is_the_mean() -> None:
    mechanism = DPSGD(noise_multiplier=0.0, max_grad_norm=math.inf)
    step = make(mechanism)
    grads = gradients(16)
    step.add(grads)
    for got, g in zip(step.finish() or [], grads, strict=True):
        testing.assert_close("mean", got, g.mean(0), 1e-6)
    assert step.epsilon(1e-5) == math.inf


@pytest.mark.parametrize("arithmetic", ["exact", "float"])
def test_update_equals_the_released_gradient(arithmetic: str) -> None:
    mechanism = replace(FLAT, arithmetic=arithmetic)
    released, applied = make(mechanism), make(mechanism, optimizer=update.SGD(lr=0.5))
    before = [p.clone() for p in applied.params]
    for step in (released, applied):
        step.add(gradients(5))
        step.add(gradients(9, seed=2))
    noisy = released.finish()
    assert applied.finish() is None
    for p, old, g in zip(applied.params, before, noisy or [], strict=True):
        testing.assert_close("parameters", p, old - 0.5 * g, 1e-6)


def test_exact_sums_do_not_depend_on_physical_batches_or_backend() -> None:
    whole, split = make(), make(backend="reference")
    grads = gradients(12)
    whole.add(grads)
    for part in (slice(0, 1), slice(1, 8), slice(8, 12)):
        split.add([g[part] for g in grads])
    for a, b in zip(whole.finish() or [], split.finish() or [], strict=True):
        assert torch.equal(a, b)


def test_sums_widen_before_they_overflow() -> None:
    sigma = 2.0**-4
    step = make(DPSGD(noise_multiplier=sigma, max_grad_norm=1.0))
    block = step.plan.blocks[0]
    assert block.integer_bound == 1 << 24
    spike = [torch.zeros(100, *shape) for shape in SHAPES]
    spike[2][:, 5] = 1e6
    for _ in range(3):
        step.add(spike)
    released = step.finish()
    # 300 samples of norm 1 in one coordinate: 300 * 2^24 units do not fit 32 bits.
    assert released is not None
    assert float(released[2][5]) * 16 == pytest.approx(300, abs=8 * sigma)


def test_a_clipped_sum_carries_its_proof() -> None:
    by_hand, direct = make(), make()
    unit = direct.plan.units[0]
    result = clip.clip_sum(gradients(4), 0.5, arithmetic="exact", unit=unit)
    by_hand.add(sum=result)
    direct.add(gradients(4))
    for a, b in zip(by_hand.finish() or [], direct.finish() or [], strict=True):
        assert torch.equal(a, b)
    with pytest.raises(dpkern.PrivacyError, match="clipped to at most"):
        by_hand.add(sum=replace(result, max_norms=(0.6,)))
    with pytest.raises(dpkern.PrivacyError, match="exact sums"):
        by_hand.add(sum=clip.clip_sum(gradients(4), 0.5))
    with pytest.raises(dpkern.InvalidInput, match="ClipResult"):
        by_hand.add(sum=gradients(4))  # type: ignore[arg-type]


def test_every_step_has_fresh_noise_and_an_entry_in_the_ledger() -> None:
    step = make()
    first, second = step.finish(), step.finish()
    assert first is not None
    assert second is not None
    same = [float((a == b).float().mean()) for a, b in zip(first, second, strict=True)]
    assert max(same) < 0.1
    assert step.steps == step.ledger.steps == 2


def test_two_runs_without_a_seed_differ_and_are_certified() -> None:
    one, two = make(seed=None), make(seed=None)
    a, b = one.finish(), two.finish()
    assert a is not None
    assert b is not None
    assert not torch.equal(a[2], b[2])
    assert 0 < one.epsilon(1e-5) < 1
    assert make().epsilon(1e-5) == math.inf


def test_words_are_counted() -> None:
    step = make()
    step.finish()
    assert step.words == {"produced": 3 * 768 + 768, "consumed": 105 + 15 + 770}


def test_resume_continues_a_seeded_run_exactly() -> None:
    rule = update.Adam(lr=0.01)
    whole, first = make(optimizer=rule), make(optimizer=rule)
    for i in range(4):
        whole.add(gradients(6, seed=i))
        whole.finish()
    for i in range(2):
        first.add(gradients(6, seed=i))
        first.finish()
    resumed = make(optimizer=rule)
    for p, q in zip(resumed.params, first.params, strict=True):
        p.copy_(q)
    resumed.load_state_dict(first.state_dict())
    for i in range(2, 4):
        resumed.add(gradients(6, seed=i))
        resumed.finish()
    assert resumed.ledger.steps == 4
    for p, q in zip(whole.params, resumed.params, strict=True):
        assert torch.equal(p, q)


def test_unseeded_resume_keeps_the_history_and_takes_a_fresh_key() -> None:
    first, second = make(seed=None), make(seed=None)
    first.finish()
    second.load_state_dict(first.state_dict())
    assert second.steps == 1
    assert second.epsilon(1e-5) == first.epsilon(1e-5)
    assert second.key._secret != first.key._secret


def test_sums_without_noise_are_never_saved() -> None:
    step = make()
    step.add(gradients(3))
    with pytest.raises(dpkern.PrivacyError, match="finish"):
        step.state_dict()
    step.finish()
    assert step.state_dict()["steps"] == 1


def test_resume_of_another_run_is_refused() -> None:
    state = make().state_dict()
    other = make(replace(FLAT, noise_multiplier=2.0))
    with pytest.raises(dpkern.InvalidInput, match="another mechanism"):
        other.load_state_dict(state)
    assert other.steps == 0


def test_report_is_json_and_names_its_limits() -> None:
    step = make()
    step.finish()
    report = step.report(1e-5)
    assert report["epsilon_certified"] == "inf"
    assert report["epsilon_if_seed_secret"] < 1
    assert report["certificate"]["certified_for"] == "nothing"
    assert "worst_case_float_sensitivity" not in report
    rounded = make(replace(FLAT, arithmetic="float"))
    rounded.finish()
    worst = rounded.report(1e-5)["worst_case_float_sensitivity"]
    assert worst == pytest.approx(1 + 2 * 16 * 17 * 2.0**-24, rel=1e-9)
    real = make(seed=None)
    real.finish()
    assert real.report(1e-5)["certificate"]["certified_for"] == "released bits"
