"""The private step in released coordinates: what it clips, noises, hands out and refuses."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import dpkern
from dpkern import DPStep
from dpkern.base.rng import Key
from dpkern.ops import clip, testing, update
from dpkern.privacy.mechanisms import (
    DPSGD,
    DiagonalMap,
    Mechanism,
    PartialNoiseMap,
    ReleaseMap,
    WhitenedCrop,
)
from dpkern.step.graphs import UpdateGraph
from tests.engine.released_cases import CONV, SHAPES, Learner, Made, crop, gradients, make, weighing

SCALES = [torch.rand(s, generator=torch.Generator().manual_seed(9)).double() + 0.5 for s in SHAPES]
CENTRES = [torch.randn(s, generator=torch.Generator().manual_seed(8)).double() for s in SHAPES]
CROPPED = Made(releases=(crop(3), None, None))
DIAGONAL = Made(releases=tuple(DiagonalMap(scale=s) for s in SCALES))
ADAPTED = Made(
    releases=tuple(
        DiagonalMap(scale=s, centre=m, restore=True) for s, m in zip(SCALES, CENTRES, strict=True)
    )
)


def by_hand(mechanism: Made, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Noise off: centre, map, clip together, sum, map back, restore; in float64."""
    releases = [r or DiagonalMap() for r in mechanism.releases]
    centred = [
        g.double() - (0 if r.centre is None else r.centre)
        for g, r in zip(grads, releases, strict=True)
    ]
    coords = [r.forward(g) for g, r in zip(centred, releases, strict=True)]
    normed = centred if releases[0].norm == "gradient" else coords
    norms = torch.cat([c.flatten(1) for c in normed], 1).norm(dim=1)
    factors = (mechanism.max_grad_norm / norms).clamp(max=1)
    out = []
    for c, r in zip(coords, releases, strict=True):
        mean = r.to_gradient(torch.tensordot(factors, c, 1)) / 8
        out.append(mean if not r.restore or r.centre is None else mean + r.centre)
    return out


@pytest.mark.parametrize(
    "mechanism",
    [
        CROPPED,
        DIAGONAL,
        ADAPTED,
        Made(releases=tuple(DiagonalMap(scale=s, norm="gradient") for s in SCALES)),
        Made(releases=(WhitenedCrop(site=CONV, gain=0.1), None, None)),
    ],
    ids=["crop", "diagonal", "restored centre", "gradient norm", "gain"],
)
@pytest.mark.parametrize("bound", [1.0, 1e4], ids=["clipped", "free"])
def test_without_noise_it_is_the_formula(mechanism: Made, bound: float) -> None:
    mechanism = replace(mechanism, noise_multiplier=0.0, max_grad_norm=bound)
    step = make(mechanism)
    grads = gradients(6)
    step.add([g[:2] for g in grads])
    step.add([g[2:] for g in grads])
    for got, wanted in zip(step.finish() or [], by_hand(mechanism, grads), strict=True):
        testing.assert_close("gradient", got.double(), wanted, 1e-5)


def covariance(values: torch.Tensor) -> np.ndarray[Any, Any]:
    return np.cov(values.double().numpy().T)


@pytest.mark.parametrize("arithmetic", ["exact", "float"])
def test_the_law_is_isotropic_noise_mapped_back(arithmetic: str) -> None:
    release = crop(3)
    step = make(Made(releases=(release, None, None), arithmetic=arithmetic, max_grad_norm=2.0))
    drawn = [step.finish() or [] for _ in range(20)]
    taps = torch.cat([g[0].flatten(2).flatten(0, 1) for g in drawn]) * 8  # 4000 kernels
    assert release.post is not None
    wanted = 4.0 * release.post @ release.post.T
    found = covariance(taps)
    # Each entry's standard error is below 3 % of the largest one; isotropic noise is far off.
    scale = np.abs(wanted).max()
    assert np.abs(found - wanted).max() < 0.1 * scale
    assert np.abs(found - np.trace(wanted) / 4 * np.eye(4)).max() > 0.3 * scale
    # Rank 3: the fourth direction holds nothing.
    assert np.linalg.svd(found)[1][3] < 1e-10 * scale
    rest = torch.cat([g[2].flatten() for g in drawn]) * 8
    assert float(rest.std()) == pytest.approx(2.0, rel=0.06)


