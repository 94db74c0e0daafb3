"""Find records that a data set lists several times: they would count as several records."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Dataset, Subset

from ..base.errors import InvalidInput


def check_repeats(dataset: Any) -> None:
    """Refuse subsets and concatenations of torch that list a record more than once.

    A record that is listed k times can be in a batch k times, and would move the clipped sum by k
    times the bound. Entries of other classes of data sets are taken to be different records, unless
    two that are joined wrap the same data set, as two augmentations of it do.

    Raises:
        InvalidInput: a record twice.
    """
    entries = _entries(dataset)
    if entries is None:
        return
    sources = [id(source) for source, _ in entries]
    for source in dict.fromkeys(sources):
        numbers = np.concatenate([n for s, n in entries if id(s) == source])
        values, counts = np.unique(numbers, return_counts=True)
        if len(counts) and int(counts.max()) > 1:
            place = int(counts.argmax())
            raise InvalidInput(
                "data_loader",
                expected="each record listed once",
                got=f"record {int(values[place])} listed {int(counts[place])} times",
                remedy="List it once (Subset(dataset, sorted(set(indices)))) and weight it in the "
                "loss: a repeated record would move the sum by several times the clipping bound.",
            )


def _entries(dataset: Any) -> list[tuple[Any, np.ndarray[Any, Any]]] | None:
    """Return the underlying data sets with the numbers of their listed records, in order."""
    if isinstance(dataset, Subset):
        inner = _entries(dataset.dataset)
        chosen = np.asarray(list(dataset.indices), dtype=np.int64)
        if inner is None:
            return [(dataset.dataset, chosen)]
        sizes = [len(numbers) for _, numbers in inner]
        starts = np.concatenate([[0], np.cumsum(sizes)])
        chosen = np.where(chosen < 0, chosen + starts[-1], chosen)
        return [
            (source, numbers[chosen[(chosen >= a) & (chosen < b)] - a])
            for (source, numbers), a, b in zip(inner, starts[:-1], starts[1:], strict=True)
        ]
    if isinstance(dataset, ConcatDataset):
        parts: list[tuple[Any, np.ndarray[Any, Any]]] = []
        for part in dataset.datasets:
            inner = _entries(part)
            whole = len(part) if isinstance(part, Sized) else 0
            parts += inner if inner is not None else [(_inner(part, whole), np.arange(whole))]
        return parts
    return None


def _inner(dataset: Any, size: int) -> Any:
    """Return the data set of as many records that this one holds, or this one itself."""
    for value in getattr(dataset, "__dict__", {}).values():
        if isinstance(value, Dataset) and isinstance(value, Sized) and len(value) == size:
            return value
    return dataset
