"""Bad calls: each raises its exact typed error, names the argument, and changes nothing."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

import dpkern
from dpkern import DPStep, _dispatch, accounting, testing
from dpkern.engine import sampling
from dpkern.errors import BackendError, DPKernError, InvalidInput, PrivacyError
from dpkern.mechanisms import DPSGD
from dpkern.ops import clip, noise, update
from dpkern.rng import Key, Purpose, Stream
from dpkern.train import data, models

NAN, INF = math.nan, math.inf
SHAPES = ((4, 3), (5,))
BATCH = 3
UNIT = 2.0**-20


@dataclass
class World:
    """Everything that a call could change, made anew for each row of the table."""

    key: Key = field(default_factory=lambda: Key.from_unsafe_seed(1))
    ints: torch.Tensor = field(default_factory=lambda: torch.arange(12, dtype=torch.int32))
    floats: torch.Tensor = field(default_factory=lambda: torch.linspace(-1, 1, 12))
    params: list[torch.Tensor] = field(default_factory=lambda: [torch.ones(s) for s in SHAPES])
    sums: list[torch.Tensor] = field(default_factory=lambda: [torch.ones(s) for s in SHAPES])
    grads: list[torch.Tensor] = field(
        default_factory=lambda: [torch.full((BATCH, *s), 0.3) for s in SHAPES]
    )
    out: list[torch.Tensor] = field(
        default_factory=lambda: [torch.ones(s, dtype=torch.int32) for s in SHAPES]
    )
    rule: update.Rule = field(default_factory=lambda: update.SGD(lr=0.1, momentum=0.9))
    mechanism: DPSGD = field(default_factory=lambda: DPSGD(noise_multiplier=1, max_grad_norm=1))

    def __post_init__(self) -> None:
        self.state = self.rule.init(self.params)
        self.step = self.make()
        self.step.finish()
        self.open = self.make()
        self.open.add(self.grads)

    @property
    def stream(self) -> Stream:
        return self.key.stream(Purpose.NOISE, 1)

    @property
    def rounding(self) -> Stream:
        return self.key.stream(Purpose.ROUNDING, 1)

    def make(self, mechanism: object = None, params: object = None, **more: Any) -> DPStep:
        given = {"expected_batch_size": 8, "sample_rate": 0.1, "optimizer": self.rule, **more}
        given.setdefault("unsafe_seed", 1)
        params = [p.clone() for p in self.params] if params is None else params
        return DPStep(mechanism or self.mechanism, params, **given)  # type: ignore[arg-type]

    def add(self, x: object, **changes: Any) -> object:
        """``add_noise`` on floats with one argument changed."""
        given = {"stream": self.stream, "scale": 1.0, "rounding": self.rounding} | changes
        return noise.add_noise(x, **given)  # type: ignore[arg-type]

    def clip(self, grads: object = None, bound: Any = 1.0, **changes: Any) -> object:
        return clip.clip_sum(self.grads if grads is None else grads, bound, **changes)  # type: ignore[arg-type]

    def exact(self, grads: object = None, bound: Any = 1.0, **changes: Any) -> clip.ClipResult:
        given = {"arithmetic": "exact", "unit": UNIT} | changes
        return clip.clip_sum(self.grads if grads is None else grads, bound, **given)  # type: ignore[arg-type]

    def noise(self, **changes: Any) -> update.Noise:
        plain = update.Noise(
            distribution="gaussian",
            scales=(1.0, 1.0),
            stream=self.stream,
            positions=(0, 512),
            rounding=self.rounding,
        )
        return replace(plain, **changes)

    def update(self, **changes: Any) -> object:
        given = {
            "params": self.params,
            "sums": self.sums,
            "rule": self.rule,
            "state": self.state,
            "noise": self.noise(),
        } | changes
        return update.step(given.pop("params"), given.pop("sums"), **given)

    def saved(self, **changes: Any) -> dict[str, Any]:
        return self.step.state_dict() | changes

    def snapshot(self) -> list[Any]:
        """The bits of every tensor and the values of every counter."""
        tensors = [self.ints, self.floats, *self.params, *self.sums, *self.grads, *self.out]
        tensors += self.state.buffers["momentum_buffer"]
        values: list[Any] = [self.state.steps]
        for step in (self.step, self.open):
            assert step.optimizer_state is not None
            tensors += [*step.params, *(step._sums or ())]
            tensors += step.optimizer_state.buffers["momentum_buffer"]
            values += [step.steps, step.nonfinite, step._added, step._sums is None]
            values += [step.ledger.state_dict(), dict(step.words), step.optimizer, step.key]
        return [t.numpy().tobytes() for t in tensors] + copy.copy(values)


@dataclass(frozen=True)
class Bad:
    """One row: what is called, and what must come of it."""

    id: str
    name: str
    call: Callable[[World], object]
    error: type[DPKernError] = InvalidInput
    says: str = ""


P, B = PrivacyError, BackendError
MOMENTUM = update.SGD(lr=0.1, momentum=0.9)


def column(t: torch.Tensor) -> torch.Tensor:
    """The same numbers with other strides."""
    return t.t().contiguous().t()


def overlapping(world: World) -> object:
    return world.update(noise=world.noise(positions=(0, 11)))


def shared(world: World) -> object:
    return world.update(noise=world.noise(rounding=world.stream))


def used(world: World) -> object:
    return world.step.load_state_dict(world.make().state_dict())


def forgotten(world: World) -> object:
    """A history shorter than the number of steps."""
    empty = accounting.Ledger(seeded=True).state_dict()
    return world.make().load_state_dict(world.saved(ledger=empty))


def widened(world: World) -> object:
    """A sum clipped to more than the plan's bound."""
    result = world.exact(unit=world.open.plan.units[0])
    return world.open.add(sum=replace(result, max_norms=(1.5,)))


