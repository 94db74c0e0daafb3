"""All loops, by class: those that must train, and those that must not."""

from __future__ import annotations

from tests.engine.guards import (
    again_loaders,
    again_losses,
    again_state,
    backward_mixing,
    behind,
    changes,
    empty,
    forward_mixing,
    losses,
    numbers,
    outside,
    recent,
    right_batches,
    right_inputs,
    right_loops,
    right_losses,
    rows,
    sampling,
    state,
    untyped,
    whose_samples,
)
from tests.engine.guards.kit import Loop

TABLES = [
    whose_samples.TABLE,
    sampling.TABLE,
    forward_mixing.TABLE,
    state.TABLE,
    rows.TABLE,
    losses.TABLE,
    outside.TABLE,
    empty.TABLE,
    untyped.TABLE,
    right_batches.TABLE,
    right_inputs.TABLE,
    right_losses.TABLE,
    right_loops.TABLE,
    changes.TABLE,
    again_loaders.TABLE,
    again_state.TABLE,
    again_losses.TABLE,
    backward_mixing.TABLE,
    numbers.TABLE,
    recent.TABLE,
    behind.TABLE,
]

LOOPS: list[Loop] = [loop for table in TABLES for loop in table.loops]

__all__ = ["LOOPS", "TABLES", "Loop"]
