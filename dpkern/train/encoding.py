"""Turn tables into features and labels by what is declared in public, never by statistics.

A range file (TOML) says of each column what is known of it without looking at the data::

    age = [17, 90]
    income = [0, 200000]
    job = ["farmer", "clerk", "none"]

A number v of a range [low, high] becomes 2 (v - low) / (high - low) - 1, cut off at -1 and 1; a
blank becomes 0, the middle. A category becomes a 1 in its own feature and 0 in the others of its
column, a blank or another text becomes zeros. For the label the list of categories numbers the
classes. Without a range file numbers are divided by the feature scale and nothing else is done.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..base import validate
from ..base.csv_reader import HEADERS
from ..base.errors import InvalidInput
from .table import Cell, Table

Array = npt.NDArray[Any]
Categories = tuple[str, ...]

MAX_CATEGORIES = 1024
PRIVATE_RANGE = "private range"

CLASSES_FROM_DATA = (
    "the names of the classes were read from the labels, and count as public; declare them in "
    "the --ranges file"
)


class ColumnRange(NamedTuple):
    """The public bounds of a column's numbers."""

    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """The user's statements about a table.

    Attributes:
        label: heading or number (from 1) of the label's column. None takes the one headed
            ``label``, else the last one.
        drop: headings or numbers of columns that are left out.
        header: whether the first line of a CSV file is a heading: ``yes``, ``no`` or ``auto``.
        ranges: TOML file with public ranges and categories, by column.
        private_ranges: epsilon for private ranges of the columns that ``ranges`` leaves out; what
            is paid is not decided here.
    """

    label: str | None = None
    drop: tuple[str, ...] = ()
    header: str = "auto"
    ranges: str | None = None
    private_ranges: float | None = None

    def __post_init__(self) -> None:
        validate.choice(HEADERS, header=self.header)

    @property
    def given(self) -> list[str]:
        """The options that differ from their defaults."""
        return [name for name, value in vars(self).items() if value != getattr(type(self), name)]


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """The way in which the columns of one or two files become features and labels.

    Attributes:
        label: name of the label's column.
        classes: names of the classes, in the order of their numbers; empty where labels are
            numbers already.
        features: range or categories of each feature column by name; None divides its numbers by
            the feature scale.
        private: names of the columns that will have a private range; their numbers are kept as
            they are, a blank as NaN, until ``private_ranges.scaled``.
        dropped: names of the columns that are left out.
        warnings: what was taken from the data and counts as public.
    """

    label: str
    classes: Categories
    features: Mapping[str, ColumnRange | Categories | None]
    private: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    warnings: tuple[str, ...] = field(default=())

    @classmethod
    def of(cls, tables: Sequence[Table], options: TableOptions) -> Encoding:
        """Decide the roles of the columns.

        Raises:
            InvalidInput: files of different columns, a column that no option explains, or a range
                file that does not fit.
        """
        table = tables[0]
        for other in tables[1:]:
            if other.names != table.names:
                raise InvalidInput(
                    "data",
                    expected=f"the columns of {table.path.name}: {', '.join(table.names)}",
                    got=f"{', '.join(other.names)} in {other.path.name}",
                    remedy="Give training and test rows the same columns, in the same order.",
                )
        label, dropped = _roles(table, options)
        declared = _declared(options.ranges)
        rest = [name for i, name in enumerate(table.names) if i not in {label, *dropped}]
        if not rest:
            raise InvalidInput(
                "data",
                expected="at least one feature column and a label column",
                got=f"{table.path} with {', '.join(table.names)}",
                remedy="Put a delimiter between columns: a comma, semicolon or tab.",
            )
        if len(set(rest)) < len(rest):
            raise InvalidInput(
                "data",
                expected="headings that differ",
                got=f"{', '.join(table.names)} in {table.path}",
                remedy="Rename the columns that share a heading.",
            )
        name = table.names[label]
        private = tuple(column for column in rest if column not in declared)
        if options.private_ranges is None:
            private = ()
        elif not private:
            raise InvalidInput(
                "private_ranges",
                expected="a feature column without a public range or categories",
                got=f"lines for all of them in {options.ranges}",
                remedy="Leave --private-ranges out, or remove lines from that file.",
            )
        _check_declared(declared, rest, name, [table.names[i] for i in dropped], private)
        known: ColumnRange | Categories | None = declared.get(name)
        if isinstance(known, ColumnRange):
            raise InvalidInput(
                "ranges",
                expected=f"a list of the classes for the label, {name!r}",
                got=f"{list(known)}",
                remedy=f'Write {name} = ["first class", "second class"], or leave it out.',
            )
        classes, warnings = _classes([t.columns[label] for t in tables], known)
        if len(classes) == 1:
            raise InvalidInput(
                "label",
                expected="at least two classes",
                got=f"only {classes[0]!r} in column {name!r}",
                remedy="Name the label's column with --label.",
            )
        return cls(
            label=name,
            classes=classes,
            features={column: declared.get(column) for column in rest},
            private=private,
            dropped=tuple(table.names[i] for i in dropped),
            warnings=warnings,
        )

    def public_facts(self) -> dict[str, Any]:
        """Return the encoding as JSON values."""
        return {
            "label": self.label,
            "classes": list(self.classes),
            "features": {
                name: PRIVATE_RANGE if name in self.private else known and list(known)
                for name, known in self.features.items()
            },
            "dropped": list(self.dropped),
        }

    def in_words(self) -> str:
        """Return the roles of the columns as one sentence."""
        kinds: dict[str, int] = {}
        for name, known in self.features.items():
            kind = "with a public range" if isinstance(known, ColumnRange) else "with categories"
            kind = "as they stand in the file" if known is None else kind
            kind = f"with a {PRIVATE_RANGE}" if name in self.private else kind
            kinds[kind] = kinds.get(kind, 0) + 1
        counted = [f"{count} {kind}" for kind, count in kinds.items()]
        names = [*self.features, self.label, *self.dropped]
        unnamed = all(re.fullmatch(r"column \d+", name) for name in names)
        text = "no heading (--header yes: line 1 is one); " if unnamed else ""
        text += f"label {self.label}"
        if self.classes:
            text += f" ({', '.join(self.classes)})"
        text += f"; features: {', '.join(counted)}"
        return text + (f"; left out: {', '.join(self.dropped)}" if self.dropped else "")

    def apply(self, table: Table, scale: float) -> tuple[Array, Array]:
        """Return features ``[rows, F]`` and labels ``[rows]``, both float64.

        Args:
            scale: number that features are divided by, those without a range.

        Raises:
            InvalidInput: a cell that does not fit its column.
        """
        columns = dict(zip(table.names, table.columns, strict=True))
        parts = []
        for name, known in self.features.items():
            cells = columns[name]
            if name in self.private:
                parts.append(_numbers(table, name, cells, blanks=True)[:, None])
            elif known is None:
                parts.append(_numbers(table, name, cells)[:, None] / scale)
            elif isinstance(known, ColumnRange):
                parts.append(_scaled(table, name, cells, known)[:, None])
            else:
                parts.append(_indicators(cells, known))
        return np.concatenate(parts, axis=1), self._labels(table, columns[self.label])

    @property
    def private_places(self) -> list[int]:
        """The features that are columns with a private range."""
        places, place = [], 0
        for name, known in self.features.items():
            if name in self.private:
                places.append(place)
            place += 1 if known is None or isinstance(known, ColumnRange) else len(known)
        return places

    def _labels(self, table: Table, cells: Sequence[Cell]) -> Array:
        if not self.classes:
            return _numbers(table, self.label, cells)
        numbers = {text: place for place, text in enumerate(self.classes)}
        found = []
        for line, cell in zip(table.lines, cells, strict=True):
            if _text(cell) not in numbers:
                raise InvalidInput(
                    "data",
                    expected=f"one of {', '.join(self.classes)} as the label {self.label!r}",
                    got=f"{_text(cell)!r} in {table.path} line {line}",
                    remedy="Repair that line, or declare the class in the --ranges file.",
                )
            found.append(numbers[_text(cell)])
        return np.array(found, dtype=np.float64)


