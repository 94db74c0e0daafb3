"""Read a batch of rows at once, where the data set is tensors and nobody else touches a record.

A ``DataLoader`` takes every row by itself and stacks them again, which takes longer than a small
model trains on them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate

Read = Callable[[list[int]], list[Tensor]]


def reader(loader: DataLoader[Any]) -> Read | None:
    """Return what makes the batches of this loader from their records; None if it cannot.

    It reads a ``TensorDataset``, or a ``Subset`` of one, as ``default_collate`` collates it.
    """
    dataset: Any = loader.dataset
    rows: Tensor | None = None
    if loader.collate_fn is not default_collate or loader.num_workers or loader.pin_memory:
        return None
    if type(dataset) is Subset and type(dataset.indices) in (list, range):
        dataset, rows = dataset.dataset, torch.tensor(dataset.indices)
        if rows.dtype != torch.int64 or bool((rows < 0).any()):
            return None
    if type(dataset) is not TensorDataset or not all(map(_plain, dataset.tensors)):
        return None
    tensors = dataset.tensors

    def read(records: list[int]) -> list[Tensor]:
        places = torch.tensor(records)
        if rows is not None:
            places = rows[places]
        return [tensor.index_select(0, places.to(tensor.device)) for tensor in tensors]

    return read


def _plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.requires_grad