def of_one_parameter(world: World) -> object:
    return world.open.add(sum=world.exact(world.grads[0], unit=world.open.plan.units[0]))


def as_floats(world: World) -> object:
    result = world.exact(unit=world.open.plan.units[0])
    return world.open.add(sum=replace(result, sums=tuple(s.float() for s in result.sums)))


def poisoned(world: World) -> object:
    step = world.make(replace(world.mechanism, arithmetic="float"))
    result = clip.clip_sum(world.grads, 1.0)
    result.sums[1][2] = NAN
    return step.add(sum=result)


def unclipped_automatic(world: World) -> object:
    mechanism = DPSGD(noise_multiplier=0, max_grad_norm=INF, clipping="automatic")
    return world.make(mechanism).add(world.grads)


def wiped(world: World) -> object:
    key = Key.fresh()
    key.wipe()
    return key.stream(Purpose.NOISE, 0)


def entered(backend: str) -> None:
    with dpkern.use(backend):
        raise AssertionError("entered")


NOISE = [
    Bad("stream-none", "stream", lambda w: noise.keystream(None, first_block=0, blocks=1)),
    Bad(
        "first-block", "first_block", lambda w: noise.keystream(w.stream, first_block=-1, blocks=1)
    ),
    Bad("blocks-float", "blocks", lambda w: noise.keystream(w.stream, first_block=0, blocks=1.5)),
    Bad("blocks-many", "blocks", lambda w: noise.keystream(w.stream, first_block=0, blocks=2**41)),
    Bad(
        "draws-position", "position", lambda w: noise.lattice_draws(w.stream, position=-1, count=1)
    ),
    Bad("draws-count", "count", lambda w: noise.lattice_draws(w.stream, position=0, count=True)),
    Bad(
        "draws-law",
        "distribution",
        lambda w: noise.lattice_draws(w.stream, position=0, count=1, distribution="cauchy"),
        says="'gaussian', 'laplace'",
    ),
    Bad("x-list", "x", lambda w: w.add([1.0])),
    Bad("x-half", "x", lambda w: w.add(w.floats.half()), says="float16"),
    Bad("x-bool", "x", lambda w: w.add(w.floats > 0)),
    Bad("x-strides", "x", lambda w: w.add(w.params[0].t()), says="contiguous"),
    Bad("x-meta", "x", lambda w: w.add(w.floats.to("meta")), says="meta"),
    Bad("x-sparse", "x", lambda w: w.add(w.floats.to_sparse()), says="sparse"),
    Bad("x-none", "x", lambda w: w.add(None), says="NoneType"),
    Bad("stream-bytes", "stream", lambda w: w.add(w.floats, stream=bytes(32))),
    Bad("position-negative", "position", lambda w: w.add(w.floats, position=-1)),
    Bad("position-large", "position", lambda w: w.add(w.floats, position=2**62 + 1)),
    Bad("law-none", "distribution", lambda w: w.add(w.floats, distribution=None)),
    Bad("law-list", "distribution", lambda w: w.add(w.floats, distribution=["gaussian"])),
    Bad("int-with-scale", "scale", lambda w: noise.add_noise(w.ints, stream=w.stream, scale=1.0)),
    Bad("float-without-scale", "scale", lambda w: w.add(w.floats, scale=None)),
    Bad("scale-zero", "scale", lambda w: w.add(w.floats, scale=0.0)),
    Bad("scale-nan", "scale", lambda w: w.add(w.floats, scale=NAN)),
    Bad("scale-string", "scale", lambda w: w.add(w.floats, scale="1")),
    Bad("scale-denormal", "scale", lambda w: w.add(w.floats, scale=1e-45), says="2^-104"),
    Bad("scale-huge", "scale", lambda w: w.add(w.floats, scale=1e38), says="2^116"),
    Bad("scales-shape", "scale", lambda w: w.add(w.floats, scale=torch.ones(5))),
    Bad("scales-zero", "scale", lambda w: w.add(w.floats, scale=torch.zeros(12))),
    Bad("scales-nan", "scale", lambda w: w.add(w.floats, scale=torch.full((12,), NAN))),
    Bad("rounding-none", "rounding", lambda w: w.add(w.floats, rounding=None)),
    Bad("rounding-shared", "rounding", lambda w: w.add(w.floats, rounding=w.stream), P),
]