def test_open_noise_leaves_its_directions_free_and_certifies_nothing() -> None:
    noisy = PartialNoiseMap(site=CONV, noise=np.array([[1.0], [2.0], [0.0], [0.0]]))
    step = make(Made(releases=(noisy, None, None)), seed=None)
    grads = gradients(5)
    step.add(grads)
    kernel = ((step.finish() or [])[0] * 8).flatten(2)
    clipped = clip.clip_sum(grads, 1.0).sums[0].flatten(2)
    moved = kernel - clipped
    testing.assert_close("ratio", moved[..., 1], 2 * moved[..., 0], 1e-4)
    testing.assert_close("free", kernel[..., 2:], clipped[..., 2:], 1e-6)
    assert float(moved[..., 0].std()) == pytest.approx(1.0, rel=0.2)
    assert step.epsilon(1e-5) == math.inf
    assert "directions without noise" in step.report(1e-5)["non_private"]


@pytest.mark.parametrize("arithmetic", ["exact", "float"])
def test_released_samples_and_engine_sums_equal_gradients(arithmetic: str) -> None:
    mechanism = replace(CROPPED, arithmetic=arithmetic)
    grads = gradients(6)
    direct, coordinates, summed = make(mechanism), make(mechanism), make(mechanism)
    direct.add(grads)
    release = mechanism.releases[0]
    assert release is not None
    coords = [release.forward(grads[0]).float(), *grads[1:]]
    coordinates.add([c[:4] for c in coords], released=True)
    coordinates.add([c[4:] for c in coords], released=True)
    norms = torch.cat([c.flatten(1) for c in coords], 1).double().norm(dim=1)
    if arithmetic == "exact":
        unit = summed.plan.units[0]
        result = clip.clip_sum(coords, 1.0, arithmetic="exact", unit=unit)
    else:
        result = clip.clip_sum(grads, 1.0)
        factors = (clip.SLACK / norms).clamp(max=1).float()
        sums = tuple(torch.tensordot(factors, g, 1) for g in grads)
        taken = tuple(block.release for block in summed.plan.blocks)
        result = replace(result, sums=sums, norms=norms, clipped_as=taken)
    summed.add(sum=result)
    for a, b, c in zip(*(s.finish() or [] for s in (direct, coordinates, summed)), strict=True):
        if arithmetic == "exact":
            assert torch.equal(a, b)
            assert torch.equal(a, c)
        else:
            cells = 8 * 1e-4
            testing.assert_close("coordinates", a, b, cells)
            testing.assert_close("sums", a, c, cells)


def test_integers_in_released_coordinates_never_pass_the_bound() -> None:
    """Adversarial rows: ties of rounding, spikes, tiny and huge entries, and not a number."""
    mechanism = replace(CROPPED, arithmetic="exact", noise_multiplier=0.0625)
    step = make(mechanism)
    (most,) = {block.integer_bound for block in step.plan.blocks}
    assert most == 1 << 24
    rows = gradients(7, seed=5)
    for g in rows:
        g[0] = 1.0
        g[1] = 0.0
        g[1].view(-1)[0] = 1e30
        g[2] *= 1e-30
        g[3] *= 1e30
        g[4] = torch.nan
    for b in range(7):
        alone = make(mechanism)
        alone.add([g[b : b + 1] for g in rows])
        assert [tuple(s.shape) for s in alone._sums or ()] == [(20, 10, 3), (20,), (9, 7)]
        total = sum(int(s.double().square().sum()) for s in alone._sums or ())
        assert total <= most * most
        assert (total == 0) == (b in (2, 4)) or b == 2
        assert alone.nonfinite == (b == 4)


