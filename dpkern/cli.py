"""The command line: ``dpkern train``, ``privacy``, ``audit``, ``reproduce``, ``cost`` and others.

With ``--json`` (``cost``: ``--format json``) standard output carries exactly one JSON object;
progress and messages go to standard error. Exit codes: 0 done, 1 a checked model cannot be trained
privately or an audit contradicts what it tested, 2 refused (with one message that says what to do),
130 interrupted.

A command is imported when it runs: the page of all commands needs none of them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from itertools import pairwise
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from .base.errors import DPKernError
from .base.exit_codes import REFUSED
from .base.json import dumps
from .base.version import __version__
from .commands.help_pages import prepare

COMMANDS = {
    "train": (
        ".commands.train",
        "Train a model privately; write report.html, report.json, checkpoint.pt and a figure.",
    ),
    "privacy": (
        ".commands.privacy",
        "Print claimed and certified epsilon of a planned run, or the noise that it needs.",
    ),
    "audit": (
        ".commands.audit",
        "Try to contradict a claim by running the release on worst-case neighbours.",
    ),
    "reproduce": (
        ".papers.cli",
        "Recompute a table or figure: published beside ours, claimed beside certified epsilon.",
    ),
    "check": (".commands.check", "Check whether a model can be trained privately."),
    "info": (
        ".commands.info",
        "Show version, build, instruction set in use, and which backend can run which op.",
    ),
    "cost": (".commands.cost", "Count, compare and measure what private training costs."),
    "bench": (
        ".commands.bench",
        "Time ops beside plain torch: checked first, paired samples, a guard against noise.",
    ),
}
"""The module of each command, and its line on the page of all commands."""


def load(name: str) -> Any:
    """Return a command of ``COMMANDS``, whose module is imported now."""
    module = import_module(COMMANDS[name][0], __package__)
    made = getattr(module, "app", None)
    if made is None:
        made = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        made.command(name)(module.command)
    command = typer.main.get_command(made)
    command.name = name
    return command


class Commands(TyperGroup):
    """The group of all commands."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the commands' names, in their order on the page."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any | None:
        """Return what the page shows of a command; None if there is no such command."""
        if cmd_name not in COMMANDS:
            return None
        return TyperCommand(cmd_name, help=COMMANDS[cmd_name][1])

    def resolve_command(
        self, ctx: Any, args: list[str]
    ) -> tuple[str | None, Any | None, list[str]]:
        """Return the command that is to run, loaded."""
        name, command, rest = super().resolve_command(ctx, args)
        if name is None:
            return name, command, rest
        loaded = load(name)
        return name, loaded, prepare(loaded, name, rest)


app = typer.Typer(
    name="dpkern",
    cls=Commands,
    help="Certified differentially private training in compiled kernels.",
    epilog="Examples:\n\ndpkern train --epsilon 3\n\n"
    "dpkern privacy --sample-rate 0.01 --steps 1000 --epsilon 2",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


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
