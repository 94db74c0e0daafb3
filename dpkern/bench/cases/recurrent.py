"""Recurrent layers forwards and backwards."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..case import Call, Facts


def _blocks(count: int) -> tuple[dict[str, Any], ...]:
    """Return hidden units, and so many rows of weights for each."""
    return tuple({"H": hidden, "G": count * hidden} for hidden in (3, 16, 37))


def _timed(count: int, *, gates: int = 0) -> dict[str, dict[str, Any]]:
    """Return sizes by name; ``count`` rows of weights and ``gates`` kept numbers for each unit."""
    sizes = {
        "tiny": {"B": 4, "T": 4, "D": 8, "H": 8},
        "typical": {"B": 32, "T": 32, "D": 64, "H": 64},
        "large": {"B": 64, "T": 64, "D": 128, "H": 256},
    }
    return {
        name: {**given, "G": count * given["H"], "Q": gates * given["H"]}
        for name, given in sizes.items()
    }


def _contracting(call: Call, shape: tuple[int, ...]) -> torch.Tensor:
    """Return weights of states that forget: of others rounding errors grow with every time step."""
    return call.normal(shape) / (3 * math.sqrt(max(1, shape[1])))


BOUNDED = {name: lambda call, shape: call.uniform(shape) for name in ("before", "last")}
STABLE = {"w_hh": _contracting, "gates": lambda call, shape: call.uniform(shape)}
POSITIVE = frozenset({"H", "G"})

FACTS = {
    "recurrent.gru": Facts(examples=_blocks(3), entries=STABLE, positive=POSITIVE, timed=_timed(3)),
    "recurrent.gru_backward": Facts(
        examples=tuple(sizes | {"Q": 4 * sizes["H"]} for sizes in _blocks(3)),
        entries=STABLE,
        positive=POSITIVE | {"Q"},
        timed=_timed(3, gates=4),
    ),
    "recurrent.lstm": Facts(
        examples=_blocks(4), entries=STABLE, positive=POSITIVE, timed=_timed(4)
    ),
    "recurrent.lstm_backward": Facts(
        examples=_blocks(4), entries=STABLE, positive=POSITIVE, timed=_timed(4)
    ),
    "recurrent.rnn": Facts(entries=STABLE, timed=_timed(1)),
    "recurrent.rnn_backward": Facts(entries=STABLE | BOUNDED, timed=_timed(1)),
}