CLIP = [
    Bad("grads-none", "grads", lambda w: clip.clip_sum(None, 1.0)),
    Bad("grads-empty", "grads", lambda w: w.clip([]), says="empty list"),
    Bad("grads-numbers", "grads[0]", lambda w: w.clip([1.0])),
    Bad("grads-hole", "grads[1]", lambda w: w.clip([w.grads[0], None])),
    Bad("grads-int", "grads[0]", lambda w: w.clip(torch.ones(2, 3, dtype=torch.int32))),
    Bad("grads-complex", "grads[0]", lambda w: w.clip(torch.ones(2, 3, dtype=torch.complex64))),
    Bad("grads-scalar", "grads[0]", lambda w: w.clip(torch.tensor(1.0))),
    Bad("grads-batches", "grads[1]", lambda w: w.clip([w.grads[0], w.grads[1][:2]])),
    Bad("grads-dtypes", "grads[1]", lambda w: w.clip([w.grads[0], w.grads[1].double()])),
    Bad("grads-meta", "grads[0]", lambda w: w.clip([g.to("meta") for g in w.grads])),
    Bad("grads-devices", "grads[1]", lambda w: w.clip([w.grads[0], w.grads[1].to("meta")])),
    Bad("bound-zero", "max_grad_norm", lambda w: w.clip(bound=0)),
    Bad("bound-negative", "max_grad_norm", lambda w: w.clip(bound=-1.0)),
    Bad("bound-nan", "max_grad_norm", lambda w: w.clip(bound=NAN)),
    Bad("bound-inf", "max_grad_norm", lambda w: w.clip(bound=INF)),
    Bad("bound-huge-int", "max_grad_norm", lambda w: w.clip(bound=10**400)),
    Bad("bound-bool", "max_grad_norm", lambda w: w.clip(bound=True)),
    Bad("bound-denormal", "max_grad_norm", lambda w: w.clip(bound=1e-40), says="2^-96"),
    Bad("bound-list-flat", "max_grad_norm", lambda w: w.clip(bound=[1.0, 1.0])),
    Bad("bound-number-layers", "max_grad_norm", lambda w: w.clip(style="per_layer")),
    Bad("bounds-count", "max_grad_norm", lambda w: w.clip(bound=[1.0], style="per_layer")),
    Bad("bounds-entry", "max_grad_norm[1]", lambda w: w.clip(bound=[1.0, -2], style="per_layer")),
    Bad("bound-automatic", "max_grad_norm", lambda w: w.clip(bound=1e60, style="automatic")),
    Bad("p-three", "p", lambda w: w.clip(p=3)),
    Bad("p-float", "p", lambda w: w.clip(p=2.0)),
    Bad("p-bool", "p", lambda w: w.clip(p=True)),
    Bad("style", "style", lambda w: w.clip(style="layerwise"), says="'per_layer'"),
    Bad("arithmetic", "arithmetic", lambda w: w.clip(arithmetic="double")),
    Bad("unit-missing", "unit", lambda w: w.clip(arithmetic="exact")),
    Bad("unit-unused", "unit", lambda w: w.clip(unit=UNIT)),
    Bad("unit-zero", "unit", lambda w: w.exact(unit=0.0)),
    Bad("unit-small", "unit", lambda w: w.exact(unit=2.0**-25), says="2^24"),
    Bad("unit-large", "unit", lambda w: w.exact(unit=2.0)),
    Bad("units-count", "unit", lambda w: w.exact(None, [1.0, 1.0], style="per_layer")),
    Bad("out-tensor", "out", lambda w: w.exact(out=w.out[0])),
    Bad("out-count", "out", lambda w: w.exact(out=w.out[:1])),
    Bad("out-shape", "out[1]", lambda w: w.exact(out=[w.out[0], w.out[0]])),
    Bad("out-dtype", "out[0]", lambda w: w.exact(out=w.sums), says="int32"),
    Bad("out-mixed", "out[1]", lambda w: w.exact(out=[w.out[0], w.out[1].long()])),
    Bad("out-strides", "out[0]", lambda w: w.exact(out=[column(w.out[0]), w.out[1]])),
    Bad("out-full", "out", lambda w: w.exact(out=[o * 2_147_000_000 for o in w.out]), says="int64"),
    Bad("norm-scale", "scale[0]", lambda w: clip.sample_norm(w.floats[None], scale=w.floats)),
    Bad("norm-scales", "scale", lambda w: clip.sample_norm(w.grads, scale=w.params[0])),
    Bad("norm-center", "center[0]", lambda w: clip.sample_norm(w.floats[None], center=w.params[1])),
]

