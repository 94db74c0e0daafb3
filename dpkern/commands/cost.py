"""``dpkern cost``: count, compare and measure what private training costs.

A report goes to standard output, or to ``--out``; the paths of written files go to standard error.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import fields, replace
from typing import Annotated, Any

import typer

from ..base.errors import InvalidInput
from ..base.laws import LAWS
from ..base.report import Report
from ..base.validate import choice
from ..cost import compare as cost_compare
from ..cost import noise_tables as cost_tables
from ..cost.autoencoder import CORRECTED, PRINTED, CountOptions
from ..cost.processors import available
from ..cost.systems import SYSTEMS
from ..engine.demo.models import ALL_MODELS
from ..engine.named import MODES, NAMES
from ..privacy.mechanisms.examples import LAYERS
from ..reports import model as cost_model
from ..reports import three_ways
from ..step.noise_tables import TableShape
from ..step.noise_tables.named import SOURCES
from .frontier import frontier
from .predict import predict
from .publish import Figures, Format, Out, Tables, listed, numbers, publish

app = typer.Typer(
    help="Count, compare and measure what private training costs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Mode = Annotated[
    str,
    typer.Option(help=f"One of {', '.join(MODES)}: count as the paper prints, or everything."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="KEY=VALUE: a way of counting; may be repeated. Keys: "
        f"{', '.join(field.name for field in fields(CountOptions))}.",
    ),
]


@app.command()
def count(
    mechanism: Annotated[str, typer.Option(help=f"One of {', '.join(SYSTEMS)}.")] = "spof",
    n: Annotated[int, typer.Option("-n", help="Features of a record.")] = 14,
    l: Annotated[int, typer.Option("-l", help="Size of the code.")] = 7,  # noqa: E741
    processor: Annotated[
        str, typer.Option(help=f"One of {', '.join(available())}, or your own TOML file.")
    ] = "k7",
    noise: Annotated[
        str | None,
        typer.Option(
            help=f"Source of the noise, one of {', '.join(SOURCES)}. table protects nothing.",
            show_default="table for spof, fm and dpsgd-da, else inline",
        ),
    ] = None,
    layer: Annotated[
        str | None,
        typer.Option(
            help=f"Layer of a whole step, one of {', '.join(LAYERS)}.",
            show_default="circulant for a mechanism of the frequency domain, else dense",
        ),
    ] = None,
    mode: Mode = "published",
    settings: Settings = None,
    format: Format = "text",
    out: Out = None,
    figures: Figures = None,
    tables: Tables = None,
) -> None:
    """Count one mechanism and shape, line by line: closed form beside a counted run."""
    options = counting(mode, settings)
    publish(
        lambda: three_ways.report(
            mechanism,
            size=(n, l),
            processor=processor,
            options=options,
            noise=noise,
            layer=layer,
        ),
        format,
        out,
        figures,
        tables,
    )


@app.command()
def compare(
    mechanisms: Annotated[
        str,
        typer.Option(help=f"Several of {', '.join(SYSTEMS)}; the last one is the baseline."),
    ] = "spof,dpsgd-da",
    n: Annotated[str, typer.Option("-n", help="Features of a record; several with commas.")] = "14",
    l: Annotated[  # noqa: E741
        str, typer.Option("-l", help="Sizes of the code, one for each n.")
    ] = "7",
    processor: Annotated[
        str,
        typer.Option(help=f"Several of {', '.join(available())}, or TOML files, with commas."),
    ] = "k7",
    batch: Annotated[str, typer.Option(help="Samples of a whole step; several with commas.")] = "1",
    noise: Annotated[
        str | None,
        typer.Option(
            help=f"Sources of the noise, several of {', '.join(SOURCES)} with commas. table "
            "protects nothing.",
            show_default="all for spof, fm and dpsgd-da, else inline",
        ),
    ] = None,
    layer: Annotated[
        str | None,
        typer.Option(
            help=f"Layer of whole steps, one of {', '.join(LAYERS)}, the same for all.",
            show_default="conv with a mechanism of the frequency domain, else dense",
        ),
    ] = None,
    mode: Mode = "published",
    settings: Settings = None,
    format: Format = "text",
    out: Out = None,
    figures: Figures = None,
    tables: Tables = None,
) -> None:
    """Compare what mechanisms cost across processors and model sizes, and find where the ranking
    changes.
    """
    options = counting(mode, settings)
    features, codes = numbers("n", n), numbers("l", l)
    if len(features) != len(codes):
        raise InvalidInput(
            "l",
            expected=f"{len(features)} sizes, one for each n",
            got=l,
            remedy="Pass as many numbers to -l as to -n.",
        )
    publish(
        lambda: cost_compare.report(
            listed(mechanisms),
            sizes=list(zip(features, codes, strict=True)),
            processors=listed(processor),
            options=options,
            noise=None if noise is None else listed(noise),
            layer=layer,
            batches=numbers("batch", batch),
        ),
        format,
        out,
        figures,
        tables,
    )


@app.command()
def model(
    model: Annotated[
        str,
        typer.Argument(
            help=f"One of {', '.join(ALL_MODELS)}, or package.module:callable, which takes no "
            "arguments and returns a model, or a model and an example input."
        ),
    ],
    batch_size: Annotated[int, typer.Option(help="Samples of a step.")] = cost_model.BATCH_SIZE,
    row_shape: Annotated[
        str | None,
        typer.Option(
            help="Shape of one sample, such as 1,28,28.", show_default="the model's usual one"
        ),
    ] = None,
    mechanism: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(NAMES)}.", show_default="dpsgd")
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            help="Rounds in which both ways of training are timed.",
            show_default="about 1.5 seconds' worth",
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="Threads of a step.", show_default="torch's")
    ] = None,
    format: Format = "text",
    out: Out = None,
    figures: Figures = None,
    tables: Tables = None,
) -> None:
    """Measure a real model and batch: time, bytes and operations per phase, layer and op.

    Runs private and ordinary steps on generated data, in turns; runs the code that makes the model.
    """
    shape = None if row_shape is None else numbers("row_shape", row_shape)

    def make() -> Report:
        with redirect_stdout(sys.stderr):  # the user's code may print
            return cost_model.report(
                model,
                batch_size=batch_size,
                row_shape=shape,
                mechanism=mechanism,
                rounds=rounds,
                threads=threads,
            )

    publish(make, format, out, figures, tables)


app.command()(predict)
app.command()(frontier)


@app.command()
def table(
    context: typer.Context,
    kind: Annotated[
        str,
        typer.Argument(
            help="cdt: a table of the law, read at fresh secret indices, private. samples: a table "
            "of samples that are read again and again, no DP guarantee."
        ),
    ] = "cdt",
    law: Annotated[str, typer.Option(help=f"One of {', '.join(LAWS)}.")] = "gaussian",
    word_bits: Annotated[
        int | None, typer.Option(help="Bits of an entry.", show_default="cdt 32, samples 16")
    ] = None,
    entries: Annotated[int, typer.Option(help="samples: number of entries, a power of two.")] = 1
    << 16,
    fraction_bits: Annotated[int, typer.Option(help="samples: bits behind the point.")] = 10,
    stride: Annotated[int, typer.Option(help="samples: step of the pointer per read.")] = 1,
    base: Annotated[int, typer.Option(help="samples: number added to the pointer.")] = 0,
    scrambled: Annotated[
        bool,
        typer.Option("--scrambled", help="samples: mask the index, with a new mask in every step."),
    ] = False,
    multiplied: Annotated[
        bool,
        typer.Option("--multiplied", help="samples: store scale 1 and multiply at every read."),
    ] = False,
    coordinates: Annotated[int, typer.Option(help="samples: reads of one release.")] = 1 << 20,
    format: Format = "text",
    out: Out = None,
    figures: Figures = None,
    tables: Tables = None,
) -> None:
    """Describe a noise table: reads, entropy, period, law, and what it leaks."""
    choice(("cdt", "samples"), kind=kind)
    if kind == "cdt":
        refuse_given(context, OF_SAMPLES)

    def make() -> Report:
        if kind == "cdt":
            return cost_tables.cdt_report(law=law, word_bits=32 if word_bits is None else word_bits)
        shape = TableShape(
            entries=entries,
            stride=stride,
            base=base,
            word_bits=16 if word_bits is None else word_bits,
            fraction_bits=fraction_bits,
            distribution=law,
            scrambled=scrambled,
            prescaled=not multiplied,
        )
        return cost_tables.sample_report(shape, coordinates=coordinates)

    publish(make, format, out, figures, tables)


OF_SAMPLES = (
    "entries",
    "fraction_bits",
    "stride",
    "base",
    "scrambled",
    "multiplied",
    "coordinates",
)
"""Options of ``dpkern cost table`` that only a table of samples has."""


def refuse_given(context: typer.Context, names: Sequence[str]) -> None:
    """Refuse options on the command line that the report would not look at.

    Raises:
        InvalidInput: one of ``names`` was given.
    """
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise InvalidInput(
                name,
                expected="nothing for a cumulative table",
                got=context.params[name],
                remedy="Leave it out, or ask for `dpkern cost table samples`.",
            )


def counting(mode: str, settings: list[str] | None) -> CountOptions:
    """Return the way of counting: a mode, then what ``--set`` changes.

    Raises:
        InvalidInput: an unknown mode or key, or a value that the key does not take.
    """
    choice(MODES, mode=mode)
    options = CORRECTED if mode == "corrected" else PRINTED
    known = {field.name: field.type for field in fields(CountOptions)}
    changes: dict[str, Any] = {}
    for text in settings or ():
        key, equals, value = text.partition("=")
        if not equals or key not in known:
            raise InvalidInput(
                "set",
                expected=f"KEY=VALUE with a KEY of {', '.join(known)}",
                got=text,
                remedy="Choose a KEY from `dpkern cost count --help`.",
            )
        switches = {"true": True, "false": False}
        read: Any = switches.get(value.lower()) if known[key] == "bool" else None
        if known[key] == "int" and value.isdecimal():
            read = int(value)
        if read is None:
            wanted, such = (
                ("true or false", "true") if known[key] == "bool" else ("a whole number", "1")
            )
            raise InvalidInput(
                key, expected=wanted, got=value, remedy=f"Pass, for example, --set {key}={such}."
            )
        changes[key] = read
    return replace(options, **changes)
