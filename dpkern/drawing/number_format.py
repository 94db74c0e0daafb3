"""Format numbers and wrap names for figures and tables."""

from __future__ import annotations

import math
import re
import textwrap

from ..privacy.accounting.shown import ShownBound

_BREAKS = re.compile(r"(?<=[./_:])(?=\w)")
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_PREFIXES = {0: "", 3: "k", 6: "M", 9: "G", 12: "T", 15: "P"}


def wrapped(name: str, width: int) -> str:
    """Wrap at ``width`` letters, between words or after the dots of a path."""
    joint = "\N{ZERO WIDTH SPACE}"
    words = _BREAKS.sub(f"{joint} ", name) if len(name) > width else name
    lines = textwrap.wrap(words, width, break_long_words=False)
    return "\n".join(line.replace(f"{joint} ", "").removesuffix(joint) for line in lines)


def scientific(value: float, digits: int = 2) -> str:
    """Format as ``1.2 × 10⁻⁵``."""
    mantissa, exponent = f"{value:.{digits}e}".split("e")
    mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
    return scientific_text(f"{mantissa}e{exponent}")


def scientific_text(text: str) -> str:
    """Format ``1.2345e-05`` as ``1.2345 × 10⁻⁵``, with all its digits."""
    mantissa, exponent = text.split("e")
    raised = "10" + str(int(exponent)).translate(_SUPERSCRIPT)
    if mantissa in ("1", "-1"):
        return raised if mantissa == "1" else f"−{raised}"
    return minus(f"{mantissa} × {raised}")


def si_format(value: float) -> str:
    """Format a number on an axis or in a bar: ``12.5 k``, ``3 M``, ``0.25``, ``10⁻⁶``."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    size = abs(value)
    if size < 1e-3 or size >= 1e18:
        return scientific(value, 1)
    # Rounded first: 999 999 is 1 M, not 1000 k.
    rounded = float(f"{value:.3g}") if size >= 1 else float(f"{value:.2g}")
    exponent = max(0, min(15, 3 * (math.floor(math.log10(abs(rounded))) // 3)))
    text = f"{rounded / 10**exponent:.3g}"
    return minus(f"{text} {_PREFIXES[exponent]}".rstrip())


def probability(value: float) -> str:
    """Format a probability on an axis: ``0.2``, ``10⁻⁵``, ``0.999``, ``1 − 10⁻⁵``."""
    if value > 0.9995:
        return f"1 − {scientific(1 - value, 0)}"
    return scientific(value, 0) if value < 0.001 else f"{value:.12g}"


def on_bar(value: float) -> str:
    """Format as ``si_format`` does, but write whole numbers that are still readable in full."""
    if 1000 <= abs(value) < 100_000 and value == int(value):
        return minus(f"{int(value):,}")
    return si_format(value)


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
        return scientific_text(text) if "e" in text else minus(text)
    if isinstance(value, (bool, int)):
        return str(value) if isinstance(value, bool) else minus(f"{value:,}")
    if not math.isfinite(value) or value == 0:
        return minus(str(value)) if value else "0"
    if abs(value) < 1e-3 or abs(value) >= 1e9:
        return scientific(value)
    if abs(value) >= 1000:
        return minus(f"{value:,.0f}")
    return minus(f"{value:.4g}")
