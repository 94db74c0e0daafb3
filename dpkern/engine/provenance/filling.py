"""Leave rows that only fill a batch up out of sums over its records.

How many rows are records is known on the device alone where a pass is recorded, so that nothing can
be cut off. Their terms become zeros before they are added: not even one that is not finite, or its
gradient, reaches the sum. Sums that are not known to do so keep the state of an ordinary one, which
whoever fills batches up has to refuse.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from .states import FilledBatch, FilledSum, PerRecord, RecordSum, State


def kind_of_sum(state: State) -> type[RecordSum]:
    """Return the state of sums over these rows: ``FilledSum`` if ``without_filling`` takes them."""
    if not isinstance(state, PerRecord) or type(state.batch) is not FilledBatch:
        return RecordSum
    if state.ids is state.batch.all:
        return FilledSum
    records = state.batch.all
    each = len(state.ids) // len(records)
    return FilledSum if np.array_equal(state.ids, np.repeat(records, each)) else RecordSum


def without_filling(values: Tensor, state: PerRecord) -> Tensor:
    """Return values with zeros in rows that are no records.

    Args:
        values: with the rows that the state says.
        state: one for which ``kind_of_sum`` returns ``FilledSum``.
    """
    batch = state.batch
    assert isinstance(batch, FilledBatch)
    each = len(state.ids) // len(batch.all)
    filling = batch.filling if each == 1 else batch.filling[:, None].expand(-1, each).reshape(-1)
    shape = [1] * values.dim()
    shape[state.dim] = -1
    return values.masked_fill(filling.reshape(shape), 0)
