"""Notice constants that the loop makes anew for a batch.

Torch reads a tensor of one number without a call of ``__torch_function__`` where an operation takes
a number: ``torch.full(size, x.mean())``, ``torch.tensor(x.max())``, ``torch.add(..., alpha=...)``.
What comes out looks like a constant, but changes from batch to batch. Such a tensor of few entries,
with values that constants do not have, is a condition of the certificate (``READ``) from the second
batch on. Constants of the first batch may have been made before the loop.

Python numbers of such values, once ``item()`` has been called after a backward pass, are the same:
``math.exp(-loss.item())`` has lost the mark that ``item()`` gave. Ratios of whole numbers are those
of schedules and sizes of batches (``1 / len(x)``), unless ``item()`` has returned whole numbers; so
are their roots, exponentials and cosines, and numbers that one constant multiplies again and again.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..parameter import tensors_in
from .states import Boundary, YieldedBatch
from .statistic import READ, Statistic, is_usual

FEW = 64
"""Number of entries up to which constants are looked at."""

WHEN_READ: list[Callable[[], None]] = []
"""Functions that begin to look at numbers, called once a loop has read some."""

_MOST = 1024

_RECENT, _FACTORS = 16, 2
"""Number of scheduled numbers that are remembered, and of constants that multiply them."""


class Constants:
    """The constants that have met samples of one module.

    Args:
        on_read: called when numbers are read for the 1st, 2nd, 4th, 8th ... time.
    """

    def __init__(self, on_read: Callable[[], None] | None = None) -> None:
        self._first: weakref.ref[YieldedBatch] | None = None
        """The first batch that has met constants."""
        self._entered_first: weakref.ref[YieldedBatch] | None = None
        self._known: dict[int, tuple[weakref.ref[Tensor], Any]] = {}
        """Each constant by its ``id``, with its values: torch counts no writes by NumPy."""
        self._numbers: set[float] = set()
        """The numbers that samples of the first batch have met, and those that the module held
        when the loop read the first one."""
        self._on_read = on_read
        self.numbers_were_known = False
        """Whether public numbers were named by ``know``."""
        self._reads = 0
        """The count of numbers that the loop has read, no condition as long as it prints them."""
        self._smooths = False
        """Whether a number that smooths labels was met: nothing is looked at before one is read."""
        self._counts_are_out = False
        """Whether some of them were whole or had few digits."""
        self._scheduled: deque[float] = deque((1.0,), maxlen=_RECENT)
        """The last new numbers that a schedule has made."""
        self._factors: set[float] = set()
        """The constants by which schedules multiply."""

    def note_read(self, value: Any) -> None:
        """Note that the loop has read a number, which is no condition as long as it prints it.

        Args:
            value: the number; None if it is not known.
        """
        self._reads += 1
        self._counts_are_out = self._counts_are_out or type(value) is not float or is_usual(value)
        if self._reads == 1:
            for look in WHEN_READ:
                look()
        if self._on_read is not None and not self._reads & (self._reads - 1):
            self._on_read()

    @property
    def numbers_are_out(self) -> bool:
        """Whether the loop has read numbers."""
        return self._reads > 0

    def know(self, values: Sequence[Any]) -> None:
        """Take the numbers among these for public ones, also those of tensors."""
        self.numbers_were_known = True
        self._numbers.update(numbers_in(values))
        for tensor in tensors_in(values):
            if may_be_read(tensor, most=math.inf):
                self._known[id(tensor)] = weakref.ref(tensor), _few(tensor)

    def note_kept(self, batch: YieldedBatch, values: Sequence[Any]) -> None:
        """Add the condition if a tensor that the module keeps may have been made of the batch.

        Of large ones only those that have been written in place: a module may make them anew.
        """
        kept = [tensor for tensor in tensors_in(values) if may_be_read(tensor, most=math.inf)]
        for tensor in kept:
            known = self._known.get(id(tensor))
            if tensor.numel() > FEW and (known is None or known[0]() is not tensor):
                self._known[id(tensor)] = weakref.ref(tensor), _few(tensor)
        self.note(batch, kept)

    def begin(self, batch: YieldedBatch) -> None:
        """Take the numbers that meet samples of this batch, the first to enter, for public ones."""
        self._entered_first = weakref.ref(batch)

    def note(self, batch: YieldedBatch, constants: Sequence[Tensor]) -> None:
        """Add the condition if one of these may have been made of the batch."""
        if batch.boundary is None or not batch.boundary.has_loader:
            return
        first = self._is_first(batch, batch.boundary)
        for tensor in constants:
            known, values = self._known.get(id(tensor)), _few(tensor)
            if known is not None and known[0]() is tensor and known[1] == values:
                continue
            if len(self._known) >= _MOST:
                self._known = {k: v for k, v in self._known.items() if v[0]() is not None}
            self._known[id(tensor)] = weakref.ref(tensor), values
            if not first and not _has_usual_values(tensor):
                batch.boundary.assume(READ)

    def note_smoothing(self, batch: YieldedBatch, value: float) -> None:
        """Add the condition if another smoothing of labels than the first may be of samples."""
        if self._smooths:
            self.note_numbers(batch, (value,))
        else:
            self._smooths = True
            self._numbers.add(value)

    def note_numbers(self, batch: YieldedBatch, values: Iterable[Any]) -> None:
        """Add the condition if a number among these may have been made of an earlier batch."""
        if batch.boundary is None or not batch.boundary.has_loader:
            return
        if self._entered_first is None or self._entered_first() is batch:
            self._numbers.update(numbers_in(values))
        elif self._reads:
            new = (v for v in numbers_in(values) if v not in self._numbers)
            if not all(map(self._is_public, new)):
                batch.boundary.assume(READ)

    def _is_first(self, batch: YieldedBatch, boundary: Boundary) -> bool:
        """Whether samples of no other batch have entered before; not all batches meet constants."""
        if self._first is None:
            self._first = weakref.ref(boundary.current or batch)
        return self._first() is batch

    def _is_public(self, value: float) -> bool:
        if is_usual(value) or value in self._scheduled:
            public = True
        elif self._counts_are_out:
            public = False
        else:
            public = (
                is_ratio(value)
                or any(is_image(value, *each) for each in _SCHEDULES)
                or self._goes_on(value)
            )
        if public and value not in self._scheduled:
            self._scheduled.append(value)
        return public

    def _goes_on(self, value: float) -> bool:
        """Whether it is an earlier number of a schedule times a constant that it always takes."""
        for known in self._scheduled:
            factor = float(f"{value / known:.5g}") if known else 0.0
            if factor and abs(factor * known - value) <= _SLACK * math.ulp(value):
                self._factors.add(factor)
                return len(self._factors) <= _FACTORS
        return False


def numbers_in(values: Iterable[Any]) -> Iterator[float]:
    """Yield the numbers among values, also in lists, tuples and mappings; whole ones are left out.

    Those that remember the samples are left out too.
    """
    for value in values:
        if type(value) is float:
            yield value
        elif value is None or isinstance(value, (int, str, slice, Tensor)):
            continue
        elif isinstance(value, (tuple, list)):
            yield from numbers_in(value)
        elif isinstance(value, Mapping):
            yield from numbers_in(value.values())
        elif isinstance(value, (float, np.floating)):
            if not isinstance(value, Statistic) or value.state is None:
                yield float(value)
        elif isinstance(value, (complex, np.complexfloating)):
            yield from (float(value.real), float(value.imag))


def is_ratio(value: float) -> bool:
    """Whether a number is the ratio of two whole numbers, the lower one of up to 16 bits.

    Of all floating-point numbers one in a million is.
    """
    near = Fraction(value).limit_denominator(_LARGEST)
    return abs(float(near) - value) <= _SLACK * math.ulp(value)


def is_image(
    value: float, function: Callable[[float], float], inverse: Callable[[float], float]
) -> bool:
    """Whether a number is the function's value at a ratio of whole numbers of up to 16 bits.

    Of numbers of 32 bits, which losses are, one in 256 is such a ratio at most.
    """
    try:
        near = Fraction(inverse(value)).limit_denominator(_LARGEST)
        found = function(float(near))
    except (ValueError, OverflowError):  # no value of the function
        return False
    below = near.denominator
    dyadic = not below & (below - 1) and below > 1 << 10
    short = abs(near.numerator) <= _LARGEST and not dyadic
    return short and abs(found - value) <= _SLACK * math.ulp(value)


_LARGEST = 1 << 16

_SLACK = 4
"""Units in the last place by which roundings of a schedule may differ."""

_SCHEDULES: tuple[tuple[Callable[[float], float], Callable[[float], float]], ...] = (
    (math.sqrt, lambda v: v * v),
    (math.exp, math.log),
    (lambda t: math.cos(math.pi * t), lambda v: math.acos(v) / math.pi),
    (lambda t: (1 + math.cos(math.pi * t)) / 2, lambda v: math.acos(2 * v - 1) / math.pi),
)
"""Functions of the number of a step by which schedules follow it, and their inverses."""


def may_be_read(tensor: Tensor, *, most: float = FEW) -> bool:
    """Whether a constant is of the kind that numbers read from samples are made into."""
    return (
        type(tensor) is Tensor
        and tensor.is_floating_point()
        and tensor.is_cpu
        and tensor.numel() <= most
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and not tensor.is_inference()
    )


def _few(tensor: Tensor) -> Any:
    """Return the values of a tensor, or the first ones."""
    return tensor.tolist() if tensor.numel() <= FEW else tensor.flatten()[:FEW].tolist()


def _has_usual_values(tensor: Tensor) -> bool:
    values = tensor.flatten()[:FEW].tolist()
    rounded = torch.tensor([float(f"{v:.5g}") for v in values], dtype=tensor.dtype).tolist()
    return all(is_usual(v) or v == other for v, other in zip(values, rounded, strict=True))
