"""Norms and sums of tables, alone or tied to a linear layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ._shared import ABOVE, EMBEDDING, WHOLE

LOOKED_UP: dict[str, dict[str, Any]] = {
    "tiny": {"B": 4, "T": 4, "D": 8, "V": 11},
    "typical": {"B": 32, "T": 64, "D": 128, "V": 5_000},
    "large": {"B": 64, "T": 256, "D": 256, "V": 30_000},
}
"""Samples, positions, features, rows of the table."""
TIED: dict[str, dict[str, Any]] = {
    "tiny": {"B": 4, "S": 4, "T": 4, "D": 8, "V": 11},
    "typical": {"B": 8, "S": 32, "T": 32, "D": 64, "V": 500},
    "large": {"B": 8, "S": 64, "T": 64, "D": 128, "V": 2_000},
}


def _rows(sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the same sizes under the names of a linear layer."""
    other = {k: v for k, v in sizes.items() if k not in ("D", "V")}
    return other | {"d": sizes["D"], "p": sizes["V"]}


TABLE = replace(EMBEDDING, timed=LOOKED_UP, usual={"padding_idx": None})

FACTS = {
    "ghost.embedding_integer_sum": replace(
        TABLE, entries={**WHOLE.entries, **EMBEDDING.entries}, bounds=WHOLE.bounds
    ),
    "ghost.embedding_norm": replace(TABLE, from_above=ABOVE),
    "ghost.embedding_sum": TABLE,
    "ghost.tied_cross": replace(TABLE, timed=TIED, from_above=ABOVE),
    "ghost.tied_integer_sum": replace(
        WHOLE,
        examples=EMBEDDING.examples,
        entries={**WHOLE.entries, "ids": lambda call, shape: call.integers(call.sizes["p"], shape)},
        positive=frozenset({"p"}),
        timed={name: _rows(sizes) for name, sizes in TIED.items()},
        usual={"padding_idx": None},
    ),
    "ghost.tied_sum_error": replace(
        TABLE, rounded_alike=True, timed=TIED, from_above=ABOVE, looser=34
    ),
}
