"""The few facts about each op that its signature cannot say."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from dpkern.base.rng import Purpose
from dpkern.ops import _cdt, coef, update
from dpkern.ops._draws import CdtDraws, SampleReads
from dpkern.ops.spectral import Band
from dpkern.ops.spectral.bins import kept_bins
from dpkern.ops.testing import KEY
from tests.ops.conformance.calls import Call, Facts

F32, F64 = torch.float32, torch.float64
STREAM, ROUNDING = KEY.stream(Purpose.NOISE, 1), KEY.stream(Purpose.ROUNDING, 1)
SYMBOLS, LAPLACE = KEY.stream(Purpose.SYMBOLS, 1), KEY.stream(Purpose.LAPLACE, 1)

CONVOLUTIONS: tuple[dict[str, Any], ...] = (
    {"ci": 2, "co": 3, "c": 2, "*S": (7,), "*O": (5,), "*K": (3,), "kernel_size": 3},
    {"ci": 4, "co": 6, "c": 2, "*S": (6, 5), "*O": (3, 5), "*K": (3, 2)}
    | {"kernel_size": (3, 2), "stride": (2, 1), "padding": (1, 1), "dilation": (1, 2), "groups": 2},
)
VOLUME: dict[str, Any] = {"ci": 2, "co": 2, "c": 2, "*S": (3, 4, 3), "*O": (2, 3, 2)}
VOLUME |= {"*K": (2, 2, 2), "kernel_size": 2}

LINE, PLANE = Band((12,), "rectangle", 0.5), Band((12, 12), "shells", 0.4)
SPECTRAL = (
    CONVOLUTIONS[0] | {"band": LINE},
    CONVOLUTIONS[1] | {"band": PLANE},
    CONVOLUTIONS[1] | {"band": Band((12, 12), "authors_slice", 0.5)},
)
CHANNELS = frozenset({"ci", "co", "c", "*S", "*O", "*K"})


def _bins(band: Band, groups: int, *taps: int) -> dict[str, Any]:
    return {"K": len(kept_bins(band)), "ci": 4, "co": 6, "band": band, "groups": groups} | {
        "taps": taps
    }


def _blocks(count: int) -> tuple[dict[str, Any], ...]:
    """Hidden units, and so many rows of weights for each."""
    return tuple({"H": hidden, "G": count * hidden} for hidden in (3, 16, 37))


def _contracting(call: Call, shape: tuple[int, ...]) -> torch.Tensor:
    """Weights of states that forget: of others rounding errors grow with every time step."""
    return call.normal(shape) / (3 * math.sqrt(max(1, shape[1])))


BOUNDED = {name: lambda call, shape: call.uniform(shape) for name in ("before", "last")}
STABLE = {"w_hh": _contracting, "gates": lambda call, shape: call.uniform(shape)}


def _ids(call: Call, shape: tuple[int, ...]) -> torch.Tensor:
    return call.integers(call.sizes.get("V", 5), shape)


def _coef_noise(call: Call) -> coef.Noise:
    return coef.Noise(scale=1.5, stream=LAPLACE, rounding=ROUNDING, position=100)


def _update_noise(call: Call) -> update.Noise:
    count = len(call.args["params"])
    return update.Noise(
        distribution="gaussian",
        scales=tuple(1.0 + i for i in range(count)),
        stream=STREAM,
        positions=tuple(4096 * i for i in range(count)),
        rounding=ROUNDING,
    )


def _scale(call: Call) -> float | None:
    return 1.5 if call.args["x"].is_floating_point() else None


def _scales(call: Call) -> torch.Tensor | None:
    shape = call.args["x"].shape
    return call.uniform(shape) + 0.5 if call.args["x"].is_floating_point() else None


def _sums(call: Call) -> list[torch.Tensor]:
    return [call.normal(p.shape).to(p.dtype) for p in call.args["params"]]


def _counts(call: Call) -> list[torch.Tensor]:
    return [(call.normal(p.shape) * 1e5).to(torch.int32) for p in call.args["params"]]


def _state(call: Call) -> update.State:
    rule: update.Rule = call.case.example["rule"]
    return rule.init(call.args["params"])


def _step(rule: update.Rule, noisy: bool, sums: Any = _sums) -> dict[str, Any]:
    # Arguments are made in their order, so the state is made of parameters that are there.
    return {"rule": rule, "state": _state, "sums": sums, "noise": _update_noise if noisy else None}


UNIFORM = {name: lambda call, shape: call.uniform(shape) for name in ("hidden", "targets")}
COEFFICIENTS = Facts(
    examples=({"noise": None}, {"noise": _coef_noise}),
    entries=UNIFORM,
    bits=True,
    changes=frozenset({"out"}),
)
SAMPLES = SampleReads(0, torch.arange(-700, 700, dtype=torch.int16), cursor=3, shift=10)
LOOKED_UP = CdtDraws(0, _cdt.packed([1 << 31, 3 << 30], 32), stream=STREAM, distribution="laplace")
DRAWS = Facts(examples=({"stream": STREAM},), bits=True, samples="")
EMBEDDING = Facts(
    examples=({"padding_idx": None}, {"padding_idx": 2}),
    entries={"ids": _ids},
    positive=frozenset({"V"}),
    blind=frozenset({"g"}),
)
WHOLE = Facts(
    # Large enough that an integer more or less is a small part of it.
    entries={"factors": lambda call, shape: (call.uniform(shape) + 0.25) * 2**14},
    bounds={F32: 2e-4, F64: 2e-4},
)
CIRCULANT = Facts(
    examples=(
        {"band": None},
        {"d": 6, "band": Band((6,), "shells", 0.5)},
        {"d": 7, "band": Band((7,), "all")},
    ),
    positive=frozenset({"d"}),
    # A device transforms in float32, and lifts the norm by what that may err.
    bounds={F32: 1e-2, F64: 1e-10},
)

FACTS: dict[str, Facts] = {
    "clip.clip_sum": Facts(
        examples=(
            {"max_grad_norm": 1.5, "style": "flat"},
            {"max_grad_norm": 1.5, "style": "automatic"},
            {"max_grad_norm": [1.5], "style": "per_layer", "*P": [(40,)]},
        ),
        options={"arithmetic": ("float",)},
        changes=frozenset({"out"}),
        samples="",
        bounds={F32: 1e-5, F64: 1e-12, torch.bfloat16: 1e-5},
    ),
    "clip.sample_norm": Facts(bounds={F32: 1e-12, F64: 1e-12, torch.bfloat16: 1e-12}),
    "coef.expanded": replace(
        COEFFICIENTS, shapes={"targets": lambda call: (call.sizes["B"], call.sizes["M"])}
    ),
    "coef.perturb": replace(COEFFICIENTS, samples=""),
    "coef.quadratic": COEFFICIENTS,
    "ghost.clip_factors": Facts(
        examples=({"max_grad_norm": 1.0}, {"max_grad_norm": math.inf, "automatic": False}),
        positive=frozenset({"*P"}),
    ),
    "ghost.contract": Facts(),
    "ghost.conv_gradient": Facts(examples=(*CONVOLUTIONS, VOLUME), positive=CHANNELS),
    "ghost.conv_norm": Facts(
        examples=(*CONVOLUTIONS, VOLUME, CONVOLUTIONS[0] | {"route": "gram"}),
        positive=CHANNELS,
        options={"route": ("auto", "direct")},
    ),
    "ghost.conv_integer_sum": replace(WHOLE, examples=(*CONVOLUTIONS, VOLUME), positive=CHANNELS),
    "ghost.conv_sum": Facts(examples=(*CONVOLUTIONS, VOLUME), positive=CHANNELS),
    "ghost.conv_sum_error": Facts(
        examples=(*CONVOLUTIONS, VOLUME), positive=CHANNELS, rounded_alike=True
    ),
    "ghost.embedding_integer_sum": replace(
        EMBEDDING, entries={**WHOLE.entries, **EMBEDDING.entries}, bounds=WHOLE.bounds
    ),
    "ghost.embedding_norm": EMBEDDING,
    "ghost.embedding_sum": EMBEDDING,
    "ghost.explicit_integer_sum": WHOLE,
    "ghost.explicit_norm": Facts(),
    "ghost.group_norm_backward": Facts(
        examples=({"C": 6, "groups": 3}, {"C": 5, "groups": 1}, {"C": 4, "groups": 4}),
        positive=frozenset({"C", "groups"}),
    ),
    "ghost.layer_norm_backward": Facts(),
    "ghost.linear_gradient": Facts(),
    "ghost.linear_norm": Facts(
        examples=({}, {"T": 1, "route": "rank_one"}), options={"route": ("auto", "gram", "direct")}
    ),
    "ghost.linear_integer_sum": replace(
        WHOLE,
        examples=({}, {"T": 1}, {"T": 1, "rounding": "nearest"}),
        options={"rounding": ("truncate",)},
    ),
    "ghost.linear_sum": Facts(),
    "ghost.linear_sum_error": Facts(rounded_alike=True),
    "ghost.rms_norm_backward": Facts(),
    "ghost.tied_cross": EMBEDDING,
    "ghost.tied_integer_sum": replace(
        WHOLE,
        examples=EMBEDDING.examples,
        entries={**WHOLE.entries, "ids": lambda call, shape: call.integers(call.sizes["p"], shape)},
        positive=frozenset({"p"}),
    ),
    "ghost.tied_sum_error": replace(EMBEDDING, rounded_alike=True),
    "noise.add_noise": Facts(
        examples=(
            {"stream": STREAM, "scale": _scale, "rounding": ROUNDING},
            {"stream": STREAM, "scale": _scales, "rounding": ROUNDING, "distribution": "laplace"},
        ),
        entries={"x": lambda call, shape: call.normal(shape) * 1000},
        bits=True,
        samples="",
    ),
    "noise.keystream": Facts(
        examples=({"stream": STREAM, "first_block": 3},), bits=True, samples=""
    ),
    "noise.lattice_draws": DRAWS,
    "noise.rounding_bits": DRAWS,
    "noise.source_draws": Facts(
        examples=({"draws": SAMPLES}, {"draws": LOOKED_UP}), bits=True, samples=""
    ),
    "product.matmul": Facts(samples="N"),
    "recurrent.gru": Facts(examples=_blocks(3), entries=STABLE, positive=frozenset({"H", "G"})),
    "recurrent.gru_backward": Facts(
        examples=tuple(sizes | {"Q": 4 * sizes["H"]} for sizes in _blocks(3)),
        entries=STABLE,
        positive=frozenset({"H", "G", "Q"}),
    ),
    "recurrent.lstm": Facts(examples=_blocks(4), entries=STABLE, positive=frozenset({"H", "G"})),
    "recurrent.lstm_backward": Facts(
        examples=_blocks(4), entries=STABLE, positive=frozenset({"H", "G"})
    ),
    "recurrent.rnn": Facts(entries=STABLE),
    "recurrent.rnn_backward": Facts(entries=STABLE | BOUNDED),
    "spectral.bins_sum": Facts(
        examples=(_bins(LINE, 1, 3), _bins(PLANE, 2, 3, 2)),
        shapes={
            "out": lambda call: (
                *(6, 4 // call.case.example["groups"]),
                *call.case.example["taps"],
            )
        },
        positive=CHANNELS | {"K"},
    ),
    "spectral.circulant_gradient": Facts(positive=frozenset({"d"})),
    "spectral.circulant_norm": CIRCULANT,
    "spectral.circulant_sum": CIRCULANT,
    "spectral.conv_bins": Facts(examples=SPECTRAL, positive=CHANNELS),
    "spectral.conv_norm": Facts(
        examples=(
            *(example | {"size": example["band"].size} for example in SPECTRAL),
            CONVOLUTIONS[1] | {"size": (12, 12)},
        ),
        positive=CHANNELS,
    ),
    "spectral.filtered": Facts(
        examples=(
            {"C": 2, "*S": (7,), "padding": (1,), "rows": (9,), "band": LINE},
            {"C": 2, "*S": (6, 5), "padding": (1, 1), "rows": (8, 6), "band": PLANE},
        ),
        positive=CHANNELS | {"C"},
    ),
    "spectral.whitened_bins": Facts(
        examples=tuple(
            example | {"r": rank, "taps": math.prod(example["*K"])}
            for example, rank in zip(SPECTRAL, (2, 5, 7), strict=True)
        ),
        bounds={F32: 2e-3, F64: 1e-8, torch.bfloat16: 5e-3, torch.float16: 5e-3},
        positive=CHANNELS | {"r", "taps"},
    ),
    "spectral.whitened_norm": Facts(
        examples=({"r": 2, "taps": 6}, {"r": 3, "taps": 4}),
        shapes={"grads": lambda call: (call.sizes["B"], 3, 2, call.sizes["taps"])},
        positive=frozenset({"r", "taps"}),
        layouts={"grads": "dense"},
    ),
    "symbols.randomize": Facts(
        examples=(
            {"stream": SYMBOLS, "keep": 3 << 62},
            {"stream": SYMBOLS, "keep": 1 << 62, "categories": 5},
        ),
        entries={
            "symbols": lambda call, shape: call.integers(
                call.case.example.get("categories", 2), shape
            )
        },
        bits=True,
        samples="",
    ),
    "update.advance": Facts(
        examples=tuple(
            {
                "rule": rule,
                "step_counter": lambda call: update.step_counter(
                    call.case.example["rule"], 7, "cpu"
                ),
            }
            for rule in (update.SGD(lr=0.1), update.Adam(lr=0.1))
        ),
        bits=True,
        samples="",
    ),
    "update.project": Facts(
        examples=tuple(
            {"onto": onto}
            for onto in (update.Ball(1.0), update.Box(-0.5, 0.25), update.Simplex(1.0))
        ),
        samples="",
    ),
    "update.step": Facts(
        examples=(
            _step(update.SGD(lr=0.1), noisy=False),
            _step(update.SGD(lr=0.1, momentum=0.9, weight_decay=1e-3), noisy=True),
            _step(update.AdamW(lr=1e-3), noisy=True, sums=_counts),
        ),
        bounds={F32: 1e-6, F64: 1e-14},
        rounded_alike=True,
        changes=frozenset({"state"}),
        samples="",
    ),
}