@pytest.mark.parametrize("arithmetic", ["exact", "float"])
def test_two_processes_equal_one(arithmetic: str) -> None:
    mechanism, key = replace(CROPPED, arithmetic=arithmetic), Key.from_unsafe_seed(7)
    grads = gradients(6)
    whole = make(mechanism)
    whole.add(grads)
    kept: list[list[torch.Tensor]] = []

    def give(sums: list[torch.Tensor]) -> None:
        kept.append([s.clone() for s in sums])

    def take(sums: list[torch.Tensor]) -> None:
        for mine, theirs in zip(sums, kept[0], strict=True):
            mine.add_(theirs)

    first = make(mechanism, seed=None, key=key, reduce=give)
    second = make(mechanism, seed=None, key=key, reduce=take)
    first.add([g[:1] for g in grads])
    second.add([g[1:] for g in grads])
    first.finish()
    for a, b in zip(whole.finish() or [], second.finish() or [], strict=True):
        testing.assert_close("processes", a, b, 0.0 if arithmetic == "exact" else 1e-4)


@pytest.mark.parametrize("rule", [update.Adam(lr=0.1), update.SGD(lr=0.5, momentum=0.9)])
@pytest.mark.parametrize("arithmetic", ["exact", "float"])
def test_a_group_of_both_kinds_is_one_step_of_its_rule(rule: update.Rule, arithmetic: str) -> None:
    mechanism = replace(CROPPED, arithmetic=arithmetic)
    fused, plain = make(mechanism, optimizer=rule), make(mechanism)
    by_torch = [p.clone().requires_grad_() for p in plain.params]
    if isinstance(rule, update.Adam):
        theirs: torch.optim.Optimizer = torch.optim.Adam(by_torch, lr=0.1)
    else:
        theirs = torch.optim.SGD(by_torch, lr=0.5, momentum=0.9)
    for i in range(3):
        for step in (fused, plain):
            step.add(gradients(4, seed=i))
        for p, g in zip(by_torch, plain.finish() or [], strict=True):
            p.grad = g
        theirs.step()
        fused.finish()
    assert fused.optimizer_state is not None
    assert fused.optimizer_state.steps == 3
    assert fused.words == plain.words
    for mine, wanted in zip(fused.params, by_torch, strict=True):
        testing.assert_close("parameters", mine, wanted.detach(), 1e-5)


def test_some_may_be_updated_and_others_handed_out() -> None:
    step, whole = make(CROPPED), make(CROPPED)
    noisy = whole.finish() or []
    rule = update.SGD(lr=1.0)
    before = [p.clone() for p in step.params]
    left = step.finish([((0, 2), rule, rule.init([step.params[0], step.params[2]]))]) or []
    assert [g is None for g in left] == [True, False, True]
    assert torch.equal(left[1], noisy[1])
    for i in (0, 2):
        testing.assert_close(f"p{i}", before[i] - step.params[i], noisy[i], 1e-5)


def test_a_block_without_noise_is_its_sum() -> None:
    step = make(Made(silent=(1,)), optimizer=update.SGD(lr=1.0))
    before = [p.clone() for p in step.params]
    grads = gradients(4)
    step.add(grads)
    step.finish()
    clean = clip.clip_sum(grads, 1.0).sums
    testing.assert_close("silent", before[1] - step.params[1], clean[1] / 8, 1e-5)
    assert float((before[2] - step.params[2] - clean[2] / 8).abs().max()) > 0.1
    assert step.epsilon_if_seed_secret(1e-5) == math.inf


