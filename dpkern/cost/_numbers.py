"""Numbers as reports show them."""

from __future__ import annotations

from collections.abc import Mapping


def tidy(value: float) -> int | float:
    """An int where it is one, else six significant digits: sums of prices carry rounding."""
    rounded = float(f"{value:.6g}") if abs(value) < 1e6 else round(value)
    return int(rounded) if rounded == int(rounded) else rounded


def percent(value: float | None) -> float | None:
    """Two decimals."""
    return None if value is None else round(value, 2)


def listed(counts: Mapping[str, float]) -> str:
    """``14 ADD, 3 MUL``; ``nothing`` if empty."""
    return ", ".join(f"{tidy(n):,} {name}" for name, n in counts.items() if n) or "nothing"


__all__ = ["listed", "percent", "tidy"]
