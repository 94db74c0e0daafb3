"""``dpkern audit``: test what a release claims on fresh runs of the real thing.

The report goes to standard output, progress to standard error. Exit code 1: a claim or certificate
is contradicted, or a check failed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from ..audit import report as audit_report
from ..audit import report_loop as loop_report
from ..audit import run
from ..audit.claims import ApproximateDP, Claim, GaussianDP, PureDP
from ..audit.subject import Subject
from ..audit.subjects import catalogue, loop, script
from ..base import dispatch as _dispatch
from ..base.errors import InvalidInput
from ..base.report import Report
from ..base.validate import choice, non_negative, require
from ..engine.named import MODES, read_settings
from ..reports import files
from ..reports.text import as_text
from .publish import refuse_places

CONTRADICTED = 1
DELTA = 1e-5
OF_CATALOGUE = ("mode", "settings", "backend", "steps")
"""Options that describe a mechanism; a script describes itself."""
NOT_OF_LOOPS = (
    *("claim", "claim_mu", "runs", "confidence", "mode", "settings", "backend"),
    *("workers", "quick"),
)
"""Options that do not apply to a training loop."""
DECIDED = ("mode", "sites", "groups", "backend", "width", "op", "library", "dimension")
"""Fields that follow from the name, the options and the shapes that are audited."""


def command(
    context: typer.Context,
    subject: Annotated[
        str,
        typer.Argument(
            help=f"One of {', '.join(catalogue.names())}; or path/to/file.py:name, a callable, "
            "a Subject, a Statement, or a training loop without arguments. The file is executed."
        ),
    ],
    claim: Annotated[
        float | None,
        typer.Option(help="Claimed epsilon of one call.", show_default="the subject's own"),
    ] = None,
    claim_mu: Annotated[
        float | None, typer.Option(help="Claimed mu of a GaussianDP mechanism, instead of --claim.")
    ] = None,
    delta: Annotated[
        float,
        typer.Option(help="The delta of (epsilon, delta); 0 with --claim claims a pure epsilon."),
    ] = DELTA,
    runs: Annotated[
        int | None,
        typer.Option(
            help="Runs per neighbour in each pair that count towards the bound. More runs give "
            "tighter bounds and take longer.",
            show_default="100000 for kernels and records, 20000 for functions, 5000 for steps: "
            "seconds, and a minute or so for steps",
        ),
    ] = None,
    confidence: Annotated[
        float, typer.Option(help="Confidence that all reported bounds hold at once.")
    ] = 0.999,
    mode: Annotated[
        str, typer.Option(help=f"One of {', '.join(MODES)}; published has the paper's claim.")
    ] = "corrected",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="KEY=VALUE: a field of the mechanism; may be repeated."),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            help=f"One of {', '.join(_dispatch.BACKENDS)}.", show_default="the first that can"
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            help="Steps of one call, audited together; with a training loop, steps of each run.",
            show_default=f"1; {loop.STEPS} with a training loop",
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            help="Time limit of a training loop's audit: no attack begins later.",
            show_default=f"{loop.SECONDS:g}",
        ),
    ] = None,
    workers: Annotated[int, typer.Option(help="Number of processes.")] = 1,
    quick: Annotated[bool, typer.Option("--quick", help="Leave out slow checks.")] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option(help="Write a self-contained HTML report to this file.")
    ] = None,
    figures: Annotated[
        Path | None, typer.Option(help="Write every figure as SVG and PNG to this folder.")
    ] = None,
) -> None:
    """Try to contradict a claim by running the release on worst-case neighbours.

    Ends with a verdict in one sentence, and exit code 1 if a claim or a certificate is
    contradicted or a check fails. The lower bound stands beside what is claimed and certified.
    """
    claimed = _claim(claim, claim_mu, delta)
    choice(MODES, mode=mode)
    if html is not None or figures is not None:
        require("matplotlib")
    refuse_places(html=html, figures=figures)
    if loop.is_loop(subject):
        _refuse_given(context, NOT_OF_LOOPS, "nothing for a training loop, which is run as it is")
        _show(_loop(subject, steps, seconds, delta), json=json, html=html, figures=figures)
        return
    if seconds is not None:
        raise InvalidInput(
            "seconds",
            expected="nothing, except with a training loop",
            got=seconds,
            remedy="Leave --seconds out; --runs sets the amount of work.",
        )
    with redirect_stdout(sys.stderr):  # the user's code may print
        if script.is_script(subject):
            _refuse_given(
                context, OF_CATALOGUE, "nothing for a script, which says itself what it releases"
            )
            chosen: Subject = script.load(subject)
        else:
            choice(tuple(catalogue.names()), subject=subject)
            chosen = catalogue.make(
                subject,
                mode=mode,
                settings=_settings(subject, settings or ()),
                backend=backend,
                steps=1 if steps is None else steps,
            )
        with _telling() as tell:
            findings = run(
                chosen,
                runs=runs,
                confidence=confidence,
                delta=delta or DELTA,
                workers=workers,
                quick=quick,
                claim=claimed,
                progress=tell,
            )
    _show((audit_report.report(findings), findings.passed), json=json, html=html, figures=figures)


def _loop(
    reference: str, steps: int | None, seconds: float | None, delta: float
) -> tuple[Report, bool]:
    """Return the report of a training loop, and whether nothing contradicts its certificate."""
    with redirect_stdout(sys.stderr), _telling() as tell:  # the user's code may print
        found = loop.audit_loop(
            reference,
            steps=loop.STEPS if steps is None else steps,
            seconds=loop.SECONDS if seconds is None else seconds,
            delta=delta,
            progress=tell,
        )
    return loop_report.report(found), found.passed


def _show(
    found: tuple[Report, bool], *, json: bool, html: Path | None, figures: Path | None
) -> None:
    """Print and write a report; exit code 1 if its audit did not pass."""
    report, passed = found
    written = [] if figures is None else files.write_figures(report, figures)
    if html is not None:
        files.write(report, "html", html)
        written.insert(0, html)
    if json:
        print(files.render(report, "json"), end="", flush=True)
    else:
        as_text(report, Console())
    if written:
        names = ", ".join(str(path) for path in written)
        Console(stderr=True).print(Text(f"Wrote {names}"), soft_wrap=True)
    if not passed:
        raise typer.Exit(CONTRADICTED)


def _claim(epsilon: float | None, mu: float | None, delta: float) -> Claim | None:
    """Return the claim on the command line; None selects the subject's own claim.

    Raises:
        InvalidInput: two claims, or a number out of its range.
    """
    if epsilon is not None and mu is not None:
        raise InvalidInput(
            "claim, claim_mu",
            expected="at most one of them",
            got="both",
            remedy="Pass --claim-mu alone; a Gaussian mechanism's epsilon follows from its mu.",
        )
    if not 0 <= delta < 1 or (delta == 0 and epsilon is None):
        raise InvalidInput(
            "delta",
            expected="a number in (0, 1), or 0 with --claim",
            got=delta,
            remedy="Pass, for example, --delta 1e-5.",
        )
    if mu is not None:
        return GaussianDP(non_negative(claim_mu=mu))
    if epsilon is None:
        return None
    bound = non_negative(claim=epsilon)
    return ApproximateDP(bound, delta) if delta else PureDP(bound)


def _settings(name: str, texts: Sequence[str]) -> dict[str, Any]:
    """Parse ``KEY=VALUE`` texts as fields of what a name stands for.

    Raises:
        InvalidInput: an unknown field, or a value that it does not take.
    """
    kind = catalogue.kind(name)
    derived = [field.name for field in fields(kind) if not field.init]
    return read_settings(kind, texts, decided=(*DECIDED, *derived))


def _refuse_given(context: typer.Context, names: Sequence[str], expected: str) -> None:
    """Refuse options that would have no effect.

    Raises:
        InvalidInput: one was given.
    """
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise InvalidInput(
                name,
                expected=expected,
                got=context.params[name],
                remedy="Leave it out.",
            )


@contextmanager
def _telling() -> Iterator[Callable[[str, float], None]]:
    """Show a progress bar on standard error."""
    columns = (BarColumn(bar_width=20), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=1.0)
        yield lambda stage, share: progress.update(task, description=stage, completed=share)
