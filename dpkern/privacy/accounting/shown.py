"""Print privacy bounds: rounding never makes a statement stronger than what was proved.

An epsilon, a delta or a noise scale that was proved is an upper bound, and is rounded up. What an
audit shows is a lower bound, and is rounded down. A claim is the paper's upper bound: it is
rounded up too, so that a claim and a certificate of the same value read the same; with up to
``DIGITS`` digits it is printed as its paper printed it. JSON and CSV keep every digit.

Numbers are rounded from the shortest decimal that identifies the float, so 0.1 stays ``0.1``.
"""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal

DIGITS = 5
"""Significant digits of a printed bound."""


class ShownBound(float):
    """A number of a table or figure that knows how it has to be rounded."""

    def shown(self, digits: int = DIGITS) -> str:
        """Return the number as text."""
        raise NotImplementedError


class UpperBound(ShownBound):
    """An upper bound among the numbers of a table."""

    def shown(self, digits: int = DIGITS) -> str:
        return shown_bound(self, digits)


class LowerBound(ShownBound):
    """A lower bound among the numbers of a table."""

    def shown(self, digits: int = DIGITS) -> str:
        return shown_lower_bound(self, digits)


def shown_bound(value: float | str, digits: int = DIGITS) -> str:
    """Return an upper bound as text, rounded up to ``digits`` significant digits.

    ``float(shown_bound(x)) >= x``, and the two differ by less than one unit of the last digit.
    The notation is that of ``format(x, ".5g")``: no trailing zeros, exponents below -4.

    Args:
        value: the bound, or a non-finite one as reports spell it: ``"inf"``.
        digits: significant digits, at least 1.
    """
    return _shown(value, digits, ROUND_CEILING)


def shown_lower_bound(value: float | str, digits: int = DIGITS) -> str:
    """Return a lower bound as text, rounded down: ``float(shown_lower_bound(x)) <= x``."""
    return _shown(value, digits, ROUND_FLOOR)


def shown_exactly(value: float | str) -> str:
    """Return the shortest text that is the same float: a delta that bounds on both sides are at."""
    return _shown(value, 17, ROUND_CEILING)


def _shown(value: float | str, digits: int, rounding: str) -> str:
    number = float(value)
    if not math.isfinite(number):
        return str(number)
    rounded = Context(prec=digits, rounding=rounding).create_decimal(Decimal(repr(number)))
    if not rounded:
        return "0"
    sign, places, _ = rounded.as_tuple()
    text, exponent = "".join(map(str, places)).rstrip("0"), rounded.adjusted()
    if -4 <= exponent < digits:
        return f"{rounded.normalize():f}"
    mantissa = text[0] + (f".{text[1:]}" if text[1:] else "")
    return f"{'-' if sign else ''}{mantissa}e{exponent:+03d}"


__all__ = [
    "DIGITS",
    "LowerBound",
    "ShownBound",
    "UpperBound",
    "shown_bound",
    "shown_exactly",
    "shown_lower_bound",
]
