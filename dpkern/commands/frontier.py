"""``dpkern cost frontier``: accuracy against cost at equal certified epsilon."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..base.errors import InvalidInput
from ..base.report import Report
from ..cost.frontier import needed_runs, statements
from ..engine.demo.models import ALL_MODELS
from ..engine.named import NAMES
from ..privacy.accounting import shown_bound
from ..train import run_file
from ..train.options import OPTIMIZERS
from . import frontier_report
from .publish import Figures, Format, Out, Tables, listed, publish
from .train import option_types

EPSILONS = "3"
MECHANISMS = "dpsgd,directional,pruned"


def frontier(
    mechanisms: Annotated[
        str,
        typer.Option(
            help="At least two, with commas: NAME, or NAME:KEY=VALUE:... with lr, max_grad_norm, "
            f"clipping, arithmetic or a field of the mechanism. Names: {', '.join(NAMES)}."
        ),
    ] = MECHANISMS,
    epsilon: Annotated[
        str, typer.Option(help="Certified epsilons, several with commas.")
    ] = EPSILONS,
    seeds: Annotated[
        int | None,
        typer.Option(
            help="Runs of each mechanism at each epsilon.",
            show_default="the fewest that the intervals need",
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="As for dpkern train. Use public data.", show_default="digits"),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(ALL_MODELS)}.", show_default="mlp")
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Epochs of a run.", show_default="as dpkern train")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Expected batch size.", show_default="as dpkern train")
    ] = None,
    lr: Annotated[
        float | None,
        typer.Option(help="Learning rate of all mechanisms.", show_default="as dpkern train"),
    ] = None,
    max_grad_norm: Annotated[
        float | None,
        typer.Option(help="Clipping bound of all mechanisms.", show_default="as dpkern train"),
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(help=f"One of {', '.join(OPTIMIZERS)}.", show_default="as dpkern train"),
    ] = None,
    delta: Annotated[
        float | None, typer.Option(help="Delta of all mechanisms.", show_default="as dpkern train")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="Threads of a step.", show_default="as dpkern train")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="TOML file with more options of dpkern train, the same for all mechanisms; those "
            "on the command line win.",
            show_default=False,
        ),
    ] = None,
    format: Format = "text",
    out: Out = None,
    figures: Figures = None,
    tables: Tables = None,
) -> None:
    """Train mechanisms at equal certified epsilon: accuracy against time, operations and energy.

    Every interval is over seeds. Mechanisms that train the same bits tie.
    """
    named: dict[str, Any] = {
        "data": data,
        "model": model,
        "epochs": epochs,
        "batch_size": batch_size,
        "lr": lr,
        "max_grad_norm": max_grad_norm,
        "optimizer": optimizer,
        "delta": delta,
        "threads": threads,
    }
    given = {name: value for name, value in named.items() if value is not None}
    if config is not None:
        given = run_file.merged(config, option_types(), given)
    names, levels = listed(mechanisms), _epsilons(epsilon)

    def make() -> Report:
        console = Console(stderr=True)
        columns = (
            *(BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn()),
            TextColumn("{task.description}"),
        )
        least = needed_runs(statements(max(1, len(names)), len(set(levels))))
        total = len(names) * len(set(levels)) * (seeds or least)
        with redirect_stdout(sys.stderr), Progress(*columns, console=console) as progress:
            task = progress.add_task("", total=total)

            def on_run(name: str, at: float, seed: int) -> None:
                started = progress.tasks[task].description != ""
                text = f"{name}, epsilon {shown_bound(at)}, seed {seed}"
                progress.update(task, description=text, advance=int(started))

            found = frontier_report.report(
                names, epsilons=levels, seeds=seeds, options=given, on_run=on_run
            )
            progress.update(task, description="trained", completed=total)
        return found

    publish(make, format, out, figures, tables)


def _epsilons(text: str) -> list[float]:
    """Parse ``1,3,8``.

    Raises:
        InvalidInput: anything that is no number.
    """
    try:
        found = [float(part) for part in listed(text)]
    except ValueError:
        found = []
    if not found:
        raise InvalidInput(
            "epsilon",
            expected="numbers with commas, such as 1,3",
            got=text,
            remedy="Pass, for example, --epsilon 1,3.",
        )
    return found
