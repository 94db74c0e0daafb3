"""``dpkern reproduce``: a table or figure of one of the sources, computed anew."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ._validate import integer, require
from .errors import InvalidInput
from .papers import PAPERS, Request, Result, reproduce
from .papers.result import NONE_PUBLISHED, Row
from .train.display import number
from .train.report import dumps

SHOWN = 60
"""Rows printed before the rest is left to the CSV."""

LISTED = "; ".join(
    f"{paper}: {', '.join(items)}" if "" not in items else paper for paper, items in PAPERS.items()
)


def command(
    paper: Annotated[str, typer.Argument(help=f"What to reproduce: {LISTED}.")],
    item: Annotated[str | None, typer.Argument(help="Table or figure of that paper.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A preset that ends within a minute on two cores.")
    ] = False,
    data: Annotated[
        str | None,
        typer.Option(
            help="Folder with the paper's data set; without it, generated or embedded data that "
            "are labelled so."
        ),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(help="Repetitions of every run.", show_default="by item")
    ] = None,
    out: Annotated[Path, typer.Option(help="Directory of the results.")] = Path("reproduced"),
    no_figure: Annotated[
        bool, typer.Option("--no-figure", help="Write no figure (needs no matplotlib).")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False,
) -> None:
    """Recompute a table or figure: published beside ours, claimed beside certified epsilon.

    Writes <paper>-<item>.json, .csv and .png. Published accuracies are shown for reference: their
    protocols leave too much open to be matched.
    """
    if seeds is not None:
        integer(1, 1000, seeds=seeds)
    if out.exists() and not out.is_dir():
        raise InvalidInput(
            "out", expected="a directory", got=f"{out}, a file", remedy="Choose another --out."
        )
    if not no_figure:
        require("matplotlib", extra="demo")
    result = reproduce(paper, item, Request(quick=quick, data=data, seeds=seeds))
    paths = result.write(out, figure=not no_figure)
    files = {kind: str(path) for kind, path in paths.items()}
    if json:
        print(dumps({**result.to_dict(), "files": files}), flush=True)
        return
    show(Console(), result)
    Console().print(Text(", ".join(files.values())), soft_wrap=True)


def show(console: Console, result: Result) -> None:
    """The rows as a table without its empty columns, then notes and data."""
    columns = {
        "published": [_cell(row.published) for row in result.rows],
        "ours": [_ours(row) for row in result.rows],
        "claimed": [_cell(row.epsilon_claimed) for row in result.rows],
        "certified": [_cell(row.epsilon_certified) for row in result.rows],
        "relation": [row.relation for row in result.rows],
    }
    if columns["ours"] == columns["certified"]:
        del columns["ours"]
    quantities = list(dict.fromkeys(row.quantity for row in result.rows))
    title = f"{result.paper} {result.item}".strip() + f": {result.title}"
    one = f" ({quantities[0]})" if len(quantities) == 1 else ""
    table = Table(title=title + one, title_justify="left")
    table.add_column("setting", overflow="fold", ratio=1)
    kept = {name: cells for name, cells in columns.items() if any(cells)}
    for name in kept:
        table.add_column(name, overflow="fold")
    for number_of, row in enumerate(result.rows[:SHOWN]):
        setting = row.setting if one else f"{row.setting}: {row.quantity}"
        cells = (setting, *(cells[number_of] for cells in kept.values()))
        table.add_row(*(Text(cell) for cell in cells))
    console.print(table)
    if len(result.rows) > SHOWN:
        console.print(Text(f"and {len(result.rows) - SHOWN} more rows in the CSV"))
    told = [*result.notes, *dict.fromkeys(row.note for row in result.rows if row.note)]
    if not any(columns["published"]):
        told.insert(0, NONE_PUBLISHED)
    for note in told:
        console.print(Text(f"- {note}"), soft_wrap=True)
    for name in dict.fromkeys(row.data for row in result.rows):
        console.print(Text(f"data: {name}"), soft_wrap=True)


def _cell(value: Any) -> str:
    return "" if value is None else number(float(value) if isinstance(value, int) else value)


def _ours(row: Row) -> str:
    return _cell(row.ours) + (f" +- {number(row.spread)}" if row.spread else "")
