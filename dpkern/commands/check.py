"""``dpkern check``: whether a model can be trained privately."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from functools import partial
from typing import Annotated

import typer
from rich.console import Console
from torch.nn.parameter import is_lazy

from ..base.exit_codes import CHECK_FAILED
from ..base.json import dumps
from ..engine import check_model
from ..engine.demo.models import ALL_MODELS, build, example_rows
from ..train import display


def command(
    model: Annotated[
        str,
        typer.Argument(
            help=f"One of {', '.join(ALL_MODELS)}, or path/to/file.py:callable, or "
            "package.module:callable; the callable takes no arguments and returns the model."
        ),
    ],
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False,
) -> None:
    """Check whether a model can be trained privately.

    Needs no data.

    Runs the code that makes the model. Exit code 1 if anything is refused.
    """
    presets = {
        name: partial(build, name, row_shape=example_rows(name), classes=10) for name in ALL_MODELS
    }
    with redirect_stdout(sys.stderr):  # the user's code may print
        found = check_model.load_model(model, presets)
        findings = check_model.report(found)
    refused = sum(finding["severity"] == "refuse" for finding in findings)
    trained = sum(p.numel() for p in found.parameters() if p.requires_grad and not is_lazy(p))
    if json:
        counts = {"trained_parameters": trained, "refused": refused}
        print(dumps({"model": model, **counts, "findings": findings}), flush=True)
    else:
        display.print_findings(Console(), model, trained, findings)
    if refused:
        raise typer.Exit(CHECK_FAILED)
