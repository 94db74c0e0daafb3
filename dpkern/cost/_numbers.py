"""Format numbers as reports show them."""

from __future__ import annotations

from collections.abc import Mapping


def tidy(value: float) -> int | float:
    """Return an int where the value is one, else six significant digits: prices carry rounding."""
    rounded = float(f"{value:.6g}") if abs(value) < 1e6 else round(value)
    return int(rounded) if rounded == int(rounded) else rounded


def percent(value: float | None) -> float | None:
    """Round to two decimals; None stays None."""
    return None if value is None else round(value, 2) + 0.0  # without a sign of zero


def worded(value: float) -> str:
    """Format a number in a sentence as a cell of a table shows it."""
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def listed(counts: Mapping[str, float]) -> str:
    """Return ``14 ADD, 3 MUL``, or ``nothing`` if all counts are zero."""
    return ", ".join(f"{tidy(n):,} {name}" for name, n in counts.items() if n) or "nothing"


__all__ = ["listed", "percent", "tidy", "worded"]
