"""Read tables as people have them: CSV and Parquet files with named columns, text and blanks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from ..base import csv_reader
from ..base.errors import InvalidInput
from ..base.validate import require

SUFFIXES = (".csv", ".tsv", ".parquet")

Cell = float | str
"""A number, NaN where the cell is blank, or text."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """The columns of one file.

    Attributes:
        path: the file.
        names: headings; ``column 1`` and so on where the file has none.
        named: whether the file has headings.
        columns: the cells of each column.
        lines: for each row where it stands in the file, for messages.
    """

    path: Path
    names: tuple[str, ...]
    named: bool
    columns: tuple[tuple[Cell, ...], ...]
    lines: tuple[int, ...]

    def place(self, option: str, column: str) -> int:
        """Return the place of a column that an option names, by its heading or by its number.

        Raises:
            InvalidInput: no such column, or several with this heading.
        """
        found = [i for i, name in enumerate(self.names) if name == column]
        if len(found) == 1:
            return found[0]
        if not found and column.isascii() and column.isdigit():
            number = int(column)
            if 1 <= number <= len(self.names):
                return number - 1
        raise InvalidInput(
            option,
            expected=f"one column of {self.path.name}, by its heading or its number from 1",
            got=f"{column!r}, which {len(found) or 'no'} columns have",
            remedy=f"Name one of: {', '.join(self.names)}.",
        )


def read_table(path: Path, header: str) -> Table:
    """Read a file.

    Args:
        path: ends in one of ``SUFFIXES``; the suffix decides.
        header: of CSV files, as ``csv_reader.read`` takes it.

    Raises:
        InvalidInput: what is wrong with the file.
        MissingDependency: a Parquet file, without pyarrow.
    """
    return _parquet(path) if path.suffix.lower() == ".parquet" else _csv(path, header)


def _csv(path: Path, header: str) -> Table:
    heading, rows = csv_reader.read(path, headings=("label",), header=header)
    width = len(rows[0].cells)
    columns = [tuple(_cell(row.cells[i]) for row in rows) for i in range(width)]
    return Table(
        path=path,
        names=tuple(heading or (f"column {i}" for i in range(1, width + 1))),
        named=bool(heading),
        columns=tuple(columns),
        lines=tuple(row.line for row in rows),
    )


def _cell(text: str) -> Cell:
    found = csv_reader.number(text)
    return text if found is None else found


def _parquet(path: Path) -> Table:
    parquet = require("pyarrow.parquet")
    arrow = require("pyarrow")
    try:
        content = parquet.read_table(path)
    except (arrow.ArrowException, OSError) as error:
        raise InvalidInput(
            "data",
            expected="a readable Parquet file",
            got=f"{path}: {error}",
            remedy="Check the path, its permissions and its contents.",
        ) from error
    names = tuple(str(name) for name in content.column_names)
    columns = tuple(_values(column.to_pylist()) for column in content.columns)
    if not columns or not columns[0]:
        raise InvalidInput(
            "data", expected="at least one row", got=f"{path}: none", remedy="Add records."
        )
    lines = tuple(range(1, len(columns[0]) + 1))
    return Table(path=path, names=names, named=True, columns=columns, lines=lines)


def _values(values: Sequence[Any]) -> tuple[Cell, ...]:
    cells: list[Cell] = []
    for value in values:
        if value is None:
            cells.append(math.nan)
        elif isinstance(value, bool | int | float | Decimal):
            cells.append(float(value))
        else:
            # Dates and the like are text, which is refused where the column is used as numbers.
            text = str(value).strip()
            cells.append(text if text else math.nan)
    return tuple(cells)
