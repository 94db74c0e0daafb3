"""Describe which records a tensor's entries come from.

A tracked tensor is in one of four states. Its rows may belong to records one by one
(``PerRecord``), the whole of it may come from one record (``OneRecord``), it may be a sum over
records in which each record has a term of its own (``RecordSum``: a loss), or records may meet in
it in another way (``Mixed``). A tensor without a state is a constant: public numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Ids = NDArray[np.int64]

NO_RECORD = -1
"""The record number of a row that holds only constants."""


class Boundary(Protocol):
    """Interface between tracked tensors and the private module."""

    has_loader: bool
    current: YieldedBatch | None
    """The batch whose samples entered last."""
    constants: Any
    """The constants that have met samples (``constants``)."""

    def assume(self, condition: str) -> None:
        """Add a condition of the certificate."""

    def follows_size(self, operation: str, number: float, batch: YieldedBatch) -> bool:
        """Whether numbers that scale samples here have followed the sizes of batches."""

    def check_target(self, target: Tensor, operation: str) -> None:
        """Refuse an operation that writes records into a tensor of the module."""

    def backward(
        self,
        losses: Sequence[Tensor],
        states: Sequence[State],
        run: Callable[..., Any],
        *,
        frees: bool = False,
    ) -> Any:
        """Check losses and run their backward pass."""


@lru_cache(maxsize=64)
def _positions(count: int) -> tuple[Ids, frozenset[int]]:
    return np.arange(count), frozenset((count,))


class YieldedBatch:
    """One physical batch of the private loader, or one forward pass without a loader.

    Args:
        size: number of records in it.
        first: whether it opens its logical batch.
        final: whether it closes its logical batch.
        placeholder: an empty draw, for which the loop receives one row that counts for nothing: few
            models take a batch without rows.
        boundary: boundary of the module that it is for; None outside an engine.
    """

    __slots__ = (
        *("size", "placeholder", "first", "final", "boundary", "all", "each", "rows", "spread"),
        *("plain", "in_pass", "has_chosen_rows", "has_chosen_sizes", "has_ordered_rows"),
        *("has_read_rows", "went_backward", "__weakref__"),
    )

    def __init__(
        self,
        size: int,
        *,
        first: bool = True,
        final: bool = True,
        placeholder: bool = False,
        boundary: Boundary | None = None,
    ) -> None:
        self.size = size
        self.placeholder = placeholder
        self.first = first
        self.final = final
        self.boundary = boundary
        self.all, count = _positions(1 if placeholder else size)
        """The position of every record in the batch."""
        self.each = PerRecord(self, self.all)
        """The state of rows that are the records in their order."""
        self.spread: PerRecord | None = None
        """The state that ``spread_over`` returned last."""
        self.rows = _new_rows(Rows, (self, self.all, self.all, None, count))
        """The rows of a pass with all records in their order."""
        self.in_pass = len(self.all)
        """Records of the last forward pass, where a batch is cut into smaller ones."""
        self.has_chosen_rows = False
        """Whether values have chosen rows, so that their number depends on private data."""
        self.has_chosen_sizes = False
        """Whether values have chosen the size of some tensor."""
        self.has_ordered_rows = False
        """Whether values have ordered rows, so that the record at a place depends on others."""
        self.went_backward = False
        """Whether a loss of these samples was sent backward."""
        self.has_read_rows = False
        """Whether the loop has read values of rows, from which it can make other tensors."""

    plain: Tensor
    """An ordinary alias of the loader's first tensor, until that enters the module; only compiled
    calls make it and take it (``bindings/rows.cpp``)."""

    def spread_over(self, rows: int) -> PerRecord:
        """Return the state of a multiple of the records' number of rows, in the records' order.

        It is the same for all tensors of so many rows, such as logits and their targets.
        """
        if rows == len(self.all):
            return self.each
        if self.spread is None or len(self.spread.ids) != rows:
            self.spread = PerRecord(self, np.repeat(self.all, rows // len(self.all)))
        return self.spread


class FilledBatch(YieldedBatch):
    """A pass whose rows are more than its records: some only fill it up to a number of rows.

    Args:
        rows: number of rows.
        filling: bool ``[rows]``: whether a row is no record. A recorded pass reads it anew at every
            replay, so that its number of records may vary.
        boundary: boundary of the module that it is for.
    """

    __slots__ = ("filling",)

    def __init__(self, rows: int, filling: Tensor, boundary: Boundary) -> None:
        super().__init__(rows, boundary=boundary)
        self.filling = filling


class Rows(NamedTuple):
    """The rows of one forward pass.

    Args:
        batch: where they come from.
        ids: the record of each row, as the caller ordered them.
        records: the records, ascending.
        order: how rows are sorted; None if they came sorted.
        counts: numbers of rows of the inputs.
    """

    batch: YieldedBatch
    ids: Ids
    records: Ids
    order: Ids | None
    counts: frozenset[int]


_new_rows = tuple.__new__  # Rows(...) with a call less, for every batch


@dataclass(slots=True, eq=False)
class PerRecord:
    """State in which position i along ``dim`` comes from record ``ids[i]`` of ``batch`` alone."""

    batch: YieldedBatch
    ids: Ids
    dim: int = 0

    def matches(self, other: PerRecord) -> bool:
        """Whether both have the same records in the same order."""
        same = self.ids is other.ids or np.array_equal(self.ids, other.ids)
        return self.batch is other.batch and same


@dataclass(slots=True, eq=False)
class OneRecord:
    """State in which every entry comes from record ``record`` of ``batch`` alone."""

    batch: YieldedBatch
    record: int


Reduction = Literal["mean", "sum"]


@dataclass(slots=True, eq=False)
class RecordSum:
    """State in which each entry is a sum, or a mean, of terms of single records.

    Args:
        batch: the records.
        reduction: whether the sum was divided by the number of records.
        rescaled: whether a constant has multiplied it since, so that the user may have undone the
            reduction or made one.
        shares: numbers of entries per record by which means divide; they have to be the same in
            every batch, as they scale what a record contributes.
        scales: the terms, where constants have multiplied them (see ``terms``). A term whose factor
            is not known as a number is left out.
    """

    batch: YieldedBatch
    reduction: Reduction
    rescaled: bool = False
    shares: frozenset[int] = frozenset()
    scales: frozenset[tuple[Reduction, float]] | None = None

    @property
    def terms(self) -> frozenset[tuple[Reduction, float]]:
        """The reduction of each term and the constant that multiplies it."""
        return frozenset({(self.reduction, 1.0)}) if self.scales is None else self.scales


@dataclass(slots=True, eq=False)
class FilledSum(RecordSum):
    """A sum over the records of a ``FilledBatch``, to which rows that are none add nothing.

    All its terms have the same reduction, and no constant was added to it: a mean divides by the
    number of rows. Any other sum over such a batch is a ``RecordSum``, to which all rows add.
    """


@dataclass(slots=True, eq=False)
class Mixed:
    """State in which several records contribute to an entry, or may do so.

    Args:
        operation: name of the torch function.
        where: file and line of the user's code that called it.
        how: what it does to the records, as the end of a sentence.
        batch: where the records come from; None if that is not known.
        late: whether earlier batches may have done the same, which did not show it yet.
    """

    operation: str
    where: str
    how: str
    batch: YieldedBatch | None = None
    late: bool = False


State = PerRecord | OneRecord | RecordSum | Mixed


def misses(state: PerRecord) -> bool:
    """Whether records of the pass are missing."""
    return len(np.unique(state.ids[state.ids != NO_RECORD])) < state.batch.in_pass
