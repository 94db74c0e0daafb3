"""Steps of mechanisms that learn from what they released, or shape their noise by it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import dpkern
from dpkern.base.rng import Purpose
from dpkern.ops import clip, noise, testing, update
from dpkern.privacy.mechanisms import (
    DPSGD,
    DiagonalMap,
)
from tests.engine.released_cases import SHAPES, Learner, gradients, make, weighing

# Mechanisms that learn.


def test_a_learner_plans_anew_from_what_was_released() -> None:
    step = make(Learner(), optimizer=update.SGD(lr=1.0))
    scale = [torch.ones(s, dtype=torch.float64) for s in SHAPES]
    for i in range(2):
        before = [p.clone() for p in step.params]
        step.add(gradients(4, seed=i))
        step.finish()
        released = [a - b for a, b in zip(before, step.params, strict=True)]
        scale = [0.5 * s + 0.5 * (1 + g.double().abs()) for s, g in zip(scale, released)]  # noqa: B905
        for block, wanted in zip(step.plan.blocks, scale, strict=True):
            assert isinstance(block.release, DiagonalMap)
            assert block.release.scale is not None
            testing.assert_close("scale", block.release.scale, wanted, 1e-5)
    assert step.report(1e-5)["realised"]["largest"] > 1
    doubled, once = make(Learner(doubled=True)), make(Learner())
    for a, b in zip(doubled.finish() or [], once.finish() or [], strict=True):
        assert torch.equal(a, 2 * b)


def test_what_was_learnt_is_saved_and_secrets_are_not() -> None:
    whole, first = make(Learner()), make(Learner())
    for i in range(3):
        whole.add(gradients(4, seed=i))
        last = whole.finish() or []
    for i in range(2):
        first.add(gradients(4, seed=i))
        first.finish()
    state = first.state_dict()
    assert set(state["memory"]) == {"scale", "seen"}
    resumed = make(Learner())
    resumed.load_state_dict(state)
    assert resumed.plan == first.plan
    resumed.add(gradients(4, seed=2))
    for a, b in zip(resumed.finish() or [], last, strict=True):
        assert torch.equal(a, b)
    assert resumed.memory is not None
    assert float(resumed.memory["secret"][0].max()) == 1
    for bad in (None, {"scale": state["memory"]["scale"]}, {**state["memory"], "scale": []}):
        fresh = make(Learner())
        with pytest.raises(dpkern.InvalidInput, match=r"state\.memory"):
            fresh.load_state_dict({**state, "memory": bad})
        assert fresh.steps == 0


def test_states_of_version_1_still_load() -> None:
    flat = DPSGD(noise_multiplier=1.1, max_grad_norm=0.5)
    step = make(flat, seed=None)
    step.finish()
    state = step.state_dict()
    old = {k: v for k, v in state.items() if k != "memory"} | {"version": 1}
    entries = [
        {k: v for k, v in e.items() if k not in ("unsampled", "remarks")}
        for e in state["ledger"]["entries"]
    ]
    old["ledger"] = state["ledger"] | {"version": 1, "entries": entries}
    resumed = make(flat, seed=None)
    resumed.load_state_dict(old)
    assert resumed.steps == 1
    assert resumed.ledger.state_dict() == step.ledger.state_dict()
    with pytest.raises(dpkern.InvalidInput, match="version"):
        make(flat).load_state_dict(state | {"version": 3})


def test_a_certificate_that_depends_on_what_was_learnt_is_refused() -> None:
    step = make(Learner(drifting=True))
    with pytest.raises(dpkern.PrivacyError, match="a priori"):
        step.finish()
    assert step.ledger.steps == 1  # the release has happened


# A release that shapes the noise.


def test_the_importance_of_a_lot_is_its_raw_mean_with_noise_of_its_own() -> None:
    step = make(weighing("lot"))
    grads = gradients(6)
    grads[0][2, 0, 0] = math.nan
    step.add([g[:4] for g in grads])
    step.add([g[4:] for g in grads])
    assert step._raw is not None
    with pytest.raises(dpkern.PrivacyError):
        step.state_dict()
    step.finish()
    assert step._raw is None
    assert step.memory is not None
    keep = [0, 1, 3, 4, 5]
    stream = step.key.stream(Purpose.NOISE, 1, 1)
    rounding = step.key.stream(Purpose.ROUNDING, 1, 1)
    dither = np.random.default_rng(1)
    for seen, g, position in zip(step.memory["seen"], grads, (0, 1024, 1536), strict=True):
        mean = (g[keep].double().sum(0) / 8).contiguous()
        noisy = noise.add_noise(
            mean, stream=stream, position=position, scale=2.0**-4, rounding=rounding
        )
        places = torch.from_numpy(dither.random(tuple(noisy.shape))) - 0.5
        testing.assert_close("importance", seen, noisy + places * 2.0**-4 / 64, 1e-9)
    assert step.words["consumed"] == 2 * (step.plan.words["consumed"] // 2)
    assert step.plan.dimension == 2 * 883


def test_the_importance_is_clipped_as_a_whole() -> None:
    step = make(weighing("full", bound=3.0, sd=2.0**-10))
    with pytest.raises(dpkern.InvalidInput, match="set_importance"):
        step.finish()
    assert step.steps == 0
    means = [torch.full(s, 7.0) for s in SHAPES]
    step.set_importance(means)
    step.finish()
    assert step.memory is not None
    norm = math.sqrt(sum(float(w.square().sum()) for w in step.memory["seen"]))
    assert norm == pytest.approx(3.0, rel=0.01)
    with pytest.raises(dpkern.InvalidInput, match="set_importance"):
        step.finish()  # anew for every step
    step.set_importance([m * math.inf for m in means])
    step.finish()
    largest = max(float(w.abs().max()) for w in step.memory["seen"])
    assert largest < 6 * 2.0**-10
    with pytest.raises(dpkern.InvalidInput, match="set_importance"):
        make(weighing("lot")).set_importance(means)
    with pytest.raises(dpkern.InvalidInput, match="raw"):
        make(weighing("lot")).add(sum=clip.clip_sum(gradients(2), 1.0))
    with pytest.raises(dpkern.InvalidInput, match="mean"):
        make(weighing("lot")).add(gradients(2), released=True)


def test_maps_follow_the_importance_of_their_own_step() -> None:
    """Many equal samples drown the noise: their sum comes back whole, whatever the scales were."""
    step = make(replace(weighing("lot"), noise_multiplier=2.0**-4))
    grads = [g.expand(400, *g.shape[1:]) for g in gradients(1)]
    step.add(grads)
    summed = make(step.mechanism)
    clean = clip.clip_sum(grads, 1.0)
    summed.add(sum=replace(clean, raw=tuple(g.sum(0) for g in grads)))
    for a, b, c in zip(*(s.finish() or [] for s in (step, summed)), clean.sums, strict=True):
        testing.assert_close("sums", a, b, 1e-4)
        assert float(c.abs().max()) > 10
        # Scales grow to 2 + 400 / 8 |g|, and the noise with them.
        assert float((a * 8 - c).abs().median()) < 40 / 16
        assert float((a * 8 / c)[c.abs() > 10].median()) == pytest.approx(1, rel=0.2)
