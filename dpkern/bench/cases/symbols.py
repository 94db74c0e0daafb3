"""Randomized response on arrays of symbols."""

from __future__ import annotations

from ..case import Facts
from ._shared import SYMBOLS

COUNTS = {"tiny": {"*S": (512,)}, "typical": {"*S": (1 << 14,)}, "large": {"*S": (4_000_000,)}}
TEN = {"keep": 1 << 62, "categories": 10}

FACTS = {
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
        usual={"stream": SYMBOLS, "keep": 3 << 62},
        timed={**COUNTS, "large, 10 categories": COUNTS["large"] | TEN},
    ),
}
