"""Ranges of the numbers that ops take, by the names that signatures give them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from . import validate
from .signature import NumberParameter


@dataclass(frozen=True)
class Range:
    """Range of the numbers that an op takes, with the check that enforces it.

    Attributes:
        check: raises ``InvalidInput`` for all others.
        type: type of a number in the common case.
        least, most: bounds of the number. None means that there is no such bound.
        open: whether ``least`` itself is too small.
    """

    check: Callable[..., Any]
    type: type
    least: float | None = None
    most: float | None = None
    open: bool = False

    def common(self, x: str) -> str:
        """Return the test for a valid number ``x`` of the usual type, as Python source."""
        text = f"{x}.__class__ is {self.type.__name__}"
        least = "" if self.least is None else f"{self.least} {'<' if self.open else '<='} "
        most = "" if self.most is None else f" <= {self.most}"
        return f"{text} and {least}{x}{most}" if least or most else text


_LARGEST = sys.float_info.max
RANGES: dict[str, Range] = {
    "Index": Range(validate.integer, int, 0),
    "Position": Range(lambda **value: validate.integer(0, 2**62, **value), int, 0, 2**62),
    "Count": Range(lambda **value: validate.integer(0, 2**40, **value), int, 0, 2**40),
    "Positive": Range(validate.positive, float, 0, _LARGEST, open=True),
    "NonNegative": Range(validate.non_negative, float, 0, _LARGEST),
    "bool": Range(partial(validate.choice, (False, True)), bool),
}
"""Ranges by the names that signatures give them; others (``int``, ``float``) are left to the op."""


def has_range(parameter: NumberParameter) -> bool:
    """Whether a number's range is declared here rather than checked by the op itself."""
    return parameter.rule in RANGES and not parameter.many


__all__ = ["RANGES", "Range", "has_range"]
