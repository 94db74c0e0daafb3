"""Check on a few records that ``collate_fn`` keeps them apart, before the first batch."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Subset, default_collate

from ..base.errors import InvalidInput
from .empty import records_of
from .random_state import RandomState
from .snapshot import Snapshot

Collate = Callable[[list[Any]], Any]
Array = NDArray[Any]


TRIALS = 32
"""Random states that a collation which draws random numbers is tried with before the first batch.
One that mixes a tenth of all batches passes with probability 0.9^32 = 0.034."""

_SYSTEM = random.SystemRandom()


def check_collate(
    dataset: Any, collate: Collate, size: int, *, trials: int = TRIALS, views: int = 1
) -> None:
    """Check that replacing one of a few records leaves the rows of all others as they are.

    Rows are compared as far as both batches go, since padding may be longer in one. A collation
    that draws random numbers is compared where shapes agree, with the same random state, for
    several secret ones, since it may mix now and then: also with generators that it reaches. One
    that draws none is compared with records replaced in front of the others as well, and with some
    left out, since it may scale by their number. A data set that reads several records at once
    (``__getitems__``) is tried together with it. What the collation keeps, and all generators, are
    put back at the end.

    Args:
        dataset: the data set of the records.
        collate: makes a batch of a list of records.
        size: records of a usual batch; between 3 and 16 are tried.
        trials: maximum number of random states.
        views: rows of each record in tensors that hold the first views of all records, then the
            second ones, and so on.

    Raises:
        InvalidInput: a record changes the rows of others.
    """
    count = min(max(size, 3), 16, len(dataset) - 1)
    if count < 3:
        return
    reader = _reader(dataset)
    at_once = reader is not None
    if collate is default_collate and not at_once:
        return
    chosen = [i * (len(dataset) - 1) // count for i in range(count + 1)]
    if trials > 1:  # some more, with which others are replaced
        chosen += [i for i in range(min(len(dataset), 2 * count)) if i not in chosen]

    def batch(numbers: list[int], seed: int) -> Any:
        _seed(seed, own)
        records = records_of(dataset, numbers) if at_once else [read[i] for i in numbers]
        return collate(copied(records))

    secret = random.Random(_SYSTEM.getrandbits(256))  # the system's own would take a call a number
    with random_state_kept(), _put_back(collate, reader) as own:
        read = {} if at_once else dict(zip(chosen, records_of(dataset, chosen), strict=True))
        for trial in range(trials):
            seed = secret.getrandbits(32)
            order = secret.sample(chosen, len(chosen)) if trial else chosen
            replaced = secret.randint(1, min(count - 1, len(order) - count)) if trial else 1
            kept = order[: count - replaced]
            first, second = [*kept, *order[len(kept) : count]], [*kept, *order[-replaced:]]
            before = batch(first, seed)
            drawn = _random_numbers()
            if not trial:
                batch(second[::-1], seed)  # what it keeps of a batch shows in the next
            after = batch(second, seed)
            rows = slice(len(kept))
            if not _equal_rows(before, after, count, rows, views, cut=True):
                again = batch(first, seed ^ 1)
                random_too = not _equal_rows(before, again, count, slice(None), views)
                if not random_too or not _equal_rows(before, after, count, rows, views):
                    raise _mixes(at_once, views)
            _seed(seed)
            if own or drawn != _random_numbers():
                continue
            # Draws of the first records would move those of the others, so these are not compared.
            before, after = batch(first[::-1], seed), batch(second[::-1], seed)
            rows = slice(-len(kept), None)
            if not _equal_rows(before, after, count, rows, views, cut=True):
                raise _mixes(at_once, views)
            whole, fewer = batch(first, seed), batch(kept, seed)
            if not _equal_but_rounded(whole, fewer, count, len(kept), views):
                raise _mixes(at_once, views, "left out")
            if trial >= trials // 8:  # it may have a generator that is not found
                return


def _mixes(at_once: bool, views: int, what: str = "replaced") -> InvalidInput:
    order = f"; views={views}: first rows of all records, then second ones" if views > 1 else ""
    return InvalidInput(
        "__getitems__ or collate_fn" if at_once else "collate_fn",
        expected="rows that depend on one record each",
        got=f"rows of other records that changed when one was {what}",
        remedy="Move what mixes records (mixup, statistics of the batch) out of collate_fn; "
        f"padding may depend on the longest record, values may not{order}.",
    )


def _seed(seed: int, own: Sequence[Any] = ()) -> None:
    """Seed the usual generators, and those of the collation itself."""
    torch.default_generator.manual_seed(seed)  # devices draw on as before
    np.random.seed(seed)
    random.seed(seed)
    for generator in own:
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)
        elif isinstance(generator, np.random.BitGenerator):
            generator.state = type(generator)(seed).state
        else:
            generator.seed(seed)


def copied(record: Any) -> Any:
    """Return a copy of a record, or of a list of them, that shares no memory with it."""
    kind = type(record)
    if kind is torch.Tensor and not record.requires_grad:
        return record.clone()
    if kind is tuple or kind is list:
        return kind([copied(item) for item in record])
    return record if kind in (int, float, str, bool) else copy.deepcopy(record)


def _reader(dataset: Any) -> Callable[..., Any] | None:
    """Return the method of a data set that reads several records; None if it has none."""
    while isinstance(dataset, Subset):  # its method passes on what the inner one has
        dataset = dataset.dataset
    found: Callable[..., Any] | None = getattr(dataset, "__getitems__", None)
    return found


def _random_numbers() -> tuple[Any, ...]:
    """Return the next number of each generator, which tells whether others were drawn before."""
    return torch.rand(()).item(), np.random.random(), random.random()


@contextmanager
def _put_back(*functions: Callable[..., Any] | None) -> Iterator[list[Any]]:
    """Yield the generators that functions reach; put back what they keep afterwards."""
    kept = [Snapshot(function) for function in functions if function is not None]
    found = {id(g): g for snapshot in kept for g in snapshot.generators}
    found.pop(id(torch.default_generator), None)
    try:
        yield [*found.values()]
    finally:
        for snapshot in kept:
            snapshot.restore()


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Put the usual generators of the CPU back after the block."""
    kept = RandomState()
    try:
        yield
    finally:
        kept.restore()


