"""``dpkern info``: what this installation can do on this machine."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from ..base import dispatch
from ..base.commit import commit, version_with_commit
from ..base.json import dumps
from ..base.version import __version__
from ..ops.backends import cpu
from ..train import display


def command(
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False,
) -> None:
    """Show version, build, instruction set in use, and which backend can run which op."""
    build = cpu.build_config()
    rows = dispatch.table()
    if json:
        print(
            dumps({"version": __version__, "commit": commit(), "build": build, "ops": rows}),
            flush=True,
        )
        return
    console = Console()
    settings = [(name.replace("_", " "), value) for name, value in build.items()]
    display.print_table(console, f"dpkern {version_with_commit()}", settings)
    display.print_backends(console, rows)