UPDATE = [
    Bad("params-tensor", "params", lambda w: w.update(params=w.params[0])),
    Bad("params-int", "params[0]", lambda w: w.update(params=[w.out[0], w.params[1]])),
    Bad("params-meta", "params[1]", lambda w: w.update(params=[w.params[0], w.sums[1].to("meta")])),
    Bad(
        "params-strides", "params[0]", lambda w: w.update(params=[column(w.params[0]), w.params[1]])
    ),
    Bad("sums-count", "sums", lambda w: w.update(sums=w.sums[:1])),
    Bad("sums-shape", "sums[0]", lambda w: w.update(sums=[w.sums[1], w.sums[1]])),
    Bad("sums-mixed", "sums[1]", lambda w: w.update(sums=[w.sums[0], w.out[1]])),
    Bad("sums-int-alone", "sums[0]", lambda w: w.update(sums=w.out, noise=None)),
    Bad("rule-name", "rule", lambda w: w.update(rule="sgd")),
    Bad("rule-of-torch", "rule", lambda w: w.update(rule=torch.optim.SGD(w.params, lr=0.1))),
    Bad("state-none", "state", lambda w: w.update(state=None)),
    Bad("state-of-adam", "state", lambda w: w.update(rule=update.Adam(lr=0.1)), says="exp_avg"),
    Bad(
        "state-shape",
        "state.momentum_buffer[0]",
        lambda w: w.update(state=MOMENTUM.init([w.params[1], w.params[1]])),
    ),
    Bad("gradient-scale", "gradient_scale", lambda w: w.update(gradient_scale=0.0)),
    Bad("noise-tuple", "noise", lambda w: w.update(noise=("gaussian", 1.0))),
    Bad("noise-law", "distribution", lambda w: w.update(noise=w.noise(distribution="normal"))),
    Bad("noise-stream", "noise.stream", lambda w: w.update(noise=w.noise(stream=None))),
    Bad("noise-scales", "noise.scales", lambda w: w.update(noise=w.noise(scales=(1.0,)))),
    Bad("noise-scale-nan", "noise.scales", lambda w: w.update(noise=w.noise(scales=(1.0, NAN)))),
    Bad("noise-positions", "noise.positions", lambda w: w.update(noise=w.noise(positions=(0, -1)))),
    Bad("noise-overlap", "noise.positions", overlapping, P, says="overlap"),
    Bad("noise-rounding", "noise.rounding", lambda w: w.update(noise=w.noise(rounding=None))),
    Bad("noise-rounding-shared", "noise.rounding", shared, P),
    Bad("sgd-lr", "lr", lambda w: update.SGD(lr=-0.1)),
    Bad("sgd-lr-nan", "lr", lambda w: update.SGD(lr=NAN)),
    Bad("sgd-momentum", "momentum", lambda w: update.SGD(lr=0.1, momentum="0.9")),
    Bad("sgd-dampening", "dampening", lambda w: update.SGD(lr=0.1, dampening=1.0)),
    Bad("sgd-nesterov", "nesterov", lambda w: update.SGD(lr=0.1, nesterov=True)),
    Bad("adam-betas", "betas", lambda w: update.Adam(lr=0.1, betas=0.9)),
    Bad("adam-beta2", "beta2", lambda w: update.Adam(lr=0.1, betas=(0.9, 1.0))),
    Bad("adam-eps", "eps", lambda w: update.Adam(lr=0.1, eps=-1e-8)),
    Bad("adamw-decay", "weight_decay", lambda w: update.AdamW(lr=0.1, weight_decay=INF)),
    Bad("saved-none", "state", lambda w: w.state.load_state_dict(None)),
    Bad("saved-empty", "state", lambda w: w.state.load_state_dict({})),
    Bad(
        "saved-shapes",
        "state",
        lambda w: w.state.load_state_dict(MOMENTUM.init(w.params[:1]).state_dict()),
    ),
    Bad(
        "saved-steps",
        "state.steps",
        lambda w: w.state.load_state_dict(w.state.state_dict() | {"steps": "3"}),
    ),
]

