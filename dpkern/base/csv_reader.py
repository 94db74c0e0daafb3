"""Read CSV files: a heading, if there is one, and rows of cells with their line numbers."""

from __future__ import annotations

import csv
import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from .errors import InvalidInput


class CsvRow(NamedTuple):
    """The cells of one row, without blanks around them, and the line that it ends on."""

    line: int
    cells: list[str]


class CsvTable(NamedTuple):
    """A heading, empty where the file has none, and at least one row; all have the same width."""

    heading: list[str]
    rows: list[CsvRow]


def read(path: Path, *, headings: Collection[str] = ()) -> CsvTable:
    """Read a file whose first line is a heading if no cell of it is a number.

    Args:
        path: the file, in UTF-8; empty lines are passed over.
        headings: names that make the first line a heading, whatever else it holds.

    Raises:
        InvalidInput: no such file, unreadable, without rows, or rows of several widths.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            rows = [
                CsvRow(reader.line_num, [cell.strip() for cell in row]) for row in reader if row
            ]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidInput(
            "data",
            expected="a readable CSV file",
            got=f"{path}: {error}",
            remedy="Check the path, its permissions and its contents.",
        ) from error
    has_heading = rows and _is_heading(rows[0].cells, headings)
    heading = rows.pop(0).cells if has_heading else []
    if not rows:
        raise InvalidInput(
            "data",
            expected="at least one row of numbers",
            got=f"{path}: none",
            remedy="Add records.",
        )
    width = len(heading or rows[0].cells)
    for line, cells in rows:
        if len(cells) != width:
            raise InvalidInput(
                "data",
                expected=f"{width} columns in every line",
                got=f"{len(cells)} in {path} line {line}",
                remedy="Repair that line.",
            )
    return CsvTable(heading, rows)


def number(cell: str) -> float | None:
    """Return the cell's number; NaN if it is blank, None if it is text."""
    if not cell:
        return math.nan
    try:
        return float(cell)
    except ValueError:
        return None


def _is_heading(cells: Sequence[str], headings: Collection[str]) -> bool:
    named = any(cell in headings for cell in cells)
    return named or not any(cell and number(cell) is not None for cell in cells)
