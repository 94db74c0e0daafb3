"""``dpkern reproduce``: recompute a table or figure of one of the papers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table
from rich.text import Text

from ..base.errors import InvalidInput
from ..base.exit_codes import INTERRUPTED
from ..base.json import dumps
from ..base.validate import integer, positive, require
from ..privacy.accounting import shown_bound
from ..privacy.accounting.shown import shown_exactly
from ..train.display import number
from . import PAPERS, ItemRequest, Result, ResultCache, names, reproduce, takes
from .data_roots import KINDS
from .pieces import FOLDER
from .result import NONE_PUBLISHED, ComparisonRow

SHOWN = 60
"""Rows printed before the rest is left to the CSV."""

LISTED = "; ".join(
    f"{paper}: {', '.join(items)}" if "" not in items else paper for paper, items in PAPERS.items()
)


def command(
    paper: Annotated[str, typer.Argument(help=f"Paper and its items: {LISTED}.")],
    item: Annotated[
        str | None, typer.Argument(help="Table or figure of that paper; `all` selects all of them.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A preset that ends within a minute on two cores.")
    ] = False,
    data: Annotated[
        str | None,
        typer.Option(
            help="Folder (with spof a CSV file) of the paper's data set, or folders by data set: "
            f"{','.join(f'{kind}=FOLDER' for kind in KINDS)} (gredp, directional, adlm). "
            "The default is generated or embedded data, which are labelled so."
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option("--seeds", "--runs", help="Repetitions of every run.", show_default="by item"),
    ] = None,
    rows: Annotated[
        int | None,
        typer.Option(
            help="Training rows, with spof of each user; also gredp.", show_default="by item"
        ),
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(help="Epochs of every run (spof, gredp, adlm).", show_default="by item"),
    ] = None,
    lr: Annotated[
        float | None, typer.Option(help="Learning rate (gredp).", show_default="the source's")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Batch size (gredp).", show_default="the source's")
    ] = None,
    out: Annotated[Path, typer.Option(help="Directory of the results.")] = Path("reproduced"),
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Reuse the settings that were finished in --out before."),
    ] = False,
    no_figure: Annotated[
        bool, typer.Option("--no-figure", help="Write no figure (needs no matplotlib).")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False,
) -> None:
    """Recompute a table or figure: published beside ours, claimed beside certified epsilon.

    Writes <paper>-<item>.json, .csv and .png. Published accuracies are shown for reference: their
    protocols leave too much open to be matched. Ctrl-C leaves finished settings for --resume.
    """
    sizes = {
        "seeds": (seeds, 1000),
        "rows": (rows, 10**7),
        "epochs": (epochs, 10**5),
        "batch_size": (batch_size, 10**7),
    }
    for name, (given, most) in sizes.items():
        if given is not None:
            integer(1, most, **{name: given})
    if lr is not None:
        positive(lr=lr)
    if out.exists() and not out.is_dir():
        raise InvalidInput(
            "out", expected="a directory", got=f"{out}, a file", remedy="Choose another --out."
        )
    if not no_figure:
        require("matplotlib")
    sized: dict[str, Any] = {"rows": rows, "epochs": epochs, "lr": lr, "batch_size": batch_size}
    wanted = names(paper, item)
    finished = ResultCache(folder=out / FOLDER, resume=resume)
    results = []
    for name in wanted:
        try:
            with _watching(f"{paper} {name}".strip(), Console(stderr=True)) as bar:
                # Of all items, those take a size that have one.
                chosen = {
                    option: value
                    for option, value in sized.items()
                    if len(wanted) == 1 or takes(paper, name, option)
                }
                request = ItemRequest(
                    quick=quick,
                    data=data,
                    seeds=seeds,
                    **chosen,
                    finished=finished,
                    watch=bar,
                )
                result = reproduce(paper, name, request)
        except KeyboardInterrupt:
            _say_how_to_continue(out, json)
            raise typer.Exit(INTERRUPTED) from None
        paths = result.write(out, figure=not no_figure)
        files = {kind: str(path) for kind, path in paths.items()}
        results.append({**result.to_dict(), "files": files})
        if not json:
            show(Console(), result)
            Console().print(Text(", ".join(files.values())), soft_wrap=True)
    if json:
        print(dumps({"items": results} if len(wanted) > 1 else results[0]), flush=True)


class Bar:
    """A progress bar of an item; nothing is shown for one that is done at once."""

    def __init__(self, item: str, progress: Progress) -> None:
        self._item, self._progress = item, progress
        self._task: Any = None

    def piece(self, label: str, number: int, count: int) -> None:
        """Show the setting that is computed now."""
        text = f"{self._item}, {label} ({number} of {count})"
        if self._task is None:
            self._task = self._progress.add_task("", total=1.0, state=text)
            self._progress.start()
        self._progress.update(self._task, state=text)

    def progress(self, share: float) -> None:
        """Show how much of the item is done."""
        if self._task is not None:
            self._progress.update(self._task, completed=share)


@contextmanager
def _watching(item: str, console: Console) -> Iterator[Bar]:
    columns = (
        BarColumn(bar_width=20),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[state]}", table_column=Column(overflow="fold", no_wrap=False)),
    )
    # Without a terminal a bar would only be lines in a log.
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    try:
        yield Bar(item, progress)
    finally:
        progress.stop()


def _say_how_to_continue(out: Path, as_json: bool) -> None:
    text = f"Interrupted. Settings that are finished stand in {out / FOLDER}; add --resume."
    Console(stderr=True).print(Text(text), soft_wrap=True)
    if as_json:
        print(dumps({"interrupted": True, "finished": str(out / FOLDER)}), flush=True)


def show(console: Console, result: Result) -> None:
    """Print the rows as a table without its empty columns, then notes and data."""
    columns = {
        "published": [_published(row.published) for row in result.rows],
        "ours": [_ours(row) for row in result.rows],
        "claimed": [_bound(row.epsilon_claimed) for row in result.rows],
        "certified": [_bound(row.epsilon_certified) for row in result.rows],
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
    for verdict in result.verdicts:
        console.print(Text(verdict.sentence), soft_wrap=True)
    told = [*result.notes, *dict.fromkeys(row.note for row in result.rows if row.note)]
    if not any(columns["published"]):
        told.insert(0, NONE_PUBLISHED)
    for note in told:
        console.print(Text(f"- {note}"), soft_wrap=True)
    for name in dict.fromkeys(row.data for row in result.rows):
        console.print(Text(f"data: {name}"), soft_wrap=True)


def _cell(value: Any) -> str:
    return "" if value is None else number(float(value) if isinstance(value, int) else value)


def _bound(value: float | None) -> str:
    return "" if value is None else shown_bound(value)


def _published(value: float | str | None) -> str:
    """Return the paper's number with all its digits."""
    return shown_exactly(value) if isinstance(value, (int, float)) else value or ""


def _ours(row: ComparisonRow) -> str:
    if "epsilon" in row.quantity and isinstance(row.ours, (int, float)):
        return _bound(row.ours)
    return _cell(row.ours) + (f" +- {number(row.spread)}" if row.spread else "")