def _roles(table: Table, options: TableOptions) -> tuple[int, list[int]]:
    """Return the places of the label and of the columns that are left out."""
    dropped = [table.place("drop", column) for column in options.drop]
    headed = [i for i, name in enumerate(table.names) if name == "label"]
    if options.label is not None:
        label = table.place("label", options.label)
    elif len(headed) > 1:
        raise InvalidInput(
            "data",
            expected="one column headed label",
            got=f"{len(headed)} of them in {table.path}",
            remedy="Rename the other columns headed label, or pass --label with a number.",
        )
    else:
        label = headed[0] if headed else len(table.names) - 1
    if label in dropped:
        raise InvalidInput(
            "drop",
            expected="columns other than the label",
            got=table.names[label],
            remedy="Name the label with --label.",
        )
    return label, dropped


def _declared(ranges: str | None) -> dict[str, ColumnRange | Categories]:
    """Return what the range file says, by column."""
    if ranges is None:
        return {}
    path = Path(ranges)
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidInput(
            "ranges",
            expected="a TOML file with a line for each column",
            got=f"{path}: {error}",
            remedy='Write lines such as: "blood pressure" = [40, 250]',
        ) from error
    return {name: _declaration(path, name, value) for name, value in content.items()}


def _declaration(path: Path, name: str, value: Any) -> ColumnRange | Categories:
    if isinstance(value, list) and value and all(isinstance(v, str) for v in value):
        if len(set(value)) == len(value) <= MAX_CATEGORIES:
            return tuple(value)
    elif isinstance(value, list) and len(value) == 2:
        numbers = [v for v in value if isinstance(v, int | float) and not isinstance(v, bool)]
        if len(numbers) == 2 and math.isfinite(sum(numbers)) and numbers[0] < numbers[1]:
            return ColumnRange(float(numbers[0]), float(numbers[1]))
    raise InvalidInput(
        "ranges",
        expected=f"[low, high] with low < high, or at most {MAX_CATEGORIES} different texts",
        got=f"{name} = {value!r} in {path}",
        remedy='Write lines such as: age = [0, 120], or job = ["farmer", "clerk"].',
    )


