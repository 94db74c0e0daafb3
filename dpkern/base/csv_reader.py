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


HEADERS = ("auto", "yes", "no")
_DELIMITERS = ",;\t|"


def read(path: Path, *, headings: Collection[str] = (), header: str = "auto") -> CsvTable:
    """Read a file whose columns are divided by commas, semicolons, tabs or bars.

    Args:
        path: the file, in UTF-8; empty lines are passed over. The delimiter is the one that the
            first line has most of, outside of quotes.
        headings: names that make the first line a heading, whatever else it holds.
        header: whether the first line is a heading: ``yes``, ``no``, or ``auto``: if no cell of it
            is a number. Lines that may be either are then refused.

    Raises:
        InvalidInput: no such file, unreadable, without rows, rows of several widths, or a first
            line that may be a heading and may be a record.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            start = file.tell()
            first = next((line for line in file if line.strip()), "")
            file.seek(start)
            reader = csv.reader(file, delimiter=_delimiter(first))
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
    has_heading = rows and _has_heading(path, rows, headings, header)
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
                remedy="Give every line as many cells as the first one, a heading or not.",
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


def _delimiter(line: str) -> str:
    unquoted = "".join(line.split('"')[::2])
    return max(_DELIMITERS, key=unquoted.count)


def _has_heading(
    path: Path, rows: Sequence[CsvRow], headings: Collection[str], header: str
) -> bool:
    """Whether the first line is a heading.

    Raises:
        InvalidInput: it may be one and may be a record, and nobody has said which.
    """
    cells = rows[0].cells
    if header != "auto":
        return header == "yes"
    if any(cell in headings for cell in cells):
        return True
    numbers = [number(cell) for cell in cells if cell]
    if all(found is None for found in numbers):
        return True
    counted = [float(i) for i in range(len(cells))]
    doubtful = len(numbers) > 1 and numbers in (counted, [i + 1 for i in counted])
    # Text above numbers beside numbers above numbers: a heading that names years, say.
    below = rows[1].cells if len(rows) > 1 else []
    doubtful |= len(below) == len(cells) and any(
        cell and number(cell) is None and under and number(under) is not None
        for cell, under in zip(cells, below, strict=True)
    )
    if doubtful:
        raise InvalidInput(
            "header",
            expected="a first line that is a heading or a record for sure",
            got=f"{', '.join(cells[:6])}{', ...' if len(cells) > 6 else ''} in {path}",
            remedy="Pass --header yes or --header no.",
        )
    return False
