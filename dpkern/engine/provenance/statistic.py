"""Follow Python numbers that were computed over several records.

``x.std().item()`` is a number like any other, and dividing the samples by it mixes them. ``item()``
therefore returns a ``float`` or an ``int`` that remembers where it came from, also through
arithmetic. An operation that combines it with samples gives a mixed result. Functions of numbers
lose the mark, as ``int()`` does: what is read before the loss goes backward is a condition of the
certificate, and so are comparisons.

``float(x.std())``, also of a number with a mark, can only be an ordinary number. Its value is
remembered instead, unless it is one that constants have as well: an operation that combines samples
with a number of the same value gives a mixed result. What is computed from such numbers, and
whatever passes through lists and NumPy, is a condition of the certificate (``READ``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ..user_code import user_line
from .states import Mixed, State
from .tensor import TrackedTensor

READ = (
    "numbers that the loop reads from samples, outputs and losses (float, int, tolist, numpy) are "
    "printed or kept, and nothing that is trained on is computed from them"
)
"""The condition of certificates after values have left torch."""

DECIDED = (
    "decisions that the loop takes on several samples at once (if, while) choose no more than what "
    "it prints"
)
"""The condition of certificates after the truth of a mixed tensor or number was asked for."""


class Statistic(float):
    """A number to which several records may have contributed."""

    state: Mixed | None = None
    """None if a library made the number of its own, such as ``statistics.mean``."""

    def __reduce__(self) -> Any:
        return float, (float(self),)


class Count(int):
    """A whole number to which several records may have contributed."""

    state: Mixed | None = None

    def __reduce__(self) -> Any:
        return int, (int(self),)


def marked(value: Any, state: Mixed | None) -> Any:
    """Return a number with the state of the tensor that it comes from, anything else as it is."""
    kind: type[Statistic | Count] | None = {float: Statistic, int: Count}.get(type(value))
    if kind is None or state is None:
        return value
    number = kind(value)
    number.state = state
    return number


def _keeping_mark(operation: Callable[..., Any]) -> Callable[..., Any]:
    def apply(self: Any, *operands: Any) -> Any:
        return marked(operation(self, *operands), self.state)

    return apply


def _deciding(operation: Callable[..., Any]) -> Callable[..., Any]:
    def apply(self: Any, *operands: Any) -> Any:
        batch = None if self.state is None else self.state.batch
        if batch is not None and batch.boundary is not None:
            batch.boundary.assume(DECIDED)
        return operation(self, *operands)

    return apply


def _cutting(operation: Callable[..., Any]) -> Callable[..., Any]:
    def apply(self: Any) -> Any:
        whole = operation(self)
        batch = None if self.state is None else self.state.batch
        if batch is not None and batch.boundary is not None:
            batch.boundary.constants.note_read(whole)
        return whole

    return apply


def _as_float(self: Any) -> float:
    """Return the number without its mark; torch's schedule by a metric decides on what it asks."""
    batch = None if self.state is None else self.state.batch
    if batch is not None and batch.boundary is not None:
        if sys._getframe(1).f_code is ReduceLROnPlateau.step.__code__:
            batch.boundary.assume(DECIDED)
        else:
            remember(value := float.__float__(self), self.state)
            return value
    return float.__float__(self)


_ARITHMETIC = """
    add sub mul truediv floordiv mod pow radd rsub rmul rtruediv rfloordiv rmod rpow neg pos abs
    round
""".split()

_COMPARISONS = "lt le gt ge eq ne bool".split()
_CUTS = "trunc floor ceil".split()

for _kind, _plain in ((Statistic, float), (Count, int)):
    for _name in _ARITHMETIC:
        setattr(_kind, f"__{_name}__", _keeping_mark(getattr(_plain, f"__{_name}__")))
    for _name in _COMPARISONS:
        setattr(_kind, f"__{_name}__", _deciding(getattr(_plain, f"__{_name}__")))
    for _name in _CUTS:
        setattr(_kind, f"__{_name}__", _cutting(getattr(_plain, f"__{_name}__")))
    _kind.__hash__ = _plain.__hash__  # type: ignore[method-assign]

Statistic.__int__ = _cutting(float.__int__)  # type: ignore[method-assign]
Statistic.__float__ = _as_float  # type: ignore[method-assign]

_MOST = 1024
"""Number of values that are remembered."""

READ_VALUES: dict[float, Mixed] = {}
"""The values that were read from samples as numbers without a mark, and their states."""


def remember(value: float, state: Mixed) -> None:
    """Remember the value of a number that cannot be marked."""
    if not is_usual(value):
        READ_VALUES.pop(value, None)
        READ_VALUES[value] = replace(state, batch=None)  # so that no batch lives on
        if len(READ_VALUES) > _MOST:
            del READ_VALUES[next(iter(READ_VALUES))]


def remembered(value: float) -> Mixed | None:
    """Return the state of the number that was read with this value, if any."""
    return READ_VALUES.get(value) if READ_VALUES else None


def over_samples(state: State) -> Mixed:
    """Return the state of a number that was read from a tensor in this state."""
    if isinstance(state, Mixed):
        return state
    return Mixed("item", user_line(), "is a number computed over samples", state.batch)


def origin_of(value: Any) -> Mixed | None:
    """Return the operation over samples that a number came from, or one in a list, if known."""
    kind = type(value)
    if kind is float:
        return remembered(value)
    if kind is Statistic or kind is Count:
        return value.state  # type: ignore[no-any-return]
    if kind is TrackedTensor:
        return over_samples(value._state)
    if kind is tuple or kind is list:
        return next(filter(None, map(origin_of, value)), None)
    return None


def is_usual(value: float) -> bool:
    """Whether constants have such values: few digits, in binary or decimal."""
    if not np.isfinite(value) or value == 0:
        return True
    mantissa, _ = np.frexp(value)
    return bool(mantissa * 4096 % 1 == 0) or float(f"{value:.5g}") == value