def _equal_rows(
    one: Any, two: Any, count: int, rows: slice, views: int, *, cut: bool = False
) -> bool:
    """Whether these rows of ``count`` are equal in all tensors.

    With ``cut`` they are compared where their shapes overlap.
    """

    def same(one: Array, two: Array) -> bool:
        a, b = _by_record(one, count, views), _by_record(two, count, views)
        if a is None or b is None or a.ndim != b.ndim or (a.shape != b.shape and not cut):
            return True
        overlap = tuple(slice(min(sizes)) for sizes in zip(a.shape[2:], b.shape[2:], strict=True))
        kept = (slice(None), rows, *overlap)
        return bool(a[kept].tobytes() == b[kept].tobytes())

    return _compared(one, two, same)


def _equal_but_rounded(one: Any, two: Any, count: int, fewer: int, views: int) -> bool:
    """Whether the first rows of ``count`` are those of a batch of these records alone."""

    def same(one: Array, two: Array) -> bool:
        a, b = _by_record(one, count, views), _by_record(two, fewer, views)
        if a is None or b is None or a.shape[2:] != b.shape[2:]:
            return True
        kept = a[:, :fewer]
        if kept.dtype.kind not in "fc":
            return bool(kept.tobytes() == b.tobytes())
        return bool(np.allclose(kept, b, rtol=1e-4, atol=1e-6, equal_nan=True))

    return _compared(one, two, same)


def _by_record(array: Array, count: int, views: int) -> Array | None:
    """Return the array with views first and records second; None if it has no row for each."""
    if not array.ndim or not count:
        return None
    for each in (1, views):
        if len(array) == each * count:
            return array.reshape(each, count, *array.shape[1:])
    return None


def _compared(one: Any, two: Any, same: Callable[[Array, Array], bool]) -> bool:
    """Whether ``same`` holds for all pairs of tensors or arrays of two batches."""
    if isinstance(one, torch.Tensor):
        one, two = one.detach().cpu().numpy(), two.detach().cpu().numpy()
    if isinstance(one, np.ndarray):
        return same(one, two)
    if isinstance(one, Mapping):
        return all(_compared(one[k], two[k], same) for k in one if k in two)
    if isinstance(one, (tuple, list)) and len(one) == len(two):
        return all(_compared(a, b, same) for a, b in zip(one, two, strict=True))
    inner = getattr(one, "__dict__", None)
    if inner and any(isinstance(v, torch.Tensor) for v in inner.values()):
        return _compared(inner, vars(two), same)
    return True
