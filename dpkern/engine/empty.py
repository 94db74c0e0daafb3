"""Make a batch of no records, in the structure that ``collate_fn`` gives its batches."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch

from ..base.errors import InvalidInput

_LEAVES = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device)


def empty_batch(dataset: Any, collate: Callable[[list[Any]], Any]) -> Any:
    """Return a batch without records, in the structure of collated ones.

    One record is collated once and twice: dimensions that grow run over the records.

    Raises:
        InvalidInput: a batch of a type that cannot be emptied.
    """
    one, two = (collate(records_of(dataset, [0] * count)) for count in (1, 2))
    return _emptied(one, two)


def records_of(dataset: Any, numbers: list[int]) -> list[Any]:
    """Return records of a data set, read as a loader reads them."""
    several = getattr(dataset, "__getitems__", None)
    records: list[Any] = several(numbers) if several else [dataset[i] for i in numbers]
    return records


def _emptied(one: Any, two: Any) -> Any:
    if isinstance(one, (torch.Tensor, np.ndarray)):
        grown = one.ndim > 0 and 2 * len(one) == len(two) and one.shape[1:] == two.shape[1:]
        return one[:0] if grown else one
    if isinstance(one, Mapping):
        parts = {key: _emptied(value, two[key]) for key, value in one.items()}
        if not isinstance(one, MutableMapping):
            return type(one)(parts)  # type: ignore[call-arg]
        same = copy.copy(one)
        same.update(parts)
        return same
    if isinstance(one, _LEAVES):
        return one
    if isinstance(one, Sequence):
        if len(one) != len(two):
            return one[:0]
        parts_of = [_emptied(a, b) for a, b in zip(one, two, strict=True)]
        named = hasattr(one, "_fields")
        return type(one)(*parts_of) if named else type(one)(parts_of)  # type: ignore[call-arg]
    if dataclasses.is_dataclass(one) and not isinstance(one, type):
        names = [field.name for field in dataclasses.fields(one) if field.init]
        parts = {name: _emptied(getattr(one, name), getattr(two, name)) for name in names}
        return dataclasses.replace(one, **parts)
    raise InvalidInput(
        "data_loader",
        expected="batches of tensors in tuples, lists, dictionaries or dataclasses",
        got=type(one).__name__,
        remedy="Return such a structure from collate_fn, or pass sampling='fixed': an empty "
        "Poisson draw needs an empty batch.",
    )
