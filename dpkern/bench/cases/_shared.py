"""Keys, entries and examples that cases of several stems share."""

from __future__ import annotations

import math
from typing import Any

import torch

from ...base.rng import Purpose
from ...ops import update
from ...ops.spectral import Band
from ...ops.testing import KEY
from ..case import Call, Facts

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
ABOVE = frozenset({"result"})
"""The only result of an op, which is never below the true value."""
CHANNELS = frozenset({"ci", "co", "c", "*S", "*O", "*K"})


def plane(batch: int, ci: int, co: int, side: int, kernel: int = 3, **other: int) -> dict[str, Any]:
    """Return the sizes of a convolution of square images that keeps their size."""
    groups = other.get("groups", 1)
    padding = (kernel - 1) // 2
    return {
        "B": batch,
        "ci": ci,
        "co": co,
        "c": ci // groups,
        "*S": (side, side),
        "*O": (side, side),
        "*K": (kernel, kernel),
        "kernel_size": kernel,
        "padding": padding,
        **other,
    }


IMAGES = {
    "tiny": plane(4, 2, 3, 7),
    "typical": plane(32, 16, 32, 14),
    "large": plane(64, 64, 64, 14),
}
"""Convolutions by size: a toy, a middle layer of a small network, a block of a ResNet."""


def of_grid(images: dict[str, Any]) -> dict[str, Any]:
    """Return the same convolution with half of the frequencies of a grid that it fits on."""
    side = images["*S"][0] + images["*K"][0] - 1
    side += side % 2
    return images | {"band": Band((side, side), "shells", 0.5)}


def _ids(call: Call, shape: tuple[int, ...]) -> torch.Tensor:
    """Draw ids of a table; where no operand shows its rows, the example says how many there are."""
    rows = call.sizes.get("V", call.case.example.get("V", 5))
    return call.integers(rows, shape)


EMBEDDING = Facts(
    examples=({"padding_idx": None}, {"padding_idx": 2}),
    entries={"ids": _ids},
    positive=frozenset({"V"}),
    blind=frozenset({"g"}),
)
WHOLE = Facts(
    # Large enough that an integer more or less is a small part of it.
    entries={"factors": lambda call, shape: (call.uniform(shape) + 0.25) * 2**14},
    bounds=dict.fromkeys((F32, F64, torch.bfloat16, torch.float16), 2e-4),
)


def update_noise(call: Call) -> update.Noise:
    """Return Gaussian noise for every parameter of the call."""
    params = call.args["params"]
    starts, following = [], 0
    for param in params:
        starts.append(following)
        following += math.ceil(max(param.numel(), 4096) / 512) * 512
    return update.Noise(
        distribution="gaussian",
        scales=tuple(1.0 + i for i in range(len(params))),
        stream=STREAM,
        positions=tuple(starts),
        rounding=ROUNDING,
    )
