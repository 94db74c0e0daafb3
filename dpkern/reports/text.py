"""Print a report on a terminal, as JSON and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import replace

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from ..base.json import dumps
from ..base.report import Report, ReportTable
from .number_format import cell


def as_json(report: Report) -> str:
    """Return the facts as one JSON object on one line; infinities are the strings inf and -inf."""
    return dumps(dict(report.facts))


def as_csv(report: Report) -> str:
    """Return all tables: title, headings, rows; an empty line between two tables."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for number, table in enumerate(report.tables):
        if number:
            text.write("\n")
        writer.writerow([table.title])
        writer.writerow(table.columns)
        writer.writerows(["" if value is None else value for value in row] for row in table.rows)
    return text.getvalue()


def as_text(report: Report, console: Console) -> None:
    """Print title, summary, tables and notes to the console."""
    console.print(Text(report.title, style="bold"), soft_wrap=True)
    console.print(Text(report.summary))
    for table in map(condensed, report.tables):
        console.print()
        console.print(Text(table.title, style="bold"))
        console.print(_rich(table))
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


def numeric_columns(table: ReportTable) -> Sequence[bool]:
    """Return which columns hold numbers and nothing else; they are aligned to the right."""
    columns = [[row[i] for row in table.rows] for i in range(len(table.columns))]
    return [
        any(value is not None for value in column)
        and all(value is None or isinstance(value, (int, float)) for value in column)
        for column in columns
    ]


def _rich(table: ReportTable) -> RichTable:
    drawn = RichTable(box=SIMPLE_HEAD, pad_edge=False)
    for heading, numeric in zip(table.columns, numeric_columns(table), strict=True):
        drawn.add_column(heading, justify="right" if numeric else "left", overflow="fold")
    for row in table.rows:
        drawn.add_row(*(Text(cell(value)) for value in row))
    return drawn