def _check_declared(
    declared: Mapping[str, Any],
    features: Sequence[str],
    label: str,
    dropped: Sequence[str],
    private: Sequence[str],
) -> None:
    """Refuse a range file that leaves out a feature, or that speaks of another table."""
    if not declared:
        return
    unknown = [name for name in declared if name not in {*features, label, *dropped}]
    missing = [name for name in features if name not in declared and name not in private]
    if unknown or missing:
        raise InvalidInput(
            "ranges",
            expected=f"lines for feature columns: {', '.join(features)}"
            if private
            else f"a line for each feature column: {', '.join(features)}",
            got="; ".join(
                text
                for text in (
                    f"none for {', '.join(missing)}" if missing else "",
                    f"lines for {', '.join(unknown)}, which the data have not" if unknown else "",
                )
                if text
            ),
            remedy="Add the missing lines, leave columns out with --drop, or estimate them with "
            "--private-ranges."
            if missing
            else "Correct or remove these lines.",
        )


def _classes(
    labels: Sequence[Sequence[Cell]], declared: Categories | None
) -> tuple[Categories, tuple[str, ...]]:
    """Return the names of the classes, and a warning if the data were asked for them."""
    if declared is not None:
        return declared, ()
    if not any(isinstance(cell, str) for cells in labels for cell in cells):
        return (), ()
    names = {_text(cell) for cells in labels for cell in cells} - {""}  # a blank is no class
    return tuple(sorted(names)), (CLASSES_FROM_DATA,)


MISSING = frozenset({"na", "n/a", "#n/a", "nan", "null", "none", "?"})
"""The texts that stand for a missing number, in small letters."""


def _is_missing(cell: Cell) -> bool:
    if isinstance(cell, str):
        return cell.strip().lower() in MISSING
    return math.isnan(cell)


def _numbers(table: Table, name: str, cells: Sequence[Cell], *, blanks: bool = False) -> Array:
    """Return the numbers of a column of which nothing is declared; NaN for allowed blanks."""
    values = []
    for line, cell in zip(table.lines, cells, strict=True):
        missing = _is_missing(cell)
        if isinstance(cell, str) and not missing:
            raise InvalidInput(
                "data",
                expected=f"numbers in column {name!r}",
                got=f"{cell!r} in {table.path} line {line}",
                remedy=f"Declare its categories in a --ranges file ({name} = [...]), or leave it "
                f"out: --drop {name!r}. Write decimal points, not commas.",
            )
        values.append(math.nan if missing else cell)
        if missing and not blanks:
            raise InvalidInput(
                "data",
                expected=f"a number in every row of column {name!r}",
                got=f"a blank or NA in {table.path} line {line}",
                remedy=f"Declare its range in a --ranges file ({name} = [low, high]): a blank is "
                "then its middle. Or pass --private-ranges, or leave it out with --drop.",
            )
    return np.array(values, dtype=np.float64)


def _scaled(table: Table, name: str, cells: Sequence[Cell], known: ColumnRange) -> Array:
    low, high = known
    values = []
    for line, cell in zip(table.lines, cells, strict=True):
        missing = _is_missing(cell)
        if isinstance(cell, str) and not missing:
            raise InvalidInput(
                "data",
                expected=f"numbers in column {name!r}, as its range says",
                got=f"{cell!r} in {table.path} line {line}",
                remedy="Write decimal points, not commas; leave missing numbers blank or write NA; "
                f"or declare categories: {name} = [...].",
            )
        values.append((low + high) / 2 if missing else cell)
    clipped = np.clip(np.array(values, dtype=np.float64), low, high)
    scaled: Array = 2 * (clipped - low) / (high - low) - 1
    return scaled


def _indicators(cells: Sequence[Cell], known: Categories) -> Array:
    return np.array([[float(_text(cell) == text) for text in known] for cell in cells])


def _text(cell: Cell) -> str:
    """Return a cell as the text of a category: whole numbers without a decimal point."""
    if isinstance(cell, str):
        return cell
    return "" if math.isnan(cell) else f"{cell:.15g}"
