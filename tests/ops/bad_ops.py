"""Bad calls of ops, keys and the dispatcher."""

from __future__ import annotations

import torch

from dpkern.base.rng import Key, Purpose
from dpkern.ops import clip, noise, testing, update
from tests.bad_world import (
    INF,
    MOMENTUM,
    NAN,
    UNIT,
    B,
    Bad,
    P,
    column,
    cpu_backend,
    entered,
    overlapping,
    shared,
    wiped,
)

NOISE = [
    Bad("stream-none", "stream", lambda w: noise.keystream(None, first_block=0, blocks=1)),
    Bad(
        "draws-law",
        "distribution",
        lambda w: noise.lattice_draws(w.stream, position=0, count=1, distribution="cauchy"),
        says="'gaussian', 'laplace'",
    ),
    Bad("bits-stream", "stream", lambda w: noise.rounding_bits(None, position=0, count=1)),
    Bad("x-half", "x", lambda w: w.add(w.floats.half()), says="float16"),
    Bad("x-strides", "x", lambda w: w.add(w.params[0].t()), says="contiguous"),
    Bad("x-meta", "x", lambda w: w.add(w.floats.to("meta")), says="meta"),
    Bad("x-sparse", "x", lambda w: w.add(w.floats.to_sparse()), says="sparse"),
    Bad("x-none", "x", lambda w: w.add(None), says="NoneType"),
    Bad("stream-bytes", "stream", lambda w: w.add(w.floats, stream=bytes(32))),
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
    Bad("grads-empty", "grads", lambda w: w.clip([]), says="empty list"),
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
    Bad("style", "style", lambda w: w.clip(style="layerwise"), says="'per_layer'"),
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
        Bad("isa", "isa", lambda w: cpu_backend().use_isa("avx1024")),
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
