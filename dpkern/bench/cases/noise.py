"""Noise added to integers and floats, and the words, draws and bits that it is made of."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...ops import _cdt
from ...ops._draws import CdtDraws, SampleReads
from ..case import Call, Facts
from ._shared import LAPLACE, ROUNDING, STREAM


def _scale(call: Call) -> float | None:
    return 1.5 if call.args["x"].is_floating_point() else None


def _scales(call: Call) -> torch.Tensor | None:
    shape = call.args["x"].shape
    return call.uniform(shape) + 0.5 if call.args["x"].is_floating_point() else None


SAMPLES = SampleReads(0, torch.arange(-700, 700, dtype=torch.int16), cursor=3, shift=10)
LOOKED_UP = CdtDraws(0, _cdt.packed([1 << 31, 3 << 30], 32), stream=STREAM, distribution="laplace")
COUNTS = {"tiny": {"count": 512}, "typical": {"count": 1 << 14}, "large": {"count": 1 << 20}}
DRAWS = Facts(examples=({"stream": STREAM},), bits=True, samples="", usual={"stream": STREAM})
ADDED = {"tiny": {"*S": (512,)}, "typical": {"*S": (1 << 14,)}, "large": {"*S": (1 << 20,)}}

FACTS = {
    "noise.add_noise": Facts(
        examples=(
            {"stream": STREAM, "scale": _scale, "rounding": ROUNDING},
            {"stream": STREAM, "scale": _scales, "rounding": ROUNDING, "distribution": "laplace"},
        ),
        entries={"x": lambda call, shape: call.normal(shape) * 1000},
        bits=True,
        samples="",
        usual={"stream": STREAM, "scale": _scale, "rounding": ROUNDING},
        timed={
            **ADDED,
            "typical, laplace": ADDED["typical"] | {"stream": LAPLACE, "distribution": "laplace"},
            "large, laplace": ADDED["large"] | {"stream": LAPLACE, "distribution": "laplace"},
        },
    ),
    "noise.keystream": Facts(
        examples=({"stream": STREAM, "first_block": 3},),
        bits=True,
        samples="",
        usual={"stream": STREAM, "first_block": 3},
        timed={"tiny": {"blocks": 8}, "typical": {"blocks": 1 << 10}, "large": {"blocks": 1 << 16}},
    ),
    "noise.lattice_draws": replace(DRAWS, timed=COUNTS),
    "noise.rounding_bits": replace(DRAWS, timed=COUNTS),
    "noise.source_draws": Facts(
        examples=({"draws": SAMPLES}, {"draws": LOOKED_UP}),
        bits=True,
        samples="",
        usual={"draws": SAMPLES},
        timed={
            **COUNTS,
            "large, cumulative table": COUNTS["large"] | {"draws": LOOKED_UP},
        },
    ),
}
