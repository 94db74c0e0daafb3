"""Norms, filters and sums in the frequency domain."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from ...ops.spectral import Band
from ...ops.spectral.bins import kept_bins
from ..case import Call, Facts
from ._shared import ABOVE, CHANNELS, CONVOLUTIONS, F32, F64, IMAGES, of_grid

LINE, PLANE = Band((12,), "rectangle", 0.5), Band((12, 12), "shells", 0.4)
SPECTRAL = (
    CONVOLUTIONS[0] | {"band": LINE},
    CONVOLUTIONS[1] | {"band": PLANE},
    CONVOLUTIONS[1] | {"band": Band((12, 12), "authors_slice", 0.5)},
)
ON_GRIDS = {name: of_grid(images) for name, images in IMAGES.items()}
RANKS = {"tiny": 5, "typical": 5, "large": 5}


def _bins(band: Band, groups: int, *taps: int, **sizes: int) -> dict[str, Any]:
    channels = {"ci": 4, "co": 6} | sizes
    given = {"band": band, "groups": groups, "taps": taps}
    return {"K": len(kept_bins(band)), **channels, **given}


def _taps(call: Call) -> tuple[int, ...]:
    example = call.case.example
    return example["co"], example["ci"] // example["groups"], *example["taps"]


def _whitened(call: Call) -> tuple[int, ...]:
    sizes, example = call.sizes, call.case.example
    return sizes["B"], example.get("co", 3), example.get("ci", 2), sizes["taps"]


def _padded(images: dict[str, Any]) -> dict[str, Any]:
    side, reach = images["*S"][0], images["*K"][0] - 1
    return {
        "B": images["B"],
        "C": images["ci"],
        "*S": images["*S"],
        "band": images["band"],
        "padding": (images["padding"],) * 2,
        "rows": (side + reach,) * 2,
    }


CIRCULANT = Facts(
    examples=(
        {"band": None},
        {"d": 6, "band": Band((6,), "shells", 0.5)},
        {"d": 7, "band": Band((7,), "all")},
    ),
    positive=frozenset({"d"}),
    # A device transforms in float32, and lifts the norm by what that may err. In float64 bounds of
    # other transforms differ by some 1e-10.
    bounds={F32: 1e-2, F64: 2e-9},
    from_above=ABOVE,
    usual={"band": None},
    timed={
        "tiny": {"B": 4, "T": 2, "q": 2, "p": 2, "d": 8},
        "typical": {"B": 32, "T": 8, "q": 4, "p": 4, "d": 64},
        "large": {"B": 64, "T": 32, "q": 4, "p": 4, "d": 256},
    },
)
BLOCKS = CIRCULANT.timed

FACTS = {
    "spectral.bins_sum": Facts(
        examples=(_bins(LINE, 1, 3), _bins(PLANE, 2, 3, 2)),
        shapes={"out": _taps},
        positive=CHANNELS | {"K"},
        timed={
            name: {"B": images["B"]}
            | _bins(images["band"], 1, 3, 3, ci=images["ci"], co=images["co"])
            for name, images in ON_GRIDS.items()
        },
    ),
    "spectral.circulant_gradient": Facts(positive=frozenset({"d"}), timed=BLOCKS),
    # One position, as linear layers have: the compiled kernel reads no others.
    "spectral.circulant_norm": replace(
        CIRCULANT,
        timed={
            "tiny": {"B": 4, "T": 1, "q": 2, "p": 2, "d": 8},
            "typical": {"B": 256, "T": 1, "q": 49, "p": 32, "d": 16},
            "large": {"B": 256, "T": 1, "q": 64, "p": 64, "d": 64},
            "typical, several positions": BLOCKS["typical"],
        },
    ),
    "spectral.circulant_product": Facts(
        positive=frozenset({"d"}),
        timed={
            "tiny": {"B": 4, "q": 2, "p": 2, "d": 8},
            "typical": {"B": 256, "q": 98, "p": 64, "d": 8},
            "large": {"B": 1024, "q": 64, "p": 64, "d": 64},
        },
    ),
    "spectral.circulant_sum": replace(CIRCULANT, from_above=frozenset(), bounds=Facts().bounds),
    "spectral.conv_bins": Facts(
        examples=SPECTRAL, positive=CHANNELS, from_above=frozenset({"result[2]"}), timed=ON_GRIDS
    ),
    "spectral.conv_norm": Facts(
        examples=(
            *(example | {"size": example["band"].size} for example in SPECTRAL),
            CONVOLUTIONS[1] | {"size": (12, 12)},
        ),
        positive=CHANNELS,
        from_above=ABOVE,
        timed={name: images | {"size": images["band"].size} for name, images in ON_GRIDS.items()},
    ),
    "spectral.filtered": Facts(
        examples=(
            {"C": 2, "*S": (7,), "padding": (1,), "rows": (9,), "band": LINE},
            {"C": 2, "*S": (6, 5), "padding": (1, 1), "rows": (8, 6), "band": PLANE},
        ),
        positive=CHANNELS | {"C"},
        timed={name: _padded(images) for name, images in ON_GRIDS.items()},
    ),
    "spectral.whitened_bins": Facts(
        examples=tuple(
            example | {"r": rank, "taps": math.prod(example["*K"])}
            for example, rank in zip(SPECTRAL, (2, 5, 7), strict=True)
        ),
        bounds={F32: 2e-3, F64: 1e-8, torch.bfloat16: 5e-3, torch.float16: 5e-3},
        positive=CHANNELS | {"r", "taps"},
        from_above=frozenset({"result[2]"}),
        timed={
            name: images | {"r": RANKS[name], "taps": math.prod(images["*K"])}
            for name, images in ON_GRIDS.items()
        },
    ),
    "spectral.whitened_norm": Facts(
        examples=({"r": 2, "taps": 6}, {"r": 3, "taps": 4}),
        shapes={"grads": _whitened},
        positive=frozenset({"r", "taps"}),
        from_above=ABOVE,
        layouts={"grads": "dense"},
        timed={
            "tiny": {"B": 4, "co": 3, "ci": 2, "r": 5, "taps": 9},
            "typical": {"B": 32, "co": 32, "ci": 16, "r": 5, "taps": 9},
            "large": {"B": 64, "co": 64, "ci": 64, "r": 5, "taps": 9},
        },
    ),
}
