"""Print a report on a terminal, as JSON and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, JustifyMethod
from rich.table import Table as RichTable
from rich.text import Text

from ..base.commit import version_with_commit
from ..base.json import dumps
from ..base.report import Report, ReportTable
from ..drawing.number_format import cell, wrapped
from .machine import processor_name

SCHEMA = 1
"""Version of the JSON of reports; it grows when a key changes its meaning or goes."""


def as_json(report: Report) -> str:
    """Return the facts as one JSON object on one line; infinities are the strings inf and -inf.

    The first key says the schema, its version, when and where the report was made; the last, by
    which dpkern.
    """
    made = {
        "schema": f"dpkern.{report.kind}",
        "version": SCHEMA,
        "report": report.name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": processor_name(),
    }
    return dumps({"made": made, **undated(report)})


def undated(report: Report) -> dict[str, Any]:
    """Return the facts, and by which dpkern they were made: the same for the same report."""
    return {**report.facts, "made_by": f"dpkern {version_with_commit()}"}


def as_csv(report: Report) -> str:
    """Return all tables: title, headings, rows; an empty line between two tables."""
    return "\n".join(f"{_line([table.title])}{as_tidy_csv(table)}" for table in report.tables)


def as_tidy_csv(table: ReportTable) -> str:
    """Return one table as any reader of CSV takes it: headings, then rows of plain numbers."""
    rows = (["" if value is None else value for value in row] for row in table.rows)
    return "".join(map(_line, (table.columns, *rows)))


def _line(cells: Sequence[object]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


def as_text(report: Report, console: Console) -> None:
    """Print title, summary, tables and notes to the console."""
    console.print(Text(report.title, style="bold"), soft_wrap=True)
    console.print(Text(report.summary))
    for table in map(condensed, report.tables):
        console.print()
        console.print(Text(table.title, style="bold"))
        for part in fitted(table, console.width):
            console.print(_rich(part, console.width))
        if table.note:
            console.print(Text(table.note, style="dim"))
    if report.notes:
        console.print()
    for note in report.notes:
        console.print(Text(f"- {note}"))


def condensed(table: ReportTable) -> ReportTable:
    """Drop columns of words that say the same in every row: the note says it once."""
    if len(table.rows) < 3:
        return table
    columns = [[row[i] for row in table.rows] for i in range(len(table.columns))]
    same = [isinstance(column[0], str) and len(set(column)) == 1 for column in columns]
    kept = [i for i, constant in enumerate(same) if not constant]
    if len(kept) < 2 or not any(same):
        return table
    said = ", ".join(f"{table.columns[i]} {columns[i][0]}" for i, c in enumerate(same) if c)
    return replace(
        table,
        columns=[table.columns[i] for i in kept],
        rows=[[row[i] for i in kept] for row in table.rows],
        note=f"Every row: {said}. {table.note}".strip(),
    )


WORDS = 24
"""Letters of a cell of words, beyond which it is wrapped."""
_BETWEEN = 3
"""Letters between two columns."""


def fitted(table: ReportTable, width: int) -> list[ReportTable]:
    """Split a table that is too wide into tables that fit; each repeats the first words.

    No number and no word is broken: columns that do not fit follow below.
    """
    widths = _widths(table)
    if _across(widths) <= width:
        return [table]
    numeric = numeric_columns(table)
    first = numeric.index(False) if False in numeric else 0  # sizes may stand before words
    keys = next((i for i in range(first + 1, len(numeric)) if numeric[i]), len(numeric))
    while keys > 1 and _across(widths[:keys]) > width // 2:
        keys -= 1
    groups: list[list[int]] = [[]]
    for column in range(keys, len(widths)):
        chosen = [*range(keys), *groups[-1], column]
        if groups[-1] and _across([widths[i] for i in chosen]) > width:
            groups.append([])
        groups[-1].append(column)
    return [_columns(table, [*range(keys), *group]) for group in groups]


def _across(widths: Sequence[int]) -> int:
    return sum(widths) + _BETWEEN * len(widths) + 2  # edges


def _widths(table: ReportTable) -> list[int]:
    found = []
    for place, heading in enumerate(table.columns):
        cells = [_cell(row[place]) for row in table.rows]
        lines = [line for text in cells for line in text.split("\n")]
        found.append(max(map(len, [*heading.split(), *lines])))
    return found


def _columns(table: ReportTable, chosen: Sequence[int]) -> ReportTable:
    return replace(
        table,
        columns=[table.columns[i] for i in chosen],
        rows=[[row[i] for i in chosen] for row in table.rows],
    )


def _cell(value: str | int | float | None) -> str:
    return wrapped(value, WORDS) if type(value) is str and value else cell(value)


def numeric_columns(table: ReportTable) -> Sequence[bool]:
    """Return which columns hold numbers and nothing else; they are aligned to the right."""
    columns = [[row[i] for row in table.rows] for i in range(len(table.columns))]
    return [
        any(value is not None for value in column)
        and all(value is None or isinstance(value, (int, float)) for value in column)
        for column in columns
    ]


def _rich(table: ReportTable, width: int) -> RichTable:
    drawn = RichTable(box=SIMPLE_HEAD, pad_edge=False)
    least = _widths(table)
    whole = [max(w, len(h)) for w, h in zip(least, table.columns, strict=True)]
    narrow = _across(whole) > width  # then headings take a line for each word
    for heading, numeric, most in zip(table.columns, numeric_columns(table), least, strict=True):
        side: JustifyMethod = "right" if numeric else "left"
        said = wrapped(heading, most) if narrow else heading
        drawn.add_column(said, justify=side, overflow="fold")
    for row in table.rows:
        drawn.add_row(*(Text(_cell(value)) for value in row))
    return drawn
