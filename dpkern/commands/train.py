"""``dpkern train``: every option of every trainer, and what is done with the session."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from rich.console import Console
from rich.text import Text

from ..base import devices
from ..base.csv_reader import HEADERS
from ..base.exit_codes import INTERRUPTED
from ..base.json import dumps
from ..engine.demo.models import ALL_MODELS
from ..objective.moments import SURROGATES
from ..reports.page import page
from ..step.noise_tables.named import SOURCES
from ..train import display, run_file
from ..train.adlm_options import MODELS, LabelledOptions
from ..train.moments_options import SumsOptions, SurrogateOptions
from ..train.objective_options import CodeOptions, RecordOptions
from ..train.options import (
    ARITHMETICS,
    CLIPPINGS,
    DEFAULT_BATCH_SIZE,
    OPTIMIZERS,
    SAMPLINGS,
    ModelOptions,
    PrivacyOptions,
    RunOptions,
)
from ..train.session_factory import NAMES, AnySession, make_session
from . import audited

OF_RECORDS, OF_LABELLED = RecordOptions.in_words(), LabelledOptions.in_words()
LABELLED = "Rows with labels (adlm)"
RECORDS = "Tables of records (spof, fm)"
SUMS = f"Sums of rows ({SumsOptions.in_words()})"


def _option(owner: type[Any], name: str, help_text: str, panel: str | None = None) -> Any:
    """Return an option that is None unless given, so that --resume knows what was given.

    The default shown is that of the options class.
    """
    default = getattr(owner, name)
    shown = False if default is None else str(default)
    return typer.Option(help=help_text, show_default=shown, rich_help_panel=panel)


def _switch(name: str, help_text: str) -> Any:
    """Return a flag that is None unless given, so that ``--no-NAME`` overrides a run file."""
    return typer.Option(f"--{name}/--no-{name}", help=help_text, show_default=False)


def command(
    config: Annotated[
        Path | None,
        typer.Option(
            help="TOML file with options by name; those on the command line win.",
            show_default=False,
        ),
    ] = None,
    data: Annotated[
        str | None,
        _option(
            PrivacyOptions,
            "data",
            "'digits', or a .csv, .parquet or .npz file, or a folder with one. "
            f"With {OF_RECORDS}: 'generated', or a .csv file.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        _option(
            ModelOptions,
            "model",
            f"One of {', '.join(ALL_MODELS)}. With {OF_LABELLED}: {', '.join(MODELS)}.",
        ),
    ] = None,
    linear: Annotated[
        str | None,
        _option(ModelOptions, "linear", "dense or circulant layers in a paper's model."),
    ] = None,
    norm: Annotated[
        str | None, _option(ModelOptions, "norm", "group or none in a paper's model.")
    ] = None,
    mechanism: Annotated[
        str | None, _option(PrivacyOptions, "mechanism", f"One of {', '.join(NAMES)}.")
    ] = None,
    mode: Annotated[
        str | None,
        _option(
            PrivacyOptions,
            "mode",
            "corrected, or published: as the paper prints it, with the paper's claim beside "
            "what is certified.",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="KEY=VALUE: a field of the mechanism; may be repeated."),
    ] = None,
    epsilon: Annotated[
        float | None,
        _option(PrivacyOptions, "epsilon", "Target epsilon: calibrate the noise to it."),
    ] = None,
    noise_multiplier: Annotated[
        float | None,
        _option(
            PrivacyOptions,
            "noise_multiplier",
            "Noise scale / clipping bound, instead of a target epsilon.",
        ),
    ] = None,
    delta: Annotated[
        float | None,
        _option(
            PrivacyOptions, "delta", "The delta of (epsilon, delta): well below 1 / number of rows."
        ),
    ] = None,
    max_grad_norm: Annotated[
        float | None,
        _option(PrivacyOptions, "max_grad_norm", "Clipping bound of one sample's gradient."),
    ] = None,
    epochs: Annotated[
        int | None,
        _option(
            PrivacyOptions,
            "epochs",
            "Epochs of rows // batch size steps each. "
            f"With {OF_RECORDS}: visits of each record, usually {RecordOptions.epochs}.",
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            help="Expected batch size.", show_default=f"{DEFAULT_BATCH_SIZE}, or all rows if fewer"
        ),
    ] = None,
    lr: Annotated[
        float | None,
        _option(ModelOptions, "lr", f"Learning rate; with {OF_RECORDS} usually {CodeOptions.lr}."),
    ] = None,
    optimizer: Annotated[
        str | None, _option(ModelOptions, "optimizer", f"One of {', '.join(OPTIMIZERS)}.")
    ] = None,
    sampling: Annotated[
        str | None,
        _option(PrivacyOptions, "sampling", f"Sampling of batches: one of {', '.join(SAMPLINGS)}."),
    ] = None,
    clipping: Annotated[
        str | None, _option(PrivacyOptions, "clipping", f"One of {', '.join(CLIPPINGS)}.")
    ] = None,
    arithmetic: Annotated[
        str | None,
        _option(
            PrivacyOptions,
            "arithmetic",
            f"One of {', '.join(ARITHMETICS)}; exact covers all rounding but the model's own.",
        ),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            help="Backend that runs the kernels; `dpkern info` lists those available.",
            show_default="the fastest",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help=f"Device of model, rows and kernels: {devices.NAMES}.", show_default="cpu"
        ),
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
    label: Annotated[
        str | None,
        typer.Option(
            help="Column of the label, by heading or number.", show_default="label, else the last"
        ),
    ] = None,
    drop: Annotated[
        list[str] | None,
        typer.Option(help="Column to leave out, by heading or number; may be repeated."),
    ] = None,
    header: Annotated[
        str | None,
        _option(
            PrivacyOptions,
            "header",
            f"Whether a CSV file begins with headings: {', '.join(HEADERS)}.",
        ),
    ] = None,
    ranges: Annotated[
        str | None,
        _option(
            PrivacyOptions,
            "ranges",
            "TOML file with public ranges and categories: age = [0, 120].",
        ),
    ] = None,
    private_ranges: Annotated[
        float | None,
        typer.Option(
            help="Part of --epsilon that pays for private ranges of the columns without a public "
            "one.",
            show_default=False,
        ),
    ] = None,
    feature_scale: Annotated[
        float | None,
        typer.Option(
            help="Public constant that features without a range are divided by.",
            show_default="digits 16, else 1",
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
        _option(
            PrivacyOptions,
            "test_fraction",
            "Share of the rows to hold out if the data has no test rows.",
        ),
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
            help=f"Source of the noise, one of {', '.join(SOURCES)}: drawn in place; made ahead "
            "with the same bits; a cumulative table; ready-made samples, which protect nothing.",
            show_default="inline",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Directory of the results.", show_default="runs/<date>-<time>"),
    ] = None,
    resume: Annotated[
        bool | None, _switch("resume", "Continue the interrupted run in --out.")
    ] = None,
    overwrite: Annotated[bool | None, _switch("overwrite", "Replace the results in --out.")] = None,
    no_figure: Annotated[
        bool | None,
        typer.Option(
            "--no-figure/--figure",
            help="Write no figure and no page (needs no matplotlib).",
            show_default=False,
        ),
    ] = None,
    diagnostics: Annotated[
        bool | None, _switch("diagnostics", "Show training loss and counts; epsilon ignores them.")
    ] = None,
    ceiling: Annotated[
        bool | None,
        _switch("ceiling", "Train without privacy too, to compare; epsilon ignores that number."),
    ] = None,
    audit: Annotated[
        int | None,
        typer.Option(
            help="Audit the run's step first with so many counted runs, as dpkern audit does; "
            "the report then has a lower bound on epsilon too.",
            show_default="not audited",
        ),
    ] = None,
    public_data: Annotated[
        str | None,
        typer.Option(
            help="Public records of the same kind, to compute relevances from.",
            show_default=False,
            rich_help_panel=LABELLED,
        ),
    ] = None,
    surrogate: Annotated[
        str | None,
        _option(SurrogateOptions, "surrogate", f"Loss: {' or '.join(SURROGATES)}.", SUMS),
    ] = None,
    ridge: Annotated[
        float | None,
        _option(SurrogateOptions, "ridge", "Regularisation, in units of the noise.", SUMS),
    ] = None,
    users: Annotated[
        int | None,
        typer.Option(
            help="Encoders that share one decoder; fm has 1.",
            show_default="2",
            rich_help_panel=RECORDS,
        ),
    ] = None,
    features: Annotated[
        int | None,
        _option(RecordOptions, "features", "Features of a record, padded with zeros.", RECORDS),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            help="Headings of the features, with commas.",
            show_default="numeric columns in the file's order",
            rich_help_panel=RECORDS,
        ),
    ] = None,
    user_column: Annotated[
        str | None,
        typer.Option(
            help="Heading of the column that names the user of a row.",
            show_default="rows are dealt",
            rich_help_panel=RECORDS,
        ),
    ] = None,
    bounds: Annotated[
        str | None,
        typer.Option(
            help="Public largest values: a number, numbers with commas, or HEADING=NUMBER,...",
            show_default="maxima of the data, and nothing certified",
            rich_help_panel=RECORDS,
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            help="Training samples of each user, drawn with replacement; with 'generated', the "
            "number of records to generate.",
            show_default="the rows; generated: 1000",
            rich_help_panel=RECORDS,
        ),
    ] = None,
    code: Annotated[
        int | None, _option(CodeOptions, "code", "Length of a user's code.", RECORDS)
    ] = None,
    sigma: Annotated[
        float | None,
        _option(RecordOptions, "sigma", "Environmental noise at the encoder's input.", RECORDS),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False,
) -> None:
    """Train a model privately; write report.html, report.json, checkpoint.pt and a figure.

    Give --epsilon or --noise-multiplier. Ctrl-C leaves a checkpoint for --resume. An option that
    does not apply to the mechanism is refused.
    """
    # The first statement, while the local variables are the options and nothing else.
    named = locals().items()
    given = {name: value for name, value in named if value is not None}
    del given["json"]
    path = given.pop("config", None)
    if path is not None:
        given = run_file.merged(path, option_types(), given)
    given = {name: value for name, value in given.items() if value is not False}
    given["figure"] = not given.pop("no_figure", False)
    for name in ("settings", "drop"):
        if name in given:
            given[name] = tuple(given[name])
    session = make_session(given, audited, page)
    messages = Console(stderr=True)
    if session.data_in_words():
        messages.print(Text(session.data_in_words()), soft_wrap=True)
    display.print_warnings(messages, session.privacy_warnings())
    try:
        with display.watching(session, messages) as watch:
            summary = session.run(on_step=watch.on_step, on_epoch=watch.on_epoch)
    except KeyboardInterrupt:
        _leave_checkpoint(session, messages, json)
        raise typer.Exit(INTERRUPTED) from None
    if json:
        _print_json(summary)
    else:
        session.show(Console(), summary)


def option_types() -> dict[str, Any]:
    """Return the types of the options that a run file may have."""
    types = get_type_hints(command)
    return {name: types[name] for name in types if name not in ("config", "json", "return")}


def _leave_checkpoint(session: AnySession, messages: Console, as_json: bool) -> None:
    if not session.between_steps:
        text = "Interrupted within a step: no checkpoint was written."
        content: dict[str, Any] = {"interrupted": True, "checkpoint": None}
    else:
        path = session.save()
        done, total = session.steps_done, session.steps_total
        text = (
            f"Interrupted after step {done} of {total}; checkpoint {path}.\n"
            f"Continue with: dpkern train --resume --out {session.out}"
        )
        content = {"interrupted": True, **session.summary(), "report": None, "figure": None}
    messages.print(Text(text), soft_wrap=True)
    if as_json:
        _print_json(content)


def _print_json(value: Any) -> None:
    print(dumps(value), flush=True)
