"""``dpkern reproduce``: recompute a table or figure of one of the papers, or all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.text import Text

from ..base import devices
from ..base.errors import InvalidInput
from ..base.exit_codes import INTERRUPTED
from ..base.json import dumps
from ..base.outputs import write_atomically
from ..base.threads import torch_threads
from ..base.validate import integer, open_unit, positive_at, require
from . import PAPERS, ItemRequest, Result, ResultCache, everything, names, numbers, page, takes
from .catalogue import ALL, SIZED, data_of, has_items
from .data_roots import KINDS
from .everything import PlannedItem, Wanted
from .pieces import FOLDER
from .show import show, watching

LEAST, MOST = 1e-3, 1e3
LISTED = "; ".join(
    f"{paper}: {', '.join(items)}" if "" not in items else paper for paper, items in PAPERS.items()
)


def command(
    paper: Annotated[
        str,
        typer.Argument(help=f"Paper and its items, or {ALL} for every paper: {LISTED}."),
    ],
    item: Annotated[
        str | None, typer.Argument(help="Table or figure of that paper; `all` selects all of them.")
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="A preset that ends within a minute on two cores; all in ten."
        ),
    ] = False,
    data: Annotated[
        str | None,
        typer.Option(
            help="Folder (with spof a CSV file) of the paper's data set, or folders by data set: "
            f"{','.join(f'{kind}=FOLDER' for kind in KINDS)}. "
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
            help="Training rows, with spof of each user; of items that train on images too.",
            show_default="by item",
        ),
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(
            help="Epochs of every run (spof, gredp, adlm, directional, spectral, comparison).",
            show_default="by item",
        ),
    ] = None,
    lr: Annotated[
        float | None,
        typer.Option(
            help="Learning rate (spof, gredp, adlm, directional, spectral).",
            show_default="the source's, or ours",
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            help="Batch size (gredp, adlm, directional, spectral, comparison).",
            show_default="the source's",
        ),
    ] = None,
    epsilon: Annotated[
        str | None,
        typer.Option(
            help="Epsilon of every run, or with commas those of the axis (spof, gredp, adlm, "
            "directional, pnsgd, spectral, comparison, objective-release).",
            show_default="the source's",
        ),
    ] = None,
    max_grad_norm: Annotated[
        float | None,
        typer.Option(
            help="Clipping bound of every run (spof, gredp, adlm, directional, spectral).",
            show_default="the source's",
        ),
    ] = None,
    delta: Annotated[
        float | None,
        typer.Option(
            help="Delta of every run (gredp, adlm, directional, pnsgd, spectral, comparison, "
            "objective-release).",
            show_default="the source's",
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=NUMBER",
            help="Another number of the item's protocol, such as constant=1.25 of spof; a name "
            "that is none lists them.",
            show_default="the source's",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help=f"Device of the runs (spof, gredp, adlm, directional, spectral, comparison): "
            f"{devices.NAMES}.",
            show_default="cpu",
        ),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            help="Headings of the features, with commas (spof, with --data).",
            show_default="numeric columns in the file's order",
        ),
    ] = None,
    user_column: Annotated[
        str | None,
        typer.Option(
            help="Heading of the column that names the user of a row (spof, with --data).",
            show_default="rows are dealt, as in the source",
        ),
    ] = None,
    bounds: Annotated[
        str | None,
        typer.Option(
            help="Public largest values: a number, numbers with commas, or HEADING=NUMBER,... "
            "(spof, with --data).",
            show_default="maxima of the data, as in the source, and nothing certified",
        ),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(help="File of torchvision's resnet18 weights (gredp table7)."),
    ] = None,
    train_last: Annotated[
        int | None,
        typer.Option(
            help="Last convolutions that are trained, 1 or 2 (gredp table7).", show_default="both"
        ),
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

    Writes <paper>-<item>.json, .csv, .svg and .png, and with `all` a page <paper>.html. Published
    accuracies are shown for reference: their protocols leave too much open to be matched. Ctrl-C
    leaves finished settings for --resume.
    """
    sizes = {"seeds": seeds, "rows": rows, "epochs": epochs, "batch_size": batch_size}
    given: dict[str, float | None] = {"lr": lr, "max_grad_norm": max_grad_norm, "delta": delta}
    _check(**sizes, train_last=train_last, given=given, out=out)
    devices.training_device(device)
    if not no_figure:
        require("matplotlib")
    run = _Run(
        request=ItemRequest(
            quick=quick,
            data=data,
            seeds=seeds,
            rows=rows,
            epochs=epochs,
            lr=lr,
            batch_size=batch_size,
            max_grad_norm=max_grad_norm,
            epsilon=_epsilons(epsilon),
            delta=delta,
            device=device,
            columns=columns,
            user_column=user_column,
            bounds=bounds,
            weights=weights,
            train_last=train_last,
            numbers=numbers.read(set_),
            finished=ResultCache(folder=out / FOLDER, resume=resume),
        ),
        out=out,
        figure=not no_figure,
        json=json,
    )
    if paper == ALL and item is not None:
        raise InvalidInput("item", expected=f"none with {ALL}", got=item, remedy="Leave it out.")
    whole = paper == ALL or (item == ALL and has_items(paper))
    # Steps as small as those of quick runs wait for a second thread longer than it works.
    threads = 1 if quick else torch.get_num_threads()
    try:
        with torch_threads(threads):
            if whole:
                found = run.many(everything.wanted(paper))
            else:
                (name,) = names(paper, item)
                found = [run.one(PlannedItem.unplanned(paper, name, run.request))]
    except KeyboardInterrupt:
        run.say_how_to_continue()
        raise typer.Exit(INTERRUPTED) from None
    if json:
        print(dumps({"items": found} if whole else found[0]), flush=True)


