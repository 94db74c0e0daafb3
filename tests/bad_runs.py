"""Bad mechanisms, accounting questions, steps and files."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dpkern.engine import sampling
from dpkern.engine.demo import models
from dpkern.ops import update
from dpkern.privacy import accounting
from dpkern.privacy.mechanisms import DPSGD
from dpkern.train import data
from tests.bad_world import (
    NAN,
    UNIT,
    Bad,
    P,
    World,
    as_floats,
    forgotten,
    of_one_parameter,
    poisoned,
    unclipped_automatic,
    used,
    widened,
)

MECHANISMS = [
    Bad("sigma-negative", "noise_multiplier", lambda w: replace(w.mechanism, noise_multiplier=-1)),
    Bad("sigma-nan", "noise_multiplier", lambda w: replace(w.mechanism, noise_multiplier=NAN)),
    Bad(
        "sigma-small", "noise_multiplier", lambda w: replace(w.mechanism, noise_multiplier=0.01), P
    ),
    Bad(
        "sigma-large", "noise_multiplier", lambda w: replace(w.mechanism, noise_multiplier=2000), P
    ),
    Bad("mechanism-bound", "max_grad_norm", lambda w: replace(w.mechanism, max_grad_norm=0)),
    Bad("mechanism-bounds", "max_grad_norm", lambda w: replace(w.mechanism, max_grad_norm=(1, 2))),
    Bad("mechanism-clipping", "clipping", lambda w: replace(w.mechanism, clipping="soft")),
    Bad("mechanism-mode", "mode", lambda w: replace(w.mechanism, mode="printed")),
    Bad("plan-empty", "shapes", lambda w: w.mechanism.plan([])),
    Bad("plan-shape", "shapes", lambda w: w.mechanism.plan([(3, -1)])),
    Bad(
        "plan-layers",
        "max_grad_norm",
        lambda w: DPSGD(noise_multiplier=1, max_grad_norm=(1.0, 1.0), clipping="per_layer").plan(
            [(3,)]
        ),
    ),
]


def epsilon(world: World, **changes: Any) -> float:
    given = {"sample_rate": 0.1, "steps": 10, "delta": 1e-5} | changes
    return accounting.epsilon(world.mechanism, **given)


def calibrate(world: World, **changes: Any) -> object:
    given = {"target_epsilon": 1.0, "sample_rate": 0.1, "steps": 10, "delta": 1e-5} | changes
    return accounting.calibrate(world.mechanism, **given)


ACCOUNTING = [
    Bad("delta-zero", "delta", lambda w: epsilon(w, delta=0.0)),
    Bad("delta-one", "delta", lambda w: epsilon(w, delta=1)),
    Bad("delta-nan", "delta", lambda w: w.step.certify(NAN)),
    Bad("rate-zero", "sample_rate", lambda w: epsilon(w, sample_rate=0.0)),
    Bad("rate-large", "sample_rate", lambda w: epsilon(w, sample_rate=1.5)),
    Bad("steps-negative", "steps", lambda w: epsilon(w, steps=-1)),
    Bad("steps-float", "steps", lambda w: epsilon(w, steps=1.5)),
    Bad("sampling", "sampling", lambda w: epsilon(w, sampling="bootstrap"), says="'poisson'"),
    Bad("fixed-size", "dataset_size", lambda w: epsilon(w, sampling="fixed")),
    Bad("target", "target_epsilon", lambda w: calibrate(w, target_epsilon=-1.0)),
    Bad("unreachable", "target_epsilon", lambda w: calibrate(w, target_epsilon=1e-6), P),
    Bad("ledger", "state", lambda w: w.step.ledger.load_state_dict({})),
    Bad("poisson-empty", "dataset_size", lambda w: batches("poisson", dataset_size=0)),
    Bad("poisson-batch", "batch_size", lambda w: batches("poisson", batch_size=0)),
    Bad("fixed-batch", "batch_size", lambda w: batches("fixed", batch_size=101)),
    Bad("batches-steps", "steps", lambda w: batches("shuffled", steps=-1)),
    Bad("batches-name", "sampling", lambda w: batches("bootstrap")),
    Bad("batches-key", "key", lambda w: batches("poisson", key="secret")),
]


def batches(name: str, **changes: Any) -> object:
    given = {"dataset_size": 100, "batch_size": 10, "steps": 5} | changes
    return sampling.make_batches(name, **given)


STEP = [
    Bad("mechanism", "mechanism", lambda w: w.make("dpsgd")),
    Bad("no-params", "params", lambda w: w.make(params=[])),
    Bad("one-tensor", "params", lambda w: w.make(params=w.params[0])),
    Bad("half-params", "params[0]", lambda w: w.make(params=[w.floats.half()])),
    Bad("mixed-params", "params[1]", lambda w: w.make(params=[w.floats, w.floats.double()])),
    Bad("strided-params", "params[0]", lambda w: w.make(params=[w.params[0].t()])),
    Bad("same-params", "params", lambda w: w.make(params=[w.floats, w.floats]), says="twice"),
    Bad("batch-size", "expected_batch_size", lambda w: w.make(expected_batch_size=0)),
    Bad("step-rate", "sample_rate", lambda w: w.make(sample_rate=2.0)),
    Bad("step-sampling", "sampling", lambda w: w.make(sampling="bootstrap")),
    Bad("step-fixed", "dataset_size", lambda w: w.make(sampling="fixed")),
    Bad("step-optimizer", "optimizer", lambda w: w.make(optimizer="adam")),
    Bad("step-seed", "unsafe_seed", lambda w: w.make(unsafe_seed=1.5)),
    Bad("step-rounds", "rounds", lambda w: w.make(rounds=10)),
    Bad("add-nothing", "add", lambda w: w.open.add(), says="neither"),
    Bad("add-both", "add", lambda w: w.open.add(w.grads, sum=w.exact()), says="both"),
    Bad("add-tensor", "per_sample", lambda w: w.step.add(w.grads[0]), says="Tensor"),
    Bad("add-number", "per_sample", lambda w: w.step.add(3)),
    Bad("add-few", "per_sample", lambda w: w.open.add(w.grads[:1])),
    Bad("add-none", "per_sample[0]", lambda w: w.step.add([None, w.grads[1]])),
    Bad("add-shape", "per_sample[1]", lambda w: w.step.add([w.grads[0], w.grads[0]])),
    Bad("add-unbatched", "per_sample[0]", lambda w: w.step.add(w.params)),
    Bad("add-batches", "per_sample[1]", lambda w: w.open.add([w.grads[0], w.grads[1][:2]])),
    Bad("add-int", "per_sample[0]", lambda w: w.step.add([g.int() for g in w.grads])),
    Bad("add-dtypes", "grads[1]", lambda w: w.step.add([w.grads[0], w.grads[1].double()])),
    Bad("add-meta", "per_sample[0]", lambda w: w.step.add([g.to("meta") for g in w.grads])),
    Bad("add-automatic", "max_grad_norm", unclipped_automatic),
    Bad("sum-list", "sum", lambda w: w.open.add(sum=w.sums), says="ClipResult"),
    Bad("sum-float", "sum", lambda w: w.open.add(sum=w.clip()), P, says="exact"),
    Bad("sum-unit", "sum", lambda w: w.open.add(sum=w.exact(unit=2.0**-19)), P),
    Bad("sum-l1", "sum", lambda w: w.open.add(sum=w.exact(unit=UNIT, p=1)), P),
    Bad("sum-bound", "sum", widened, P, says="at most"),
    Bad("sum-count", "sum", of_one_parameter, P),
    Bad("sum-dtype", "sum.sums[0]", as_floats),
    Bad("sum-nan", "sum.sums[1]", poisoned),
    Bad("save-open", "state_dict", lambda w: w.open.state_dict(), P, says="finish"),
    Bad("load-none", "state", lambda w: w.make().load_state_dict(None)),
    Bad("load-empty", "state", lambda w: w.make().load_state_dict({})),
    Bad("load-part", "state", lambda w: w.make().load_state_dict({"version": 1}), says="ledger"),
    Bad(
        "load-other", "state", lambda w: w.make(rounds=8).load_state_dict(w.saved()), says="rounds"
    ),
    Bad("load-ledger", "state", lambda w: w.make().load_state_dict(w.saved(ledger={}))),
    Bad("load-history", "state.ledger", forgotten, says="a history of 1 steps"),
    Bad("load-optimizer", "state", lambda w: w.make().load_state_dict(w.saved(optimizer={}))),
    Bad("load-steps", "state.steps", lambda w: w.make().load_state_dict(w.saved(steps=-1))),
    Bad("load-used", "load_state_dict", used, P, says="1 steps"),
    Bad("replace-rule", "optimizer", lambda w: setattr(w.step, "optimizer", update.Adam(lr=0.1))),
    Bad("replace-none", "optimizer", lambda w: setattr(w.step, "optimizer", None)),
    Bad("step-delta", "delta", lambda w: w.step.epsilon(0.0)),
]

FILES = [
    Bad("data-missing", "data", lambda w: data.load("/nonexistent/rows.csv")),
    Bad("data-kind", "data", lambda w: data.load(__file__)),
    Bad("model", "model", lambda w: models.build("vgg", row_shape=(8, 8), classes=10)),
    Bad("model-image", "model", lambda w: models.build("lenet5", row_shape=(5,), classes=2)),
    Bad("model-tokens", "model", lambda w: models.build("transformer", row_shape=(2,), classes=2)),
]
