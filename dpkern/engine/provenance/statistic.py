"""Mark Python numbers that were computed over several records.

``x.std().item()`` is a number like any other, and dividing the samples by it mixes them. ``item()``
therefore returns a ``float`` that remembers where it came from, also through arithmetic. An
operation that combines it with samples gives a mixed result. ``float(x.std())`` and whatever passes
through NumPy or whole numbers are ordinary numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .states import Mixed


class Statistic(float):
    """A number to which several records may have contributed."""

    state: Mixed

    @classmethod
    def marked(cls, value: float, state: Mixed) -> Statistic:
        """Return the number with the state of the tensor that it comes from."""
        number = cls(value)
        number.state = state
        return number

    def __reduce__(self) -> Any:
        return float, (float(self),)


def _keeping_mark(operation: Callable[..., Any]) -> Callable[..., Any]:
    def apply(self: Statistic, *operands: Any) -> Any:
        result = operation(self, *operands)
        return Statistic.marked(result, self.state) if type(result) is float else result

    return apply


for _name in """
    add sub mul truediv floordiv mod pow radd rsub rmul rtruediv rfloordiv rmod rpow neg pos abs
""".split():
    setattr(Statistic, f"__{_name}__", _keeping_mark(getattr(float, f"__{_name}__")))
