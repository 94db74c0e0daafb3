"""Show reproduced items on a terminal: a progress bar, a table, verdicts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table
from rich.text import Text

from ..privacy.accounting import shown_bound
from ..privacy.accounting.shown import shown_exactly
from ..train.display import number
from .result import NONE_PUBLISHED, ComparisonRow, Result

WHOLE = 1e12
"""Whole numbers below are shown with all their digits."""
SHOWN = 60
"""Rows printed before the rest is left to the CSV."""


class Bar:
    """A progress bar of an item; nothing is shown for one that is done at once."""

    def __init__(self, item: str, progress: Progress) -> None:
        self._item, self._progress = item, progress
        self._task: Any = None

    def piece(self, label: str, number: int, count: int) -> None:
        """Show the setting that is computed now."""
        text = f"{self._item}, {label} ({number} of {count})"
        if self._task is None:
            self._task = self._progress.add_task("", total=1.0, state=text)
            self._progress.start()
        self._progress.update(self._task, state=text)

    def progress(self, share: float) -> None:
        """Show how much of the item is done."""
        if self._task is not None:
            self._progress.update(self._task, completed=share)


@contextmanager
def watching(item: str, console: Console) -> Iterator[Bar]:
    columns = (
        BarColumn(bar_width=20),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[state]}", table_column=Column(overflow="fold", no_wrap=False)),
    )
    # Without a terminal a bar would only be lines in a log.
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    try:
        yield Bar(item, progress)
    finally:
        progress.stop()


def show(console: Console, result: Result) -> None:
    """Print the rows as a table without its empty columns, then notes and data."""
    kept = columns(result.rows)
    quantities = list(dict.fromkeys(row.quantity for row in result.rows))
    title = f"{result.paper} {result.item}".strip() + f": {result.title}"
    one = f" ({quantities[0]})" if len(quantities) == 1 else ""
    table = Table(title=title + one, title_justify="left")
    table.add_column("setting", overflow="fold", ratio=1)
    for name in kept:
        table.add_column(name, overflow="fold")
    for number_of, row in enumerate(result.rows[:SHOWN]):
        setting = row.setting if one else f"{row.setting}: {row.quantity}"
        cells = (setting, *(cells[number_of] for cells in kept.values()))
        table.add_row(*(Text(cell) for cell in cells))
    console.print(table)
    if len(result.rows) > SHOWN:
        console.print(Text(f"and {len(result.rows) - SHOWN} more rows in the CSV"))
    if result.footer:
        console.print(Text(result.footer), soft_wrap=True)
    for verdict in result.verdicts:
        console.print(Text(verdict.sentence), soft_wrap=True)
    told = [*result.notes, *dict.fromkeys(row.note for row in result.rows if row.note)]
    if "published" not in kept:
        told.insert(0, NONE_PUBLISHED)
    for note in told:
        console.print(Text(f"- {note}"), soft_wrap=True)
    for name in dict.fromkeys(row.data for row in result.rows):
        console.print(Text(f"data: {name}"), soft_wrap=True)


def columns(rows: Sequence[ComparisonRow]) -> dict[str, list[str]]:
    """Return the table's columns beside the setting; those that say nothing are left out."""
    found = {
        "published": [_published(row.published) for row in rows],
        "ours": [_ours(row) for row in rows],
        "claimed": [_bound(row.epsilon_claimed) for row in rows],
        "certified": [_bound(row.epsilon_certified) for row in rows],
        "relation": [row.relation for row in rows],
        "stopped or collapsed": [row.guard for row in rows],
    }
    if found["ours"] == found["certified"]:
        del found["ours"]
    return {name: cells for name, cells in found.items() if any(cells)}


def _cell(value: Any) -> str:
    """Return five digits of a number, and all of a whole one: counts are exact."""
    if value is None or isinstance(value, str):
        return value or ""
    return str(int(value)) if abs(value) < WHOLE and value == int(value) else number(float(value))


def _bound(value: float | None) -> str:
    return "" if value is None else shown_bound(value)


def _published(value: float | str | None) -> str:
    """Return the paper's number with all its digits."""
    return shown_exactly(value) if isinstance(value, (int, float)) else value or ""


def _ours(row: ComparisonRow) -> str:
    if "epsilon" in row.quantity and isinstance(row.ours, (int, float)):
        return _bound(row.ours)
    return _cell(row.ours) + (f" +- {number(row.spread)}" if row.spread else "")
