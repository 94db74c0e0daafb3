"""Render a report in the requested format, and write its figures as files."""

from __future__ import annotations

import re
from pathlib import Path

from rich.console import Console

from ..base.outputs import write_atomically
from ..base.report import Report
from . import figures
from .bars import palette
from .page import page
from .text import as_csv, as_json, as_text, as_tidy_csv

FORMATS = ("text", "json", "csv", "html")

WIDTH = 100
"""Columns of a text file."""


def render(report: Report, kind: str) -> str:
    """Return the report as ``text``, ``json``, ``csv`` or ``html``, with a line end.

    Raises:
        MissingDependency: html without matplotlib.
    """
    if kind == "text":
        # A page, not a terminal: no colours.
        console = Console(width=WIDTH, color_system=None, force_terminal=False)
        with console.capture() as captured:
            as_text(report, console)
        return captured.get()
    text = {"json": as_json, "csv": as_csv, "html": page}[kind](report)
    return text if text.endswith("\n") else text + "\n"


def write(report: Report, kind: str, path: Path) -> None:
    """Write the report to a file, whole or not at all.

    Raises:
        InvalidInput: the file cannot be written.
        MissingDependency: html without matplotlib.
    """
    content = render(report, kind).encode()
    write_atomically(path, lambda file: file.write(content))


def write_tables(report: Report, folder: Path) -> list[Path]:
    """Write ``<report>-<table>.csv`` of every table: headings, then rows of plain numbers.

    Raises:
        InvalidInput: the folder cannot be written.
    """
    written: list[Path] = []
    for table in report.tables:
        words = re.findall(r"[a-z0-9]+", table.title.lower())
        path = folder / f"{report.name}-{'-'.join(words)}.csv"
        content = as_tidy_csv(table).encode()
        write_atomically(path, lambda file, content=content: file.write(content))  # type: ignore[misc]
        written.append(path)
    return written


def write_figures(report: Report, folder: Path) -> list[Path]:
    """Write ``<report>-<figure>.svg`` and ``.png`` of every figure, each whole or not at all.

    Raises:
        InvalidInput: the folder cannot be written.
        MissingDependency: without matplotlib.
    """
    written: list[Path] = []
    colours = palette(report.figures)
    for figure in report.figures:
        stem = f"{report.name}-{figure.name}"
        written += figures.write(figure, folder, stem, colours).values()
    return written
