"""Choose colours, dashes and markers for figures.

Data colours are those of Okabe and Ito (Color Universal Design, 2008), told apart with every common
kind of colour vision; their yellow is left out because it vanishes on white. Labels are in ink.
On a page every colour becomes a variable of its style sheet, so that dark mode can choose another.
"""

from __future__ import annotations

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


def luminance(colour: str) -> float:
    """Return the relative luminance of ``#rrggbb`` (WCAG 2.2)."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colours, 1 to 21 (WCAG 2.2)."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def contrast_color(colour: str) -> str:
    """Return the colour of a number on a bar of this colour."""
    return max(ON_DEEP, ON_PALE, key=lambda ink: contrast(colour, ink))
