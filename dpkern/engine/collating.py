"""Check on a few records that ``collate_fn`` keeps them apart, before the first batch."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from ..base.errors import InvalidInput
from .empty import records_of
from .random_state import RandomState

Collate = Callable[[list[Any]], Any]


def check_collate(dataset: Any, collate: Collate, size: int) -> None:
    """Check that replacing one of a few records leaves the rows of all others as they are.

    Rows are compared as far as both batches go, since padding may be longer in one. A collation
    that draws random numbers is compared where shapes agree, with the same random state.

    Args:
        dataset: the data set of the records.
        collate: makes a batch of a list of records.
        size: records of a usual batch; between 3 and 16 are tried.

    Raises:
        InvalidInput: a record changes the rows of others.
    """
    count = min(max(size, 3), 16, len(dataset) - 1)
    if collate is default_collate or count < 3:
        return
    *kept, last, other = records_of(
        dataset, [i * (len(dataset) - 1) // count for i in range(count + 1)]
    )
    with _random_state_kept():
        before = _collated(collate, [*kept, last], seed=1)
        after = _collated(collate, [*kept, other], seed=1)
        if _equal_rows(before, after, count, count - 1, cut=True):
            return
        again = _collated(collate, [*kept, last], seed=2)
    random_too = not _equal_rows(before, again, count, count, cut=False)
    if not random_too or not _equal_rows(before, after, count, count - 1, cut=False):
        raise InvalidInput(
            "collate_fn",
            expected="rows that depend on one record each",
            got="rows of other records that changed when one was replaced",
            remedy="Move what mixes records (mixup, statistics of the batch) out of collate_fn; "
            "padding may depend on the longest record, values may not.",
        )


def _collated(collate: Collate, records: list[Any], seed: int) -> Any:
    torch.default_generator.manual_seed(seed)  # devices draw on as before
    np.random.seed(seed)
    random.seed(seed)
    return collate(copy.deepcopy(records))


@contextmanager
def _random_state_kept() -> Iterator[None]:
    kept = RandomState()
    try:
        yield
    finally:
        kept.restore()


def _equal_rows(one: Any, two: Any, count: int, rows: int, *, cut: bool) -> bool:
    """Whether the first ``rows`` of ``count`` are equal in all tensors.

    With ``cut`` they are compared where their shapes overlap.
    """
    if isinstance(one, torch.Tensor):
        one, two = one.detach().cpu().numpy(), two.detach().cpu().numpy()
    if isinstance(one, np.ndarray):
        if one.ndim == 0 or len(one) != count or len(two) != count or one.ndim != two.ndim:
            return True
        if one.shape != two.shape and not cut:
            return True
        overlap = tuple(slice(min(a, b)) for a, b in zip(one.shape[1:], two.shape[1:], strict=True))
        a, b = one[(slice(rows), *overlap)], two[(slice(rows), *overlap)]
        return bool(a.tobytes() == b.tobytes())
    if isinstance(one, Mapping):
        return all(_equal_rows(one[k], two[k], count, rows, cut=cut) for k in one if k in two)
    if isinstance(one, (tuple, list)) and len(one) == len(two):
        return all(_equal_rows(a, b, count, rows, cut=cut) for a, b in zip(one, two, strict=True))
    inner = getattr(one, "__dict__", None)
    if inner and any(isinstance(v, torch.Tensor) for v in inner.values()):
        return _equal_rows(inner, vars(two), count, rows, cut=cut)
    return True
