"""Choose colours and format numbers for figures and tables.

Data colours are those of Okabe and Ito (Color Universal Design, 2008), told apart with every common
kind of colour vision; their yellow is left out because it vanishes on white. Labels are in ink.
On a page every colour becomes a variable of its style sheet, so that dark mode can choose another.
"""

from __future__ import annotations

import math
import re
import textwrap

from ..privacy.accounting.shown import ShownBound

INK = "#1b1f24"
MUTED = "#5b6470"
GRID = "#e4e7eb"
PAGE = "#ffffff"
DATA = (
    *("#0072b2", "#e69f00", "#009e73", "#cc79a7"),
    *("#56b4e9", "#d55e00", "#8a8f98", "#5d4a9c", "#8c5a2b"),
)
OTHER = "#b9bec6"
"""The colour of the part of a stack that is too small to be named."""

ON_DEEP, ON_PALE = "#fffffe", "#111418"
"""Colours of numbers within bars: the bar decides, not the page."""

VARIABLES = {
    ON_DEEP: "on-deep",
    ON_PALE: "on-pale",
    INK: "ink",
    MUTED: "muted",
    GRID: "grid",
    PAGE: "page",
    OTHER: "other",
    **{colour: f"data-{number}" for number, colour in enumerate(DATA, start=1)},
}
"""The name of each colour's variable in the page's style sheet."""

DASHES = ("-", (0, (5, 1.6)), (0, (1.2, 1.4)), (0, (5, 1.4, 1.2, 1.4)))
MARKERS = "osD^vhX*"

_BREAKS = re.compile(r"(?<=[./_:])(?=\w)")
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_PREFIXES = {0: "", 3: "k", 6: "M", 9: "G", 12: "T", 15: "P"}


def luminance(colour: str) -> float:
    """Return the relative luminance of ``#rrggbb`` (WCAG 2.2)."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colours, 1 to 21 (WCAG 2.2)."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def within(colour: str) -> str:
    """Return the colour of a number on a bar of this colour."""
    return max(ON_DEEP, ON_PALE, key=lambda ink: contrast(colour, ink))


def wrapped(name: str, width: int) -> str:
    """Wrap at ``width`` letters, between words or after the dots of a path."""
    joint = "\N{ZERO WIDTH SPACE}"
    words = _BREAKS.sub(f"{joint} ", name) if len(name) > width else name
    lines = textwrap.wrap(words, width, break_long_words=False)
    return "\n".join(line.replace(f"{joint} ", "").removesuffix(joint) for line in lines)


def power(value: float, digits: int = 2) -> str:
    """Format as ``1.2 × 10⁻⁵``."""
    mantissa, exponent = f"{value:.{digits}e}".split("e")
    mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
    return scientific(f"{mantissa}e{exponent}")


def scientific(text: str) -> str:
    """Format ``1.2345e-05`` as ``1.2345 × 10⁻⁵``, with all its digits."""
    mantissa, exponent = text.split("e")
    raised = "10" + str(int(exponent)).translate(_SUPERSCRIPT)
    if mantissa in ("1", "-1"):
        return raised if mantissa == "1" else f"−{raised}"
    return minus(f"{mantissa} × {raised}")


def short(value: float) -> str:
    """Format a number on an axis or in a bar: ``12.5 k``, ``3 M``, ``0.25``, ``10⁻⁶``."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    size = abs(value)
    if size < 1e-3 or size >= 1e18:
        return power(value, 1)
    # Rounded first: 999 999 is 1 M, not 1000 k.
    rounded = float(f"{value:.3g}") if size >= 1 else float(f"{value:.2g}")
    exponent = max(0, min(15, 3 * (math.floor(math.log10(abs(rounded))) // 3)))
    text = f"{rounded / 10**exponent:.3g}"
    return minus(f"{text} {_PREFIXES[exponent]}".rstrip())


def probability(value: float) -> str:
    """Format a probability on an axis: ``0.2``, ``10⁻⁵``, ``0.999``, ``1 − 10⁻⁵``."""
    if value > 0.9995:
        return f"1 − {power(1 - value, 0)}"
    return power(value, 0) if value < 0.001 else f"{value:.12g}"


def on_bar(value: float) -> str:
    """Format as ``short`` does, but write whole numbers that are still readable in full."""
    if 1000 <= abs(value) < 100_000 and value == int(value):
        return minus(f"{int(value):,}")
    return short(value)


def minus(number: str) -> str:
    """Replace the hyphen by the minus sign."""
    return number.replace("-", "−")


def cell(value: str | int | float | None) -> str:
    """Format a table cell: whole numbers in full, bounds on their side, others with four digits."""
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    if isinstance(value, ShownBound):
        text = value.shown()
        return scientific(text) if "e" in text else minus(text)
    if isinstance(value, (bool, int)):
        return str(value) if isinstance(value, bool) else minus(f"{value:,}")
    if not math.isfinite(value) or value == 0:
        return minus(str(value)) if value else "0"
    if abs(value) < 1e-3 or abs(value) >= 1e9:
        return power(value)
    if abs(value) >= 1000:
        return minus(f"{value:,.0f}")
    return minus(f"{value:.4g}")
