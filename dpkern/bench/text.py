"""Print tables that fit a terminal of 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

WIDTH = 80


def lines(
    columns: Sequence[str],
    widths: Sequence[int],
    rows: Sequence[Sequence[str]],
    *,
    title: bool = True,
) -> Iterator[str]:
    """Yield a table: the first and the last column to the left, numbers to the right.

    A first cell that is too long gets a line of its own, a last one goes on in the next lines.

    Args:
        columns: titles.
        widths: of all columns; with a space between two of them at most 80 together.
        rows: cells.
        title: begin with the titles and a rule.
    """
    if title:
        yield _line(columns, widths)
        yield "-" * (sum(widths) + len(widths) - 1)
    for first, *middle, last in rows:
        name = first
        if len(first) > widths[0]:
            yield from wrapped(first)
            name = ""
        head, *rest = textwrap.wrap(last, widths[-1], break_long_words=False) or [""]
        yield _line([name, *middle, head], widths)
        for part in rest:
            yield _line([*[""] * (len(widths) - 1), part], widths)


def wrapped(line: str) -> list[str]:
    """Return a sentence in lines of at most 80 columns."""
    return textwrap.wrap(line, WIDTH, subsequent_indent="  ")


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    ends = (0, len(cells) - 1)
    placed = [
        cell.ljust(width) if i in ends else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return " ".join(placed).rstrip()
