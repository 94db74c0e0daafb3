"""Write a drawing as SVG and PNG: the files of every figure that a command leaves."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from ..base.outputs import write_atomically
from . import colors

KINDS = ("svg", "png")


def save(drawn: Any, folder: Path, stem: str, *, dpi: int = 100) -> dict[str, Path]:
    """Write ``<stem>.svg`` and ``<stem>.png``, each whole or not at all; return their paths.

    The same drawing gives the same SVG, byte for byte, inside a ``canvas.styled`` block.

    Args:
        drawn: a figure of matplotlib.
        folder: made if it is missing.
        stem: name of the files without their ends.
        dpi: dots per inch of the PNG; an SVG has none.

    Raises:
        InvalidInput: the folder cannot be written.
    """
    paths = {kind: folder / f"{stem}.{kind}" for kind in KINDS}
    options = {"bbox_inches": "tight", "pad_inches": 0.08, "facecolor": colors.PAGE, "dpi": dpi}
    for kind, path in paths.items():
        dated = {"metadata": {"Date": None}} if kind == "svg" else {}
        write_atomically(path, partial(drawn.savefig, format=kind, **options, **dated))
    return paths


__all__ = ["KINDS", "save"]
