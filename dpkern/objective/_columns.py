"""A CSV file as columns of text, and the choice of the numeric ones among them."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import InvalidInput

IDENTIFIERS = ("id", "user", "user_id", "userid")
"""Headings, in lower case, of what names a person: never a feature unless asked for by name."""


@dataclass(frozen=True)
class Columns:
    """The cells of a file by heading; ``lines[i]`` is the line that row i stands on."""

    path: Path
    cells: dict[str, list[str]]
    lines: list[int]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.cells)

    def known(self, option: str, name: str) -> str:
        """``name``, if there is such a column."""
        if name not in self.cells:
            raise InvalidInput(
                option,
                expected=f"columns of {self.path}: {', '.join(self.cells)}",
                got=name,
                remedy="Name columns as in the first line of the file.",
            )
        return name

    def numbers(self, name: str) -> list[float]:
        """The column as numbers, NaN where a cell is blank.

        Raises:
            InvalidInput: a cell that is no number.
        """
        found = [number(cell) for cell in self.cells[name]]
        for line, cell, value in zip(self.lines, self.cells[name], found, strict=True):
            if value is None:
                raise InvalidInput(
                    "data",
                    expected=f"numbers in column {name}",
                    got=f"{cell!r} in {self.path} line {line}",
                    remedy="Choose other columns, or encode this one as numbers.",
                )
        return [value for value in found if value is not None]

    def refusal(self, name: str) -> str:
        """Why the column is not numeric; empty if it is."""
        values = [(cell, number(cell)) for cell in self.cells[name]]
        text = next((cell for cell, value in values if value is None), None)
        if text is not None:
            return f"holds {text!r}"
        return "" if any(not math.isnan(v) for _, v in values if v is not None) else "is blank"


def number(cell: str) -> float | None:
    """The cell's number; NaN if it is blank, None if it is text."""
    if not cell:
        return math.nan
    try:
        return float(cell)
    except ValueError:
        return None


def read(path: Path) -> Columns:
    """The file's columns. A first line without any number is the header; else the columns are
    called column1, column2, ...

    Raises:
        InvalidInput: no such file, unreadable, empty, ragged, or a heading twice.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            rows = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidInput(
            "data",
            expected="a readable CSV file",
            got=f"{path}: {error}",
            remedy="Check the path, its permissions and its contents.",
        ) from error
    header = rows.pop(0)[1] if rows and _is_header(rows[0][1]) else []
    if not rows:
        raise InvalidInput(
            "data",
            expected="at least one row of numbers",
            got=f"{path}: none",
            remedy="Add records.",
        )
    names = header or [f"column{i + 1}" for i in range(len(rows[0][1]))]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidInput(
            "data",
            expected="every heading once",
            got=f"{', '.join(map(repr, twice))} twice in {path}",
            remedy="Rename columns.",
        )
    for line, row in rows:
        if len(row) != len(names):
            raise InvalidInput(
                "data",
                expected=f"{len(names)} columns in every line",
                got=f"{len(row)} in {path} line {line}",
                remedy="Repair that line.",
            )
    cells = {name: [row[i] for _, row in rows] for i, name in enumerate(names)}
    return Columns(path, cells, [line for line, _ in rows])


def _is_header(row: Sequence[str]) -> bool:
    return not any(cell and number(cell) is not None for cell in row)


def choose(
    table: Columns, *, features: int, columns: Sequence[str] | None, user_column: str | None
) -> tuple[tuple[str, ...], list[str]]:
    """At most ``features`` headings, and what was chosen and left out in words.

    Args:
        table: the file.
        features: how many are wanted.
        columns: their headings; None takes the numeric ones in the file's order, without the
            user's and without identifiers.
        user_column: never a feature.

    Raises:
        InvalidInput: an unknown heading, more named than wanted, or fewer than two numeric ones.
    """
    if columns is not None:
        named = tuple(table.known("columns", name) for name in columns)
        if len(set(named)) != len(named) or not 2 <= len(named) <= features or user_column in named:
            raise InvalidInput(
                "columns",
                expected=f"2 to {features} different headings, not the user column",
                got=", ".join(named) or "none",
                remedy="Name each feature once, or pass more features.",
            )
        return named, [f"features as named: {', '.join(named)}"]
    notes, numeric = [], []
    for name in table.names:
        reason = table.refusal(name)
        if name == user_column:
            continue
        if name.lower() in IDENTIFIERS:
            reason = "names a person"
        if reason:
            notes.append(f"column {name} left out: it {reason}")
        else:
            numeric.append(name)
    if len(numeric) < 2:
        raise InvalidInput(
            "data",
            expected="at least two numeric columns",
            got=f"{len(numeric)} in {table.path} ({', '.join(table.names)})",
            remedy="An autoencoder has nothing to compress in fewer; name other columns.",
        )
    chosen, rest = tuple(numeric[:features]), numeric[features:]
    notes += [f"column {name} left out: {features} features were wanted" for name in rest]
    return chosen, [f"features in the file's order: {', '.join(chosen)}", *notes]
