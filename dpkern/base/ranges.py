"""Ranges of the numbers that ops take, by the names that signatures give them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from . import validate
from .signature import NumberParameter


@dataclass(frozen=True)
class Range:
    """Numbers that an op takes: the check that names them, and the common case in Python."""

    check: Callable[..., Any]
    common: str


RANGES: dict[str, Range] = {
    "Index": Range(validate.integer, "{x}.__class__ is int and {x} >= 0"),
    "Position": Range(
        lambda **value: validate.integer(0, 2**62, **value),
        "{x}.__class__ is int and 0 <= {x} <= 4611686018427387904",
    ),
    "Count": Range(
        lambda **value: validate.integer(0, 2**40, **value),
        "{x}.__class__ is int and 0 <= {x} <= 1099511627776",
    ),
    "Positive": Range(validate.positive, "{x}.__class__ is float and 0 < {x} <= _MAX"),
    "NonNegative": Range(validate.non_negative, "{x}.__class__ is float and 0 <= {x} <= _MAX"),
    "bool": Range(partial(validate.choice, (False, True)), "{x}.__class__ is bool"),
}
"""Ranges by the names that signatures give them; others (``int``, ``float``) are left to the op."""


def has_range(parameter: NumberParameter) -> bool:
    """Whether a number's range is declared, and not left to the op."""
    return parameter.rule in RANGES and not parameter.many


__all__ = ["RANGES", "Range", "has_range"]
