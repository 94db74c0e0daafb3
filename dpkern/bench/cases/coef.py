"""Noisy coefficients of polynomial losses, and the losses themselves."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...ops import coef, noise
from ..case import Call, Facts
from ._shared import LAPLACE, ROUNDING

FIRST = 100


def _noise(call: Call) -> coef.Noise:
    return coef.Noise(scale=1.5, stream=LAPLACE, rounding=ROUNDING, position=FIRST)


def _ahead(call: Call) -> coef.Noise:
    """Return noise that was drawn before, so that the memory sets the pace."""
    n = call.args["targets"].numel()
    count = coef.quadratic_position(FIRST, n) + n - FIRST
    values = noise.lattice_draws(LAPLACE, distribution="laplace", position=FIRST, count=count)
    bits = noise.rounding_bits(ROUNDING, position=FIRST, count=count)
    return replace(_noise(call), draws=coef.Draws(FIRST, values, bits))


def _perturbed(call: Call) -> coef.QuadraticCoefficients:
    like = call.args["targets"]
    return coef.QuadraticCoefficients(torch.empty_like(like), torch.empty_like(like))


def _evaluated(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    like = call.args["targets"]
    return torch.empty(len(like), dtype=torch.float64), torch.empty_like(like)


UNIFORM = {name: lambda call, shape: call.uniform(shape) for name in ("hidden", "targets")}
COEFFICIENTS = Facts(
    examples=({"noise": None}, {"noise": _noise}),
    entries=UNIFORM,
    bits=True,
    changes=frozenset({"out"}),
    usual={"noise": _noise},
)
TARGETS = {
    "tiny": {"B": 4, "D": 14},
    "typical": {"B": 256, "D": 784},
    "large": {"B": 2000, "D": 1000},
}
"""Records, and targets of each; every target has two coefficients."""
PREFETCHED = {"large, drawn before": TARGETS["large"] | {"noise": _ahead}}


def _going(call: Call) -> torch.Tensor:
    return torch.zeros(call.sizes["R"], dtype=torch.int32)


def _rows(call: Call, shape: tuple[int, ...]) -> torch.Tensor:
    return call.integers(call.sizes["N"], shape)


ONE_TABLE = {"P": 1, "Q": 1, "lr": 1e-3, "limit": 1e3, "constant": 0.5}
"""One table of records for all runs, and steps that stop none of them."""
QUIET = dict.fromkeys(("added", "draws", "rounding"))
DESCENTS = Facts(
    examples=(
        ONE_TABLE,
        ONE_TABLE | QUIET,
        ONE_TABLE | {"R": 3, "P": 3, "Q": 3, "growth": 0.0},
        ONE_TABLE | {"n": 14, "l": 7, "added": None, "constant": 2.5},
    ),
    entries={
        "stopped": lambda call, shape: call.integers(8, shape) // 7,
        "inputs": lambda call, shape: call.uniform(shape),
        "targets": lambda call, shape: call.uniform(shape),
        "order": _rows,
        "draws": lambda call, shape: call.integers(1 << 20, shape) - (1 << 19),
        "rounding": lambda call, shape: call.integers(1 << 16, shape) - (1 << 15),
    },
    positive=frozenset({"N"}),
    bits=True,
    samples="",
    usual=ONE_TABLE | {"M": 2, "n": 14, "l": 7, "added": None, "stopped": _going},
    timed={
        "tiny": {"R": 1, "S": 16, "N": 64},
        "typical": {"R": 100, "S": 16, "N": 4096},
        "large": {"R": 1000, "S": 64, "N": 36480},
    },
)

FACTS = {
    "coef.descend": DESCENTS,
    "coef.expanded": replace(
        COEFFICIENTS,
        shapes={"targets": lambda call: (call.sizes["B"], call.sizes["M"])},
        timed={
            "tiny": {"B": 4, "H": 5, "M": 2},
            "typical": {"B": 128, "H": 25, "M": 10},
            "large": {"B": 600, "H": 25, "M": 10},
        },
    ),
    "coef.perturb": replace(
        COEFFICIENTS,
        samples="",
        usual={"noise": _noise, "out": _perturbed},
        timed={**TARGETS, **PREFETCHED},
    ),
    "coef.quadratic": replace(
        COEFFICIENTS,
        usual={"noise": _noise, "out": _evaluated},
        timed={**TARGETS, **PREFETCHED},
    ),
}