def _epsilons(text: str | None) -> tuple[float, ...] | None:
    """Return numbers with commas, ascending.

    Raises:
        InvalidInput: no numbers, or none in the range of an epsilon.
    """
    if text is None:
        return None
    try:
        found = sorted({float(part) for part in text.split(",")})
    except ValueError:
        found = []
    if not found or not all(LEAST <= value <= MOST for value in found):
        raise InvalidInput(
            "epsilon",
            expected=f"numbers in [{LEAST:g}, {MOST:g}], with commas",
            got=text,
            remedy="Example: --epsilon 0.5,1,2",
        )
    return tuple(found)


def _check(
    *,
    given: Mapping[str, float | None],
    train_last: int | None,
    out: Path,
    **sizes: int | None,
) -> None:
    """Check sizes and the folder, before anything else.

    Raises:
        InvalidInput: a size out of its range, or a file where the folder should be.
    """
    most = {"seeds": 1000, "rows": 10**7, "epochs": 10**5, "batch_size": 10**7}
    for name, size in sizes.items():
        if size is not None:
            integer(1, most[name], **{name: size})
    for name, value in given.items():
        if value is not None:
            positive_at(name, value)
    if given["delta"] is not None:
        open_unit(delta=given["delta"])
    if train_last is not None:
        integer(1, 2, train_last=train_last)
    if out.exists() and not out.is_dir():
        raise InvalidInput(
            "out", expected="a directory", got=f"{out}, a file", remedy="Choose another --out."
        )


@dataclass(frozen=True, kw_only=True)
class _Run:
    """One call of the command: its request, and where results go."""

    request: ItemRequest
    out: Path
    figure: bool
    json: bool

    def one(self, item: PlannedItem, place: str = "") -> dict[str, Any]:
        """Compute, write and show an item; return its content with the files."""
        result = self.compute(item, place)
        content = self.write(result)
        if not self.json:
            show(Console(), result)
            Console().print(Text(", ".join(content["files"].values())), soft_wrap=True)
        return content

    def compute(self, item: PlannedItem, place: str = "") -> Result:
        """Compute an item beside a progress bar; ``place`` says which one of how many it is."""
        with watching(f"{place}{item.name}", Console(stderr=True)) as bar:
            return item.watched(bar).compute()

    def write(self, result: Result) -> dict[str, Any]:
        """Write a result's files and return its content with their paths."""
        paths = result.write(self.out, figure=self.figure)
        return {**result.to_dict(), "files": {kind: str(path) for kind, path in paths.items()}}

    def many(self, pairs: list[Wanted]) -> list[dict[str, Any]]:
        """Check all items, then compute each and write a page for each paper."""
        require("jinja2")
        unused = everything.check_data(pairs, self.request.data)
        numbers.check(pairs, self.request.numbers)
        items = everything.plan(pairs, self.request_for)
        contents: list[dict[str, Any]] = []
        for paper, own in everything.by_paper(items):
            results = []
            for item in own:
                place = f"{items.index(item) + 1} of {len(items)}, "
                results.append(self.compute(item, place))
                contents.append(self.write(results[-1]))
                if not self.json:
                    Console().print(Text(_line(results[-1])), soft_wrap=True)
            path = everything.page_path(self.out, paper)
            page.write(paper, results, path, quick=self.request.quick)
            if not self.json:
                Console().print(Text(str(path)), soft_wrap=True)
        summary = everything.summary(contents, quick=self.request.quick)
        text = dumps(summary, indent=1) + "\n"
        write_atomically(self.out / everything.SUMMARY, lambda file: file.write(text.encode()))
        if unused and not self.json:
            said = ", ".join(f"{paper} {item}".strip() for paper, item in unused)
            Console().print(Text(f"--data is not used by {said}"), soft_wrap=True)
        return contents

    def request_for(self, paper: str, item: str) -> ItemRequest:
        """Return the request for one item of many: with the sizes and the data that it takes."""
        sizes: dict[str, Any] = {
            name: getattr(self.request, name) if takes(paper, item, name) else None
            for name in SIZED
        }
        return replace(
            self.request,
            data=data_of(paper, item, self.request.data),
            numbers=numbers.of_item((paper, item), self.request.numbers),
            **sizes,
        )

    def say_how_to_continue(self) -> None:
        """Say where finished settings stand."""
        folder = self.out / FOLDER
        text = f"Interrupted. Settings that are finished stand in {folder}; add --resume."
        Console(stderr=True).print(Text(text), soft_wrap=True)
        if self.json:
            print(dumps({"interrupted": True, "finished": str(folder)}), flush=True)


def _line(result: Result) -> str:
    """Return an item of many in one line."""
    counts: dict[str, int] = {}
    for verdict in result.verdicts:
        counts[verdict.verdict] = counts.get(verdict.verdict, 0) + 1
    said = ", ".join(f"{count} {word}" for word, count in counts.items()) or "nothing is claimed"
    return f"{result.paper} {result.item}".strip() + f": {len(result.rows)} numbers; claims: {said}"
