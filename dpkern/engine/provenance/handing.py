"""Mark the tensors of a yielded batch with the records of their rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from .states import Ids, Mixed, PerRecord, State, YieldedBatch
from .tensor import track
from .trees import mapped


def tracked_batch(tree: Any, batch: YieldedBatch, views: int = 1) -> Any:
    """Return what ``collate_fn`` made, with row i of every tensor marked as that of record i.

    Args:
        tree: tensors in tuples, lists, mappings or objects.
        batch: the records.
        views: a tensor with ``views`` times as many rows holds the first views of all records, then
            the second ones, and so on, as ``torch.cat([first, second])`` makes them.
    """
    kind = type(tree)
    if kind is Tensor:
        return track(tree, _state(tree, batch, views))
    if kind is tuple or kind is list:
        rows, each, items = len(batch.all), batch.each, []
        for item in tree:
            if type(item) is Tensor and item.dim() and item.shape[0] == rows:
                items.append(track(item, each))
            else:
                items.append(tracked_batch(item, batch, views))
        return kind(items)
    if kind is PackedSequence:
        ids = packed_ids(tree, batch)
        return PackedSequence(track(tree.data, PerRecord(batch, ids)), *tree[1:])
    return mapped(tree, lambda tensor: track(tensor, _state(tensor, batch, views)))


def _state(tensor: Tensor, batch: YieldedBatch, views: int) -> State:
    rows = tensor.shape[0] if tensor.dim() else None
    if rows == len(batch.all):
        return batch.each
    if views > 1 and rows == views * len(batch.all):
        return PerRecord(batch, np.tile(batch.all, views))
    return Mixed(
        "collate_fn",
        "the data loader",
        f"made a tensor of shape {list(tensor.shape)} out of {batch.size} records; if its first "
        "dimension holds several rows of each record, pass views= to make_private",
        batch,
    )


def packed_ids(sequence: PackedSequence, batch: YieldedBatch) -> Ids:
    """Return the record of each row of a packed sequence."""
    order = sequence.sorted_indices
    records = batch.all if order is None else order.cpu().numpy()
    parts = [records[:size] for size in sequence.batch_sizes.tolist()]
    return np.concatenate(parts) if parts else batch.all[:0]
