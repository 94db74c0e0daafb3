"""The contents of a report, before it is rendered: facts, tables, figures, notes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ReportTable:
    """A table; cells are text, numbers or None.

    Attributes:
        title: in words.
        columns: headings, units included.
        rows: one sequence per row, as long as ``columns``.
        note: what a reader must know.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | int | float | None]]
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Series:
    """A series of numbers: a curve, a colour of stacked bars, or points.

    Attributes:
        label: the name.
        x: places on the axis; for bars, categories.
        y: values; None leaves a gap.
        points: markers without a line.
    """

    label: str
    x: Sequence[float | str]
    y: Sequence[float | None]
    points: bool = False


@dataclass(frozen=True, kw_only=True)
class Mark:
    """An annotated place of a figure, such as a crossover point."""

    x: float | str
    y: float
    text: str


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure.

    Attributes:
        name: stem of its file.
        title: in words.
        caption: what to see in it, in a sentence.
        kind: ``stacked`` (one bar per category, one colour per series), ``bars`` (series side by
            side), ``lines``, or ``roofline`` (``lines`` are the limits, points the ops).
        x_label, y_label: with units.
        series: the numbers.
        marks: annotated places.
        log_x, log_y: logarithmic axes.
        probit: both axes are probabilities, on the scale of the normal quantile.
        boxes: of ``lines``: left, bottom, right, top of areas such as confidence intervals.
        horizontal: bars that lie, for long names.
    """

    name: str
    title: str
    caption: str
    kind: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    marks: Sequence[Mark] = ()
    log_x: bool = False
    log_y: bool = False
    probit: bool = False
    boxes: Sequence[tuple[float, float, float, float]] = ()
    horizontal: bool = False


@dataclass(frozen=True, kw_only=True)
class Report:
    """A report.

    Attributes:
        name: stem of its files.
        title: in words.
        summary: the answer, in one to three sentences.
        facts: everything as JSON values; what ``--format json`` prints.
        tables, figures: in reading order.
        notes: what the numbers do not say.
        kind: what the report is of, in a word.
    """

    name: str
    title: str
    summary: str
    facts: Mapping[str, Any]
    tables: Sequence[ReportTable] = ()
    figures: Sequence[Figure] = ()
    notes: Sequence[str] = field(default=())
    kind: str = "cost"


__all__ = ["Figure", "Mark", "Report", "ReportTable", "Series"]
