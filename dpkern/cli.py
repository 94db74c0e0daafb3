"""The command line: ``dpkern train``, ``privacy``, ``reproduce``, ``cost``, ``check``, ``info``.

With ``--json`` (of ``cost``: ``--format json``) standard output carries exactly one JSON object;
progress and messages go to standard error. Exit codes: 0 done, 1 a checked model cannot be trained
privately, 2 refused (with one message that says what to do), 130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from torch.nn.parameter import is_lazy

from . import __version__, _dispatch, cli_cost, cli_privacy, cli_reproduce
from .backends import cpu
from .engine import check_model
from .errors import DPKernError
from .train import display
from .train.ahead import SOURCES
from .train.mechanism import NAMES
from .train.models import ALL_MODELS, build, example_rows
from .train.options import (
    ARITHMETICS,
    CLIPPINGS,
    OPTIMIZERS,
    SAMPLINGS,
    ModelOptions,
    PrivacyOptions,
    RunOptions,
)
from .train.report import dumps
from .train.session import DEFAULT_BATCH_SIZE, Session

CHECK_FAILED = 1
REFUSED = 2
INTERRUPTED = 130

app = typer.Typer(
    name="dpkern",
    help="Certified differentially private training in compiled kernels.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.command("privacy")(cli_privacy.command)
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


def _option(owner: type[Any], name: str, help_text: str) -> Any:
    """An option that is None unless given, so that --resume knows what was asked for; the
    default shown is that of the options class."""
    default = getattr(owner, name)
    return typer.Option(help=help_text, show_default=False if default is None else str(default))


@app.command()
def train(
    data: Annotated[
        str | None,
        _option(PrivacyOptions, "data", "'digits', or a .npz or .csv file, or a folder with one."),
    ] = None,
    model: Annotated[
        str | None, _option(ModelOptions, "model", f"One of {', '.join(ALL_MODELS)}.")
    ] = None,
    linear: Annotated[
        str | None,
        _option(ModelOptions, "linear", "dense or circulant layers in a source's model."),
    ] = None,
    norm: Annotated[
        str | None, _option(ModelOptions, "norm", "group or none in a source's model.")
    ] = None,
    mechanism: Annotated[
        str | None, _option(PrivacyOptions, "mechanism", f"One of {', '.join(NAMES)}.")
    ] = None,
    mode: Annotated[
        str | None,
        _option(
            PrivacyOptions,
            "mode",
            "corrected, or published: as the source prints it, with the source's claim beside "
            "what is certified.",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="KEY=VALUE: a field of the mechanism; may be repeated."),
    ] = None,
    epsilon: Annotated[
        float | None,
        _option(PrivacyOptions, "epsilon", "Target: calibrate the noise to it."),
    ] = None,
    noise_multiplier: Annotated[
        float | None,
        _option(
            PrivacyOptions, "noise_multiplier", "Or set the noise, in units of the norm bound."
        ),
    ] = None,
    delta: Annotated[
        float | None, _option(PrivacyOptions, "delta", "The delta of (epsilon, delta).")
    ] = None,
    max_grad_norm: Annotated[
        float | None,
        _option(PrivacyOptions, "max_grad_norm", "Norm bound of one sample's gradient."),
    ] = None,
    epochs: Annotated[
        int | None,
        _option(PrivacyOptions, "epochs", "Epochs of rows // batch size steps each."),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            help="Expected batch size.", show_default=f"{DEFAULT_BATCH_SIZE}, or all rows if fewer"
        ),
    ] = None,
    lr: Annotated[float | None, _option(ModelOptions, "lr", "Learning rate.")] = None,
    optimizer: Annotated[
        str | None, _option(ModelOptions, "optimizer", f"One of {', '.join(OPTIMIZERS)}.")
    ] = None,
    sampling: Annotated[
        str | None,
        _option(
            PrivacyOptions, "sampling", f"How batches are drawn: one of {', '.join(SAMPLINGS)}."
        ),
    ] = None,
    clipping: Annotated[
        str | None, _option(PrivacyOptions, "clipping", f"One of {', '.join(CLIPPINGS)}.")
    ] = None,
    arithmetic: Annotated[
        str | None,
        _option(
            PrivacyOptions,
            "arithmetic",
            f"One of {', '.join(ARITHMETICS)}; exact certifies the released bits.",
        ),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(help="Who runs the kernels; see dpkern info.", show_default="the fastest"),
    ] = None,
    unsafe_seed: Annotated[
        int | None,
        _option(
            PrivacyOptions,
            "unsafe_seed",
            "Reproducible noise: no privacy against anyone who knows the seed.",
        ),
    ] = None,
    rounds: Annotated[
        int | None, _option(PrivacyOptions, "rounds", "ChaCha rounds: 20, 12 or 8.")
    ] = None,
    init_seed: Annotated[
        int | None,
        _option(ModelOptions, "init_seed", "Public seed of the initial parameters."),
    ] = None,
    feature_scale: Annotated[
        float | None,
        typer.Option(
            help="Public constant that features are divided by.", show_default="digits 16, else 1"
        ),
    ] = None,
    classes: Annotated[
        int | None,
        typer.Option(
            help="Public number of classes.", show_default="largest label + 1, then public"
        ),
    ] = None,
    test_fraction: Annotated[
        float | None,
        _option(PrivacyOptions, "test_fraction", "Rows held out where the data brings none."),
    ] = None,
    split_seed: Annotated[
        int | None, _option(PrivacyOptions, "split_seed", "Public seed of that split.")
    ] = None,
    max_physical_batch_size: Annotated[
        int | None,
        _option(
            RunOptions, "max_physical_batch_size", "Samples in memory at once; batches are split."
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(help="Threads of a step.", show_default="1 for small models, else torch's"),
    ] = None,
    noise_source: Annotated[
        str | None,
        typer.Option(
            help=f"Make the next steps' noise ahead, with the same bits: {', '.join(SOURCES)}.",
            show_default="in the update",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Directory of the results.", show_default="runs/<date>-<time>"),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the interrupted run in --out.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the results in --out.")
    ] = False,
    no_figure: Annotated[
        bool, typer.Option("--no-figure", help="Write no figure (needs no matplotlib).")
    ] = False,
    diagnostics: Annotated[
        bool,
        typer.Option("--diagnostics", help="Show training loss and counts; epsilon ignores them."),
    ] = False,
    json: Json = False,
) -> None:
    """Train a model privately; write report.json, checkpoint.pt and a figure.

    Give --epsilon or --noise-multiplier. Ctrl-C leaves a checkpoint for --resume.
    """
    # The first statement, while the local variables are the options and nothing else.
    given = {name: value for name, value in locals().items() if value is not None}
    del given["json"], given["no_figure"]
    if settings is not None:
        given["settings"] = tuple(settings)
    session = Session(given | {"figure": not no_figure})
    messages = Console(stderr=True)
    try:
        with display.watching(session, messages) as watch:
            summary = session.run(on_step=watch.on_step, on_epoch=watch.on_epoch)
    except KeyboardInterrupt:
        _leave_checkpoint(session, messages, json)
        raise typer.Exit(INTERRUPTED) from None
    if json:
        _print_json(summary)
    else:
        display.print_summary(Console(), summary)


def _leave_checkpoint(session: Session, messages: Console, as_json: bool) -> None:
    training = session.training
    if not training.between_steps:
        text = "Interrupted within a step: no checkpoint was written."
        content: dict[str, Any] = {"interrupted": True, "checkpoint": None}
    else:
        path = session.save()
        done, total = training.step.steps, training.batches.steps
        text = (
            f"Interrupted after step {done} of {total}; checkpoint {path}.\n"
            f"Continue with: dpkern train --resume --out {session.out}"
        )
        content = {"interrupted": True, **session.summary(), "report": None, "figure": None}
    messages.print(Text(text), soft_wrap=True)
    if as_json:
        _print_json(content)


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
    """What keeps a model from being trained privately, without running it on data.

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
    """Version, build, instruction set in use, and which backend can run which op."""
    build = cpu.build_config()
    rows = _dispatch.table()
    if json:
        _print_json({"version": __version__, "build": build, "ops": rows})
        return
    console = Console()
    settings = [(name.replace("_", " "), value) for name, value in build.items()]
    display.print_table(console, f"dpkern {__version__}", settings)
    display.print_backends(console, rows)