RNG = [
    Bad("key-short", "key", lambda w: Key(b"short"), P, says="32 bytes"),
    Bad("key-length", "key", lambda w: Key(32), P, says="int"),
    Bad("key-rounds", "rounds", lambda w: Key.fresh(rounds=7), says="20, 12, 8"),
    Bad("key-rounds-float", "rounds", lambda w: Key.fresh(rounds=20.0)),
    Bad("seed-negative", "unsafe_seed", lambda w: Key.from_unsafe_seed(-1)),
    Bad("seed-string", "unsafe_seed", lambda w: Key.from_unsafe_seed("secret")),
    Bad("purpose", "purpose", lambda w: w.key.stream(5, 0), says="Purpose"),
    Bad("step", "step", lambda w: w.key.stream(Purpose.NOISE, 2**32)),
    Bad("stream-number", "stream", lambda w: w.key.stream(Purpose.NOISE, 0, 2**24)),
    Bad("wiped", "key", wiped, P, says="wiped"),
]

DISPATCH = [
    Bad("backend", "backend", lambda w: w.clip(backend="abacus"), says="reference"),
    Bad("backend-number", "backend", lambda w: w.add(w.floats, backend=7)),
    Bad("use", "backend", lambda w: entered("abacus")),
    Bad("step-backend", "backend", lambda w: w.make(backend="abacus")),
]
if "cpu" in testing.available_backends():
    DISPATCH += [
        Bad("isa", "isa", lambda w: _cpu().use_isa("avx1024")),
        Bad(
            "refused-norm",
            "backend 'cpu' for clip.sample_norm",
            lambda w: clip.sample_norm(w.grads[1], scale=w.params[1], backend="cpu"),
            B,
            says="reference (available)",
        ),
        Bad(
            "refused-scales",
            "backend 'cpu' for noise.add_noise",
            lambda w: w.add(w.floats, scale=torch.ones(12), backend="cpu"),
            B,
            says="one scale per call",
        ),
    ]

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
    Bad("model", "model", lambda w: models.build("resnet", row_shape=(8, 8), classes=10)),
    Bad("model-image", "model", lambda w: models.build("lenet5", row_shape=(5,), classes=2)),
]

TABLE = {
    "noise": NOISE,
    "clip": CLIP,
    "update": UPDATE,
    "rng": RNG,
    "dispatch": DISPATCH,
    "mechanisms": MECHANISMS,
    "accounting": ACCOUNTING,
    "step": STEP,
    "files": FILES,
}
ROWS = [pytest.param(row, id=f"{area}-{row.id}") for area, rows in TABLE.items() for row in rows]


def _cpu() -> Any:
    from dpkern.backends import cpu

    return cpu


@pytest.mark.parametrize("row", ROWS)
def test_bad_call(row: Bad) -> None:
    world = World()
    before = world.snapshot()
    with pytest.raises(DPKernError) as caught:
        row.call(world)
    error = caught.value
    assert type(error) is row.error
    assert error.name == row.name
    assert str(error).startswith(f"{row.name}: expected ")
    assert row.says in str(error)
    assert error.remedy.endswith(".")
    assert world.snapshot() == before


def test_rows_are_many_and_named_apart() -> None:
    names = [row.id for row in ROWS]
    assert len(set(names)) == len(names) >= 45


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """``DPKERN_BACKEND`` can be set: it is read once per process."""
    _dispatch.environment_choice.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    _dispatch.environment_choice.cache_clear()


def test_unknown_backend_in_the_environment(environment: pytest.MonkeyPatch) -> None:
    world = World()
    before = world.snapshot()
    environment.setenv("DPKERN_BACKEND", "abacus")
    _dispatch.environment_choice.cache_clear()
    for call in (lambda: world.add(world.floats), world.clip, world.update):
        with pytest.raises(InvalidInput, match=r"backend: expected one of .*, got abacus"):
            call()
    assert world.snapshot() == before


def test_a_refused_batch_leaves_the_step_usable() -> None:
    world = World()
    for step in (world.step, world.open):
        with pytest.raises(InvalidInput):
            step.add([world.grads[0], world.grads[0]])
    world.step.state_dict()
    world.open.finish()
    assert world.open.steps == world.open.ledger.steps == 1