@pytest.mark.parametrize("arithmetic", ["exact", "float"])
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_plans_without_a_map_keep_their_bits(arithmetic: str, clipping: str) -> None:
    """Digests of what was released before there were maps."""
    mechanism = DPSGD(
        noise_multiplier=1.1, max_grad_norm=0.5, arithmetic=arithmetic, clipping=clipping
    )

    def start(rule: update.Rule | None = None) -> DPStep:
        params = [torch.zeros(shape) for shape in ((10, 7), (10,), (513,))]
        given: dict[str, Any] = {"expected_batch_size": 16.0, "sample_rate": 0.01}
        return DPStep(mechanism, params, optimizer=rule, unsafe_seed=7, **given)

    def digest(tensors: Sequence[torch.Tensor | None]) -> str:
        parts = [t.numpy().tobytes() for t in tensors if t is not None]
        return hashlib.sha256(b"".join(parts)).hexdigest()[:16]

    released = start()
    assert digest(released.finish() or []) == "f5d366f4dc0ebf59"
    assert digest(released.finish() or []) == "c0106c1fa9dd20b1"
    updated = start(update.SGD(lr=0.5))
    updated.finish()
    updated.finish()
    assert digest(updated.params) == "d8ab689bf72e0187"


# What gradients alone cannot tell.


@pytest.mark.parametrize(
    ("release", "released", "says"),
    [
        (WhitenedCrop(site=CONV, norm="spectrum"), False, "input and output gradient"),
        (crop(band="half"), False, "conv_release"),
        (WhitenedCrop(site=CONV, norm="spectrum"), True, "clipped by the norm of its spectrum"),
        (
            DiagonalMap(scale=SCALES[0], norm="gradient"),
            True,
            "clipped by the norm of its gradient",
        ),
    ],
)
def test_norms_of_operands_come_from_the_engine(
    release: ReleaseMap, released: bool, says: str
) -> None:
    step = make(Made(releases=(release, None, None)))
    with pytest.raises(dpkern.InvalidInput, match=says):
        step.add(gradients(2), released=released)
    assert not step.unfinished
    taken = tuple(block.release for block in step.plan.blocks)
    step.add(sum=replace(clip.clip_sum(gradients(2), 1.0), clipped_as=taken))
    step.finish()


def test_norms_of_two_kinds_are_the_engines() -> None:
    both = DiagonalMap(scale=SCALES[0], norm="gradient"), DiagonalMap(scale=SCALES[1])
    with pytest.raises(dpkern.InvalidInput, match="one norm"):
        make(Made(releases=(*both, None))).add(gradients(2))


def test_laplace_steps_clip_l1_norms() -> None:
    step = make(Made(distribution="laplace", noise_multiplier=0.0625))
    assert step.plan.p == 1
    grads = gradients(3)
    step.add(grads)
    norms = torch.cat([g.flatten(1) for g in grads], 1).abs().sum(1)
    wanted = torch.tensordot(1 / norms, grads[2], 1)
    testing.assert_close("sum", (step._sums or ())[2], wanted, 1e-5)
    with pytest.raises(dpkern.PrivacyError, match="norm 1"):
        step.add(sum=clip.clip_sum(grads, 1.0))
    step.add(sum=clip.clip_sum(grads, 1.0, p=1))
    exact = make(Made(distribution="laplace", arithmetic="exact"))
    exact.add([g[:1] for g in grads])
    most = exact.plan.blocks[0].integer_bound or 0
    total = sum(int(s.long().abs().sum()) for s in exact._sums or ())
    assert 0.998 * most < total <= most


# Noise once per sample.


def test_noise_per_sample_grows_with_the_batch() -> None:
    step = make(Made(noise_point="per_sample"))
    zeros = [torch.zeros_like(g) for g in gradients(25)]
    step.add(zeros)
    wide = torch.cat([g.flatten() for g in step.finish() or []]) * 8
    assert float(wide.std()) == pytest.approx(5.0, rel=0.08)  # 883 draws
    assert all(not g.any() for g in step.finish() or [])
    assert step.epsilon_if_seed_secret(1e-5) == math.inf
    unseeded = make(step.mechanism, seed=None)
    unseeded.finish()
    assert "number of samples" in unseeded.report(1e-5)["non_private"]


