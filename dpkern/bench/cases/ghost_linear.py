"""Norms, gradients and sums of linear layers."""

from __future__ import annotations

from dataclasses import replace

from ..case import Facts
from ._shared import ABOVE, WHOLE

LAYERS = {
    "tiny": {"B": 4, "T": 4, "d": 16, "p": 16},
    "typical": {"B": 32, "T": 64, "d": 128, "p": 128},
    "large": {"B": 32, "T": 64, "d": 512, "p": 512},
}
"""Samples, positions, inputs, outputs."""
PERCEPTRON = {"typical, one position": {"B": 256, "T": 1, "d": 512, "p": 512}}
GRADIENTS = {**LAYERS, "large": {"B": 64, "T": 64, "d": 256, "p": 256}}
"""Sizes of ops that make every sample's gradient, or look at each of its entries."""

FACTS = {
    "ghost.linear_gradient": Facts(timed=GRADIENTS),
    "ghost.linear_norm": Facts(
        examples=({}, {"T": 1, "route": "rank_one"}),
        options={"route": ("auto", "gram", "direct")},
        from_above=ABOVE,
        timed={**LAYERS, **PERCEPTRON},
    ),
    "ghost.linear_norms": Facts(from_above=ABOVE, timed=LAYERS),
    # Another order of additions may round a scale the other way, and an operand with it.
    "ghost.linear_integer_norm": Facts(rounded_alike=True, timed=GRADIENTS),
    "ghost.linear_integer_sum": replace(
        WHOLE,
        examples=({}, {"T": 1}, {"T": 1, "rounding": "factors"}, {"rounding": "operands"}),
        options={"rounding": ("truncate", "operands")},
        rounded_alike=lambda arguments: arguments.get("rounding") == "operands",
        timed={**GRADIENTS, **PERCEPTRON},
    ),
    "ghost.linear_sum": Facts(timed={**LAYERS, **PERCEPTRON}),
    "ghost.linear_sum_error": Facts(
        rounded_alike=True, timed=GRADIENTS, from_above=ABOVE, looser=34
    ),
    "ghost.rounded_gradient": Facts(timed=GRADIENTS),
    "ghost.rounded_sum": Facts(
        timed={name: {"B": s["B"], "*P": [(s["p"], s["d"])]} for name, s in GRADIENTS.items()}
    ),
}
