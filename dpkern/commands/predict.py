"""``dpkern cost predict``: what a private step takes on a processor that need not be here."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from typing import Annotated

import typer

from ..base.report import Report
from ..reports import prediction
from ..reports.networks import ARCHITECTURES
from .publish import Figures, Format, Out, Tables, numbers, publish, spanned


def predict(
    model: Annotated[
        str,
        typer.Argument(
            help=f"One of {', '.join(ARCHITECTURES)}, or package.module:callable, which takes no "
            "arguments and returns a model, or a model and an example input."
        ),
    ],
    processor: Annotated[
        str,
        typer.Option(
            help="A processor with figures of its memory and peak (h100, h200, v100, zen4, "
            "zen4:avx2, icelake), or your own TOML file."
        ),
    ] = "h100",
    mechanism: Annotated[
        str, typer.Option(help=f"One of {', '.join(prediction.MECHANISMS)}.")
    ] = "dpsgd",
    batch: Annotated[
        str, typer.Option(help="Samples of a step; several with commas, or FIRST..LAST, doubling.")
    ] = "32,128,512",
    seq: Annotated[
        int | None, typer.Option(help="Positions of a sample.", show_default="the model's usual")
    ] = None,
    row_shape: Annotated[
        str | None,
        typer.Option(help="Shape of one sample, such as 1,28,28.", show_default="the example's"),
    ] = None,
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(prediction.DTYPES)}.")] = "float32",
    optimizer: Annotated[
        str, typer.Option(help=f"One of {', '.join(prediction.OPTIMIZERS)}.")
    ] = "sgd",
    threads: Annotated[
        int | None,
        typer.Option(
            help="Multiprocessors of a GPU at work; a CPU has 1.", show_default="all of a GPU"
        ),
    ] = None,
    format: Format = "text",
    out: Out = None,
    figures: Figures = None,
    tables: Tables = None,
) -> None:
    """Predict time and memory of private steps on a processor, without running the model."""

    def make() -> Report:
        with redirect_stdout(sys.stderr):  # the user's code may print
            return prediction.report(
                model,
                processor=processor,
                mechanism=mechanism,
                batches=spanned("batch", batch),
                positions=seq,
                row_shape=None if row_shape is None else numbers("row_shape", row_shape),
                dtype=dtype,
                optimizer=optimizer,
                threads=threads,
            )

    publish(make, format, out, figures, tables)
