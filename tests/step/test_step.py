"""DPStep: what it releases, what it records, and what it refuses."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import dpkern
from dpkern import DPStep
from dpkern.ops import clip, testing, update
from dpkern.privacy.mechanisms import DPSGD

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
def test_sums_instead_of_means(arithmetic: str) -> None:
    mean, total = (make(replace(FLAT, arithmetic=arithmetic), average=a) for a in (True, False))
    for a, b in zip(mean.finish() or [], total.finish() or [], strict=True):
        testing.assert_close("sum", b, 16 * a, 1e-6)


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


def mixed(rule: update.Rule | None = None, **more: object) -> DPStep:
    """Parameters of three dtypes, the last one not contiguous."""
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(shape, generator=generator) for shape in ((4, 3), (5,), (6,), (2, 7))]
    params[1] = params[1].bfloat16()
    params[2] = params[2].double()
    params[3] = params[3].t()
    given = {"expected_batch_size": 4.0, "sample_rate": 0.1, "unsafe_seed": 5} | more
    mechanism = DPSGD(noise_multiplier=1.0, max_grad_norm=1.0, arithmetic="float")
    return DPStep(mechanism, params, **given)  # type: ignore[arg-type]


def test_the_first_sums_are_taken_over() -> None:
    step = make(replace(FLAT, arithmetic="float"))
    result = clip.clip_sum(gradients(4), 0.5)
    step.add(sum=result)
    assert [s.data_ptr() for s in step._sums or ()] == [s.data_ptr() for s in result.sums]
    exact = make()
    exact.add(sum=clip.clip_sum(gradients(4), 0.5, arithmetic="exact", unit=exact.plan.units[0]))
    exact.add(sum=clip.clip_sum(gradients(4), 0.5, arithmetic="exact", unit=exact.plan.units[0]))
    twice = make()
    twice.add([torch.cat((g, g)) for g in gradients(4)])
    for a, b in zip(exact.finish() or [], twice.finish() or [], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("arithmetic", ["exact", "float"])
def test_groups_of_updates_equal_the_released_gradients(arithmetic: str) -> None:
    mechanism = replace(FLAT, arithmetic=arithmetic)
    released, applied = make(mechanism), make(mechanism)
    before = [p.clone() for p in applied.params]
    for step in (released, applied):
        step.add(gradients(5))
    noisy = released.finish() or []
    sgd, adam = update.SGD(lr=0.5), update.Adam(lr=0.1)
    updates = [
        ((2,), sgd, sgd.init([applied.params[2]])),
        ((0,), adam, adam.init([applied.params[0]])),
    ]
    left = applied.finish(updates) or []
    assert [g is None for g in left] == [True, False, True]
    assert torch.equal(left[1], noisy[1])
    testing.assert_close("sgd", applied.params[2], before[2] - 0.5 * noisy[2], 1e-6)
    testing.assert_close("adam", applied.params[0], before[0] - 0.1 * noisy[0].sign(), 1e-4)
    assert torch.equal(applied.params[1], before[1])
    assert applied.words == released.words


@pytest.mark.parametrize(
    ("updates", "error", "name"),
    [
        ("all", dpkern.InvalidInput, "updates"),
        ([(0, update.SGD(lr=1.0))], dpkern.InvalidInput, "updates[0]"),
        ([((0,), "sgd", update.State())], dpkern.InvalidInput, "updates[0]"),
        ([((3,), update.SGD(lr=1.0), update.State())], dpkern.InvalidInput, "updates[0]"),
        ([((0, 0), update.SGD(lr=1.0), update.State())], dpkern.PrivacyError, "updates[0]"),
        ([((0,), update.SGD(lr=1.0), update.State())] * 2, dpkern.PrivacyError, "updates[1]"),
        ([((0,), update.Adam(lr=1.0), update.State())], dpkern.InvalidInput, "updates[0]"),
    ],
)
def test_bad_updates_release_nothing(updates: object, error: type, name: str) -> None:
    step = make()
    step.add(gradients(2))
    with pytest.raises(error) as raised:
        step.finish(updates)  # type: ignore[arg-type]
    assert raised.value.name == name
    assert step.steps == step.ledger.steps == 0
    assert step.unfinished
    with pytest.raises(dpkern.InvalidInput, match="with an optimizer"):
        make(optimizer=update.SGD(lr=1.0)).finish([])


def test_dtypes_may_differ_where_nothing_is_fused() -> None:
    step = mixed()
    grads = [torch.randn((3, *p.shape)).to(p.dtype) for p in step.params]
    step.add(grads)
    sums = step._sums or ()
    assert [s.dtype for s in sums] == [torch.float32, torch.float32, torch.float64, torch.float32]
    norms = clip.sample_norm([g.double() for g in grads])
    for i, g in enumerate(grads):
        weight = (1 / norms).clamp(max=1).view(-1, *[1] * (g.dim() - 1))
        testing.assert_close(f"sum {i}", sums[i].double(), (g.double() * weight).sum(0), 1e-5)
    released = step.finish() or []
    assert [g.dtype for g in released] == [p.dtype for p in step.params]
    rule = update.SGD(lr=1.0)
    one = mixed()
    with pytest.raises(dpkern.InvalidInput, match="bfloat16"):
        one.finish([((0, 1), rule, rule.init(one.params[:2]))])
    with pytest.raises(dpkern.InvalidInput, match="float64"):
        one.finish([((0, 2), rule, rule.init(one.params[:2]))])
    with pytest.raises(dpkern.InvalidInput, match="contiguous"):
        one.finish([((3,), rule, rule.init(one.params[3:]))])
    assert one.steps == 0


def test_half_precision_gradients_are_clipped_in_float32() -> None:
    params = [torch.zeros(4, dtype=torch.float16)]
    mechanism = DPSGD(noise_multiplier=0.0, max_grad_norm=1.0)
    step = DPStep(mechanism, params, expected_batch_size=2, sample_rate=0.5)
    step.add([torch.full((2, 4), 60000.0, dtype=torch.float16)])
    (gradient,) = step.finish() or []
    assert gradient.dtype is torch.float16
    testing.assert_close("mean", gradient.float(), torch.full((4,), 0.5), 1e-3)


def test_a_schedule_changes_noise_and_bound_and_is_accounted_step_by_step() -> None:
    step = make(seed=None)
    step.finish()
    step.mechanism = replace(FLAT, noise_multiplier=2.2, max_grad_norm=0.25)
    assert step.plan.scales[0] == pytest.approx(0.55)
    step.finish()
    entries = step.ledger.state_dict()["entries"]
    assert [e["event"]["noise_multiplier"] for e in entries] == pytest.approx([1.1, 2.2], rel=1e-3)
    report = step.report(1e-5)
    assert report["epsilon_claimed"] == report["epsilon_certified"]
    step.add(gradients(2))
    with pytest.raises(dpkern.PrivacyError, match="between steps"):
        step.mechanism = FLAT
    step.drop()
    for other in (replace(FLAT, clipping="per_layer"), replace(FLAT, arithmetic="float"), "dpsgd"):
        with pytest.raises(dpkern.InvalidInput, match="noise_multiplier"):
            step.mechanism = other  # type: ignore[assignment]
    published = make(replace(FLAT, mode="published"))
    with pytest.raises(dpkern.InvalidInput, match="published"):
        published.mechanism = replace(FLAT, mode="published", noise_multiplier=2.0)


def test_resume_in_the_middle_of_a_schedule() -> None:
    first = make(replace(FLAT, clipping="per_layer"))
    bounds = (0.5, 0.25, 0.125)
    first.mechanism = replace(first.mechanism, noise_multiplier=3.0, max_grad_norm=bounds)
    first.finish()
    resumed = make(replace(FLAT, clipping="per_layer"))
    resumed.load_state_dict(first.state_dict())
    assert resumed.mechanism == first.mechanism
    assert resumed.plan == first.plan
    state = first.state_dict()
    with pytest.raises(dpkern.InvalidInput, match="mechanism"):
        make(replace(FLAT, clipping="per_layer")).load_state_dict(state | {"mechanism": {"x": 1}})


@pytest.mark.parametrize("arithmetic", ["exact", "float"])
def test_groups_are_clipped_together(arithmetic: str) -> None:
    mechanism = DPSGD(
        noise_multiplier=2.0**-4,
        max_grad_norm=(1.0, 3.0),
        clipping="group",
        groups=(1, 0, 1),
        arithmetic=arithmetic,
    )
    step = make(mechanism)
    grads = gradients(6)
    grads[1][2, 0] = math.nan
    step.add([g[:4] for g in grads])
    step.add([g[4:] for g in grads])
    assert step.nonfinite == 1
    kept = [g[[0, 1, 3, 4, 5]] for g in grads]
    unit = [u or 1.0 for u in step.plan.units] if arithmetic == "exact" else [1.0] * 3
    for group, bound in (((0, 2), 3.0), ((1,), 1.0)):
        norm = torch.cat([kept[i].flatten(1) for i in group], dim=1).norm(dim=1)
        for i in group:
            weight = (bound / norm).clamp(max=1).view(-1, *[1] * (kept[i].dim() - 1))
            mine = (step._sums or ())[i].double() * unit[i]
            testing.assert_close(f"sum {i}", mine, (kept[i] * weight).sum(0).double(), 1e-4)
    result = clip.clip_sum(
        grads, [1.0, 3.0, 1.0], style="per_layer", arithmetic=arithmetic,
        unit=unit if arithmetic == "exact" else None,
    )  # fmt: skip
    with pytest.raises(dpkern.PrivacyError, match="clipped to at most"):
        step.add(sum=result)


@pytest.mark.parametrize("arithmetic", ["exact", "float"])
def test_processes_that_reduce_and_share_a_key_equal_one(arithmetic: str) -> None:
    mechanism = replace(FLAT, arithmetic=arithmetic)
    grads, key = gradients(6), dpkern.rng.Key.from_unsafe_seed(7)
    whole = make(mechanism)
    whole.add(grads)
    sums: list[list[torch.Tensor]] = []

    def gather(mine: list[torch.Tensor]) -> None:
        sums.append([s.clone() for s in mine])

    def reduce(mine: list[torch.Tensor]) -> None:
        for total, theirs in zip(mine, sums[0], strict=True):
            total.add_(theirs)

    ranks = [make(mechanism, seed=None, key=key, reduce=f) for f in (gather, reduce)]
    ranks[0].add([g[:2] for g in grads])
    ranks[1].add([g[2:] for g in grads])
    ranks[0].finish()
    assert arithmetic == "float" or sums[0][0].dtype is torch.int64
    for a, b in zip(ranks[1].finish() or [], whole.finish() or [], strict=True):
        testing.assert_close("mean", a, b, 0.0 if arithmetic == "exact" else 1e-3)
    with pytest.raises(dpkern.InvalidInput, match="key"):
        make(key=key)
    with pytest.raises(dpkern.InvalidInput, match="key"):
        make(seed=None, key="secret")
