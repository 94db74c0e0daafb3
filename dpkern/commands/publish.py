"""Write a report to the requested place, and parse what reports are asked of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from ..base.errors import InvalidInput
from ..base.report import Report
from ..base.validate import choice, require
from ..reports import files
from ..reports.text import as_text

Format = Annotated[str, typer.Option("--format", help=f"One of {', '.join(files.FORMATS)}.")]
Out = Annotated[
    Path | None,
    typer.Option(
        help="File of the report.", show_default="standard output; html: <report>.html here"
    ),
]
Figures = Annotated[
    Path | None, typer.Option(help="Write every figure as SVG and PNG to this folder too.")
]
Tables = Annotated[
    Path | None,
    typer.Option(help="Write every table as a CSV file of its own to this folder too."),
]


def publish(
    make: Callable[[], Report],
    kind: str,
    out: Path | None,
    folder: Path | None,
    tables: Path | None = None,
) -> None:
    """Make the report and write it to the requested place.

    What would stop it at the end is asked before the work: the format, a missing package, a folder
    in the place of a file.

    Raises:
        InvalidInput: an unknown format, or a place that cannot be written.
        MissingDependency: html or figures without matplotlib.
    """
    choice(files.FORMATS, format=kind)
    if kind == "html" or folder is not None:
        require("matplotlib")
    refuse_places(out=out, figures=folder)
    refuse_places(figures=tables)
    report = make()
    if out is None and kind == "html":
        out = Path(f"{report.name}.html")
    written = [] if folder is None else files.write_figures(report, folder)
    if tables is not None:
        written += files.write_tables(report, tables)
    if out is not None:
        files.write(report, kind, out)
        written.insert(0, out)
    elif kind == "text":
        as_text(report, Console())
    else:
        print(files.render(report, kind), end="", flush=True)
    if written:
        names = ", ".join(str(path) for path in written)
        Console(stderr=True).print(Text(f"Wrote {names}"), soft_wrap=True)


def refuse_places(*, figures: Path | None, **file: Path | None) -> None:
    """Refuse places that cannot be written, before the work.

    Args:
        figures: a folder, which need not exist.
        file: the report's file, by the name of its option.

    Raises:
        InvalidInput: a directory in the place of a file, or a file in the place of a folder.
    """
    for name, path in file.items():
        if path is not None and path.is_dir():
            raise InvalidInput(
                name,
                expected="a file",
                got=f"{path}, a directory",
                remedy="Name a file in that directory.",
            )
    if figures is not None and figures.exists() and not figures.is_dir():
        raise InvalidInput(
            "figures",
            expected="a directory",
            got=f"{figures}, a file",
            remedy="Name a folder, or a path that does not exist yet.",
        )


def spanned(name: str, text: str) -> list[int]:
    """Parse ``32,64`` as numbers, and ``32..4096`` as the doublings from one to the other.

    Raises:
        InvalidInput: anything else, or a last number below the first.
    """
    first, dots, last = text.partition("..")
    if not dots:
        return numbers(name, text)
    ends = [*numbers(name, first), *numbers(name, last)]
    if len(ends) != 2 or not 1 <= ends[0] <= ends[1]:
        raise InvalidInput(
            name,
            expected="FIRST..LAST with 1 <= FIRST <= LAST",
            got=text,
            remedy="Pass, for example, 32..4096.",
        )
    found = [ends[0]]
    while 2 * found[-1] <= ends[1]:
        found.append(2 * found[-1])
    return found


def listed(text: str) -> list[str]:
    """Parse ``a,b`` as names."""
    return [part.strip() for part in text.split(",") if part.strip()]


def numbers(name: str, text: str) -> list[int]:
    """Parse ``8,14`` as numbers.

    Raises:
        InvalidInput: anything else.
    """
    parts = listed(text)
    if not parts or not all(part.isdecimal() for part in parts):
        raise InvalidInput(
            name,
            expected="whole numbers with commas, such as 8,14,32",
            got=text,
            remedy="Pass numbers with commas, for example 8,14,32.",
        )
    return [int(part) for part in parts]
