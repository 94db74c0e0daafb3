"""Align the random draws of a run without one record with those of the run that has it.

Dropout on ``[B, ...]`` and on ``[B - 1, ...]`` draws other masks for the same records, which no
record has caused. So a run with all records notes the size of every draw of torch's generators, and
a run without record p draws at the noted size and leaves out the rows of p. Draws of other sizes
than noted are drawn as they are; the generators' states then tell that two runs cannot be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Sizes = dict[int, list[tuple[int, ...]]]
"""The sizes of the draws since each yielded batch, by its number."""


class AlignedDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that notes the size of every random draw, or repeats draws of noted sizes.

    Args:
        batch: function that returns the number of the current batch.
        noted: sizes of the run that is repeated. None notes sizes only.
        place: function that returns the position of the missing record in the current batch. None
            means that no record is missing.
    """

    def __init__(
        self, batch: Callable[[], int], noted: Sizes | None, place: Callable[[], int | None]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: Sizes = {}
        self._batch, self._noted, self._place = batch, noted, place

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one operation; random ones as described above."""
        del types
        kwargs = kwargs or {}
        size = _size(args) if torch.Tag.nondeterministic_seeded in func.tags else None
        if size is None:
            return func(*args, **kwargs)
        number = self._batch()
        drawn = self.sizes.setdefault(number, [])
        drawn.append(size)
        place = self._place()
        if self._noted is None or place is None:
            return func(*args, **kwargs)
        noted = self._noted.get(number, [])
        own = noted[len(drawn) - 1 : len(drawn)]
        if own == [size]:
            return func(*args, **kwargs)
        for whole in (*own, *noted):  # an engine may run a model once more, to look at it
            rows = _missing(size, whole, place)
            if rows is not None:
                with torch._C.DisableTorchFunctionSubclass():  # other code that follows rows
                    return _drawn(func, args, kwargs, whole, rows)
        return func(*args, **kwargs)


class _Rows:
    """Rows ``start`` to ``start + count`` of one dimension, which a smaller tensor lacks."""

    def __init__(self, dim: int, start: int, count: int, size: int) -> None:
        self.dim, self.start, self.count, self.size = dim, start, count, size

    def insert(self, value: Any) -> Any:
        """Return a tensor of the smaller size with copies of its first row as missing places."""
        if not isinstance(value, Tensor) or not self._is(value, self.size - self.count):
            return value
        first = value.narrow(self.dim, 0, 1).expand(
            *value.shape[: self.dim], self.count, *value.shape[self.dim + 1 :]
        )
        before = value.narrow(self.dim, 0, self.start)
        after = value.narrow(self.dim, self.start, value.shape[self.dim] - self.start)
        return torch.cat([before, first, after], self.dim)

    def drop(self, value: Any) -> Any:
        """Return a tensor of the larger size without the rows."""
        if not isinstance(value, Tensor) or not self._is(value, self.size):
            return value
        after = self.start + self.count
        parts = [value.narrow(self.dim, 0, self.start)]
        parts.append(value.narrow(self.dim, after, self.size - after))
        return torch.cat(parts, self.dim)

    def _is(self, value: Tensor, size: int) -> bool:
        return value.dim() > self.dim and value.shape[self.dim] == size


def _size(args: Sequence[Any]) -> tuple[int, ...] | None:
    """Return the size of a draw; None where the arguments do not say."""
    for value in args:
        if isinstance(value, Tensor):
            return tuple(value.shape)
        if isinstance(value, (list, tuple, torch.Size)) and all(type(v) is int for v in value):
            return tuple(value)
    whole = [value for value in args if type(value) is int]
    return (whole[0],) if len(whole) == 1 else None  # randperm


def _missing(size: tuple[int, ...], noted: tuple[int, ...], place: int) -> _Rows | None:
    """Return which rows of a draw are the missing record's; None where the sizes do not say."""
    if len(size) != len(noted):
        return None
    apart = [dim for dim, (a, b) in enumerate(zip(size, noted, strict=True)) if a != b]
    if len(apart) != 1:
        return None
    dim = apart[0]
    count = noted[dim] - size[dim]
    if count < 1 or size[dim] % count or noted[dim] % count or place >= noted[dim] // count:
        return None
    return _Rows(dim, place * count, count, noted[dim])


def _drawn(
    func: Any, args: tuple[Any, ...], kwargs: Any, size: tuple[int, ...], rows: _Rows
) -> Any:
    """Return what the operation draws for the others."""
    if not any(isinstance(value, Tensor) for value in args):
        larger = func(*(_resized(value, size, rows) for value in args), **kwargs)
        return (
            _others(larger, rows) if func is torch.ops.aten.randperm.default else rows.drop(larger)
        )
    more = [rows.insert(value) for value in args]
    given = {name: rows.insert(value) for name, value in kwargs.items()}
    found = func(*more, **given)
    if func._schema.is_mutable:
        target: Tensor = args[0]
        return target.copy_(rows.drop(more[0])) if found is more[0] else found
    if isinstance(found, (tuple, list)):
        return type(found)(rows.drop(value) for value in found)
    return rows.drop(found)


def _resized(value: Any, size: tuple[int, ...], rows: _Rows) -> Any:
    smaller = [*size]
    smaller[rows.dim] -= rows.count
    if isinstance(value, (list, tuple)) and list(value) == smaller:
        return list(size)
    return size[0] if type(value) is int and [value] == smaller else value


def _others(order: Tensor, rows: _Rows) -> Tensor:
    """Return a permutation of all rows as one of the rows that are left."""
    end = rows.start + rows.count
    left = order[(order < rows.start) | (order >= end)]
    return torch.where(left >= end, left - rows.count, left)
