"""The command line: ``dpkern train``, ``privacy``, ``audit``, ``reproduce``, ``cost`` and others.

With ``--json`` (``cost``: ``--format json``) standard output carries exactly one JSON object;
progress and messages go to standard error. Exit codes: 0 done, 1 a checked model cannot be trained
privately or an audit contradicts what it tested, 2 refused (with one message that says what to do),
130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from functools import partial
from itertools import pairwise
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from torch.nn.parameter import is_lazy

from . import __version__
from .base import dispatch
from .base.errors import DPKernError
from .base.exit_codes import CHECK_FAILED, REFUSED
from .base.json import dumps
from .commands import audit as cli_audit
from .commands import cost as cli_cost
from .commands import privacy as cli_privacy
from .commands import train as cli_train
from .engine import check_model
from .engine.demo.models import ALL_MODELS, build, example_rows
from .ops.backends import cpu
from .papers import cli as cli_reproduce
from .train import display

app = typer.Typer(
    name="dpkern",
    help="Certified differentially private training in compiled kernels.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.command("train")(cli_train.command)
app.command("privacy")(cli_privacy.command)
app.command("audit")(cli_audit.command)
app.command("reproduce")(cli_reproduce.command)
app.add_typer(cli_cost.app, name="cost")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    as_json = _wants_json(arguments)
    try:
        app(args=arguments, prog_name="dpkern")
    except DPKernError as error:
        kind = type(error).__name__
        Console(stderr=True).print(Text(f"{kind}: {error}", style="red"), soft_wrap=True)
        if as_json:
            fields = {"name": error.name, "expected": error.expected, "got": error.got}
            _print_json(
                {
                    "error": {
                        "type": kind,
                        "message": str(error),
                        **fields,
                        "remedy": error.remedy,
                    }
                }
            )
        return REFUSED
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if code == REFUSED and as_json:
            # The parser has explained itself on standard error.
            _print_json({"error": {"type": "UsageError", "message": "wrong usage of the command"}})
        return code
    return 0


def _wants_json(arguments: Sequence[str]) -> bool:
    asked = ("--json", "--format=json")
    return any(a in asked for a in arguments) or ("--format", "json") in pairwise(arguments)


def _print_json(value: Any) -> None:
    print(dumps(value), flush=True)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"dpkern {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    del version


@app.command()
def check(
    model: Annotated[
        str,
        typer.Argument(
            help=f"One of {', '.join(ALL_MODELS)}, or path/to/file.py:callable, or "
            "package.module:callable; the callable takes no arguments and returns the model."
        ),
    ],
    json: Json = False,
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
        _print_json({"model": model, **counts, "findings": findings})
    else:
        display.print_findings(Console(), model, trained, findings)
    if refused:
        raise typer.Exit(CHECK_FAILED)


@app.command()
def info(json: Json = False) -> None:
    """Show version, build, instruction set in use, and which backend can run which op."""
    build = cpu.build_config()
    rows = dispatch.table()
    if json:
        _print_json({"version": __version__, "build": build, "ops": rows})
        return
    console = Console()
    settings = [(name.replace("_", " "), value) for name, value in build.items()]
    display.print_table(console, f"dpkern {__version__}", settings)
    display.print_backends(console, rows)
