"""Find the records that the inputs of a forward pass hold.

All inputs must hold the same records of one batch, equally many rows of each. Rows are sorted by
record, so that those of one record are neighbours and row b of the first dimension is record b of
the pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .aliases import WRITTEN, is_stale, written_elsewhere
from .refusals import mixed_input, two_batches, unequal_rows, wrong_rows
from .states import NO_RECORD, Ids, Mixed, OneRecord, PerRecord, Rows, YieldedBatch
from .tensor import TrackedTensor, state_of, untracked
from .trees import mapped, tensors_of


class Input(NamedTuple):
    """A tensor among a module's arguments; ``packed`` if it is a ``PackedSequence``'s data."""

    name: str
    tensor: Tensor
    packed: bool


def inputs_of(args: Any, kwargs: Any) -> Iterator[Input]:
    """Yield the tensors among a module's arguments, with names for errors."""
    for place, value in [*enumerate(args), *kwargs.items()]:
        name = f"input {place!r} of the module"
        yield from (Input(name, tensor, packed) for tensor, packed in tensors_of(value))


def rows_in_order(values: Sequence[Any]) -> Rows | None:
    """Return the rows if every argument has one row of each record in order, else None."""
    state: Any = None
    for value in values:
        if type(value) is not TrackedTensor or (state is not None and value._state is not state):
            return None
        state = value._state
    if type(state) is not PerRecord or state is not state.batch.each:
        return None
    return None if WRITTEN and is_stale(values) else state.batch.rows


def rows_of(inputs: Sequence[Input]) -> Rows | None:
    """Return the rows that the inputs share, or None if no input holds records.

    Raises:
        UnsupportedModule: rows in which records have met, or in another dimension than the first.
        PrivacyError: rows of several batches, or that differ in records, numbers or order.
    """
    batch: YieldedBatch | None = None
    found: list[tuple[Ids, bool]] = []
    for each in inputs:
        state = state_of(each.tensor)
        if is_stale([each.tensor]):
            state = written_elsewhere(state)
        if state is None:
            continue
        if isinstance(state, Mixed):
            raise mixed_input(each.name, state)
        if isinstance(state, OneRecord) and each.tensor.dim() and each.tensor.shape[0] == 1:
            state = PerRecord(state.batch, np.array([state.record]))
        if not isinstance(state, PerRecord) or state.dim != 0:
            raise wrong_rows(each.name, each.tensor, state)
        if state.ids is not state.batch.all and has_no_records(state):
            continue
        if batch is not None and state.batch is not batch:
            raise two_batches(each.name)
        batch = state.batch
        found.append((state.ids, each.packed))
    if batch is None:
        return None
    if all(ids is batch.all for ids, _ in found):
        return batch.rows
    return _sorted(batch, found)


def has_no_records(state: PerRecord) -> bool:
    """Whether there are rows, all of them constants."""
    return bool(len(state.ids)) and bool((state.ids == NO_RECORD).all())


def _sorted(batch: YieldedBatch, found: Sequence[tuple[Ids, bool]]) -> Rows:
    widest = max((ids for ids, _ in found), key=len)
    records = np.unique(widest)
    order: Ids | None = None
    for ids, packed in found:
        own, counts = np.unique(ids, return_counts=True)
        if bool((ids == NO_RECORD).any()):
            raise unequal_rows("rows that belong to no record beside rows of records")
        if not np.array_equal(own, records):
            raise unequal_rows("inputs that hold different records")
        if not packed and len(counts) and bool((counts != counts[0]).any()):
            raise unequal_rows("more rows of some records than of others")
        if order is None and not packed and bool((np.diff(ids) < 0).any()):
            order = np.argsort(ids, kind="stable")
    plain = [ids for ids, packed in found if not packed]
    alike = {len(ids): ids for ids in plain}
    if any(not np.array_equal(ids, alike[len(ids)]) for ids in plain):
        raise unequal_rows("inputs whose rows are in different orders")
    return Rows(batch, widest, records, order, frozenset(len(ids) for ids, _ in found))


def stripped(tree: Any, rows: Rows | None) -> Any:
    """Return the same tree with ordinary tensors, whose rows are sorted by record."""
    order = None if rows is None else rows.order

    def strip(tensor: Tensor) -> Tensor:
        state = state_of(tensor)
        if state is None:
            return tensor
        plain = untracked(tensor)
        if order is None or not isinstance(state, PerRecord) or not len(state.ids):
            return plain
        if has_no_records(state):
            return plain if len(state.ids) != len(order) else picked(plain, order)
        return picked(plain, np.argsort(state.ids, kind="stable"))

    return mapped(tree, strip, untracked)


def picked(tensor: Tensor, order: Ids) -> Tensor:
    """Return the rows in this order."""
    return tensor[torch.from_numpy(order).to(tensor.device)]
