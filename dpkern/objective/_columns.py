"""Read a CSV file as columns of text, and choose the numeric ones among them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..base import csv_reader as _csv
from ..base.csv_reader import number
from ..base.errors import InvalidInput

IDENTIFIERS = ("id", "user", "user_id", "userid")
"""Headings, in lower case, that identify a person: never a feature unless asked for by name."""


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
        """Return ``name``, if there is such a column."""
        if name not in self.cells:
            raise InvalidInput(
                option,
                expected=f"columns of {self.path}: {', '.join(self.cells)}",
                got=name,
                remedy="Name columns as in the first line of the file.",
            )
        return name

    def numbers(self, name: str) -> list[float]:
        """Return the column as numbers, NaN where a cell is blank.

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
        """Return why the column is not numeric, without quoting it; empty if it is numeric."""
        values = [number(cell) for cell in self.cells[name]]
        if None in values:
            return "holds text"
        return "" if any(not math.isnan(v) for v in values if v is not None) else "is blank"


def read(path: Path) -> Columns:
    """Read the file's columns, called column1, column2, ... where it has no heading.

    Raises:
        InvalidInput: no such file, unreadable, empty, ragged, or a heading twice.
    """
    heading, rows = _csv.read(path)
    names = heading or [f"column{i + 1}" for i in range(len(rows[0].cells))]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidInput(
            "data",
            expected="every heading once",
            got=f"{', '.join(map(repr, twice))} twice in {path}",
            remedy="Rename the repeated columns.",
        )
    cells = {name: [row.cells[i] for row in rows] for i, name in enumerate(names)}
    return Columns(path, cells, [row.line for row in rows])


def choose(
    table: Columns, *, features: int, columns: Sequence[str] | None, user_column: str | None
) -> tuple[tuple[str, ...], list[str]]:
    """Choose at most ``features`` headings, and say in words what was chosen and left out.

    Args:
        table: the file.
        features: largest number of headings.
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
            remedy="Name other columns; an autoencoder has nothing to compress in fewer than two.",
        )
    chosen, rest = tuple(numeric[:features]), numeric[features:]
    notes += [f"column {name} left out: {features} features were wanted" for name in rest]
    return chosen, [f"features in the file's order: {', '.join(chosen)}", *notes]
