"""Note the condition of certificates where rows are picked, weighted or written by their places."""

from __future__ import annotations

import torch

from .states import OneRecord, PerRecord, State, YieldedBatch, misses

PLACES = (
    "the loop treats samples alike, whatever their place in the batch (slices, weights, random "
    "numbers of its own), and its own tensors of as many rows hold nothing of other records"
)
"""The condition of certificates where rows were picked or weighted by their places."""

BY_ORDER = "weights samples by their place in an order that depends on all"
"""The reason to refuse weights of ranks: the largest loss counts most, say."""


def at_places(batch: YieldedBatch | None) -> None:
    """Record the condition ``PLACES``: the place of a record depends on the other records."""
    if torch.is_grad_enabled():
        written_at_places(batch)


def written_at_places(batch: YieldedBatch | None) -> None:
    """Record the condition also where gradients are off: what is written stays."""
    boundary = None if batch is None else batch.boundary
    if boundary is not None and boundary.has_loader:
        boundary.assume(PLACES)


def is_part(state: State | None) -> bool:
    """Whether a tensor holds some records of its batch only, and not by a mask of their values."""
    if isinstance(state, OneRecord):
        return state.batch.in_pass > 1
    return isinstance(state, PerRecord) and not state.batch.has_chosen_rows and misses(state)
