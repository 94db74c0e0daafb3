"""Noise, division and an optimizer step in one call; projections; the step counter."""

from __future__ import annotations

from typing import Any

import torch

from ...ops import update
from ..case import Call, Facts
from ._shared import F32, F64, update_noise


def _sums(call: Call) -> list[torch.Tensor]:
    return [call.normal(p.shape).to(p.dtype) for p in call.args["params"]]


def _counts(call: Call) -> list[torch.Tensor]:
    return [(call.normal(p.shape) * 1e5).to(torch.int32) for p in call.args["params"]]


def _state(call: Call) -> update.State:
    rule: update.Rule = call.case.example["rule"]
    return rule.init(call.args["params"])


def _step(rule: update.Rule, noisy: bool, sums: Any = _sums) -> dict[str, Any]:
    # Arguments are made in their order, so the state is made of parameters that are there.
    return {"rule": rule, "state": _state, "sums": sums, "noise": update_noise if noisy else None}


def _maps(call: Call) -> update.PairMaps:
    """Map every second parameter, whose last dimension is taps, to fewer coordinates."""
    return update.PairMaps(
        tuple(
            _map(call, p.shape[-1]) if _is_mapped(i, p) else None
            for i, p in enumerate(call.args["params"])
        )
    )


def _is_mapped(i: int, param: torch.Tensor) -> bool:
    return i % 2 == 0 and param.dim() > 0 and param.shape[-1] > 0


def _only_back(call: Call) -> update.PairMaps:
    return _maps(call).only_back


def _coordinates(call: Call) -> list[torch.Tensor]:
    """Return counts, of the coordinates of mapped parameters."""
    shapes = [
        (*p.shape[:-1], _rank(p.shape[-1])) if _is_mapped(i, p) else p.shape
        for i, p in enumerate(call.args["params"])
    ]
    return [(call.normal(shape) * 1e5).to(torch.int32) for shape in shapes]


def _rank(taps: int) -> int:
    return max(1, taps // 2)


def _map(call: Call, taps: int) -> update.PairMap:
    rank = _rank(taps)
    signal, back = call.normal((rank, taps)).double(), call.normal((taps, rank)).double()
    return update.PairMap(signal=signal.contiguous(), back=back.contiguous())


def _counter(call: Call) -> torch.Tensor:
    return update.step_counter(call.case.example["rule"], 7, "cpu")


SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"*P": [(16, 8), (8,)]},
    "typical": {"*P": [(512, 256), (512,)]},
    "large": {"*P": [(4_000_000,)]},
}
RULES: dict[str, update.Rule] = {
    "sgd": update.SGD(lr=0.1),
    "momentum": update.SGD(lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adam": update.Adam(lr=1e-3, weight_decay=1e-3),
}
MANY = {"typical, momentum, 200 tensors": {"*P": [(1000,)] * 200} | _step(RULES["momentum"], True)}

FACTS = {
    "update.advance": Facts(
        examples=tuple(
            {"rule": rule, "step_counter": _counter}
            for rule in (update.SGD(lr=0.1), update.Adam(lr=0.1))
        ),
        bits=True,
        samples="",
        usual={"step_counter": _counter},
        timed={
            "tiny": {"rule": RULES["sgd"]},
            "typical": {"rule": RULES["momentum"]},
            "large": {"rule": RULES["adam"]},
        },
    ),
    "update.project": Facts(
        examples=tuple(
            {"onto": onto}
            for onto in (update.Ball(1.0), update.Box(-0.5, 0.25), update.Simplex(1.0))
        ),
        samples="",
        usual={"onto": update.Ball(1.0)},
        timed={name: {"...": sizes["*P"]} for name, sizes in SIZES.items()},
    ),
    "update.step": Facts(
        examples=(
            _step(update.SGD(lr=0.1), noisy=False),
            _step(update.SGD(lr=0.1, momentum=0.9, weight_decay=1e-3), noisy=True),
            _step(update.AdamW(lr=1e-3), noisy=True, sums=_counts),
            _step(update.SGD(lr=0.1), noisy=True) | {"maps": _maps},
            _step(update.SGD(lr=0.1), noisy=True, sums=_coordinates) | {"maps": _only_back},
        ),
        bounds={F32: 1e-6, F64: 1e-14},
        rounded_alike=True,
        changes=frozenset({"state"}),
        samples="",
        usual={"gradient_scale": 1 / 64},
        timed={
            **{name: sizes | _step(RULES["sgd"], True) for name, sizes in SIZES.items()},
            "typical, without noise": SIZES["typical"] | _step(RULES["sgd"], False),
            **MANY,
            "large, integers": SIZES["large"] | _step(RULES["sgd"], True, _counts),
            "typical, mapped": {"*P": [(64, 64, 9)]} | _step(RULES["sgd"], True) | {"maps": _maps},
            "large, adam": SIZES["large"] | _step(RULES["adam"], True),
            "large, adam, without noise": SIZES["large"] | _step(RULES["adam"], False),
        },
    ),
}