@pytest.mark.parametrize("releases", [(None, None, None), CROPPED.releases], ids=["plain", "crop"])
def test_a_certified_number_of_samples_is_kept(releases: Any) -> None:
    mechanism = Made(noise_point="per_sample", batch_size=16, releases=releases)
    run = {"sampling": "fixed", "dataset_size": 160, "sample_rate": 0.1}
    step = make(mechanism, seed=None, **run)
    assert step.plan.noise_multiplier == pytest.approx(4.0, rel=1e-6)
    grads = gradients(16)
    step.add([g[:9] for g in grads])
    with pytest.raises(dpkern.PrivacyError, match="16 samples"):
        step.finish()
    assert step.steps == step.ledger.steps == 0
    step.add([g[9:] for g in grads])
    released = step.finish() or []
    clean = clip.clip_sum(grads, 1.0).sums
    assert float((released[2] * 8 - clean[2]).std()) == pytest.approx(4.0, rel=0.3)
    assert step.epsilon(1e-5) < math.inf
    with pytest.raises(dpkern.PrivacyError, match="16 samples"):
        step.finish()
    assert step.steps == 1


@pytest.mark.parametrize("kind", ["per sample", "importance"])
def test_processes_count_samples_and_raw_sums_together(kind: str) -> None:
    """What one process hands to ``reduce`` is replayed to the other, call by call."""
    mechanism = Made(noise_point="per_sample") if kind == "per sample" else weighing("lot")
    grads, key = gradients(6), Key.from_unsafe_seed(7)
    sent: list[list[torch.Tensor]] = []
    calls = iter(range(9))

    def give(sums: list[torch.Tensor]) -> None:
        sent.append([s.clone() for s in sums])

    def take(sums: list[torch.Tensor]) -> None:
        for mine, theirs in zip(sums, sent[next(calls)], strict=True):
            mine.add_(theirs)

    whole = make(mechanism, seed=None, key=key)
    first = make(mechanism, seed=None, key=key, reduce=give)
    second = make(mechanism, seed=None, key=key, reduce=take)
    whole.add(grads)
    first.add([g[:1] for g in grads])
    second.add([g[1:] for g in grads])
    first.finish()
    for a, b in zip(whole.finish() or [], second.finish() or [], strict=True):
        testing.assert_close("processes", a, b, 1e-4)
    assert len(sent) == next(calls) == 2
    if whole.memory is not None and second.memory is not None:
        for a, b in zip(whole.memory["seen"], second.memory["seen"], strict=True):
            testing.assert_close("importance", a, b, 1e-6)


# Who refuses released coordinates.


@pytest.mark.parametrize(
    "mechanism",
    [CROPPED, weighing("lot"), Made(noise_point="per_sample")],
    ids=["crop", "importance", "per sample"],
)
def test_shards_are_refused_before_anything_is_recorded(mechanism: Mechanism) -> None:
    step: DPStep = make(mechanism)
    step.shards = dpkern.step.sums.Shards(step.params, [0, 0, 0])
    with pytest.raises(dpkern.InvalidInput, match="DistributedDataParallel"):
        step.finish()
    assert step.ledger.steps == 0


def test_recorded_updates_are_refused() -> None:
    for mechanism in (CROPPED, Learner()):
        step = make(mechanism, optimizer=update.SGD(lr=1.0))
        with pytest.raises(dpkern.InvalidInput, match="release coordinates or a memory"):
            UpdateGraph(step)


def test_schedules_change_noise_in_released_coordinates() -> None:
    step = make(CROPPED, seed=None)
    step.finish()
    step.mechanism = replace(CROPPED, noise_multiplier=2.0)
    step.finish()
    entries = step.ledger.state_dict()["entries"]
    assert [e["event"]["noise_multiplier"] for e in entries] == pytest.approx([1, 2], rel=1e-6)
    assert step.plan.blocks[0].release == CROPPED.releases[0]
