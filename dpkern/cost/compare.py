"""The report of several mechanisms on several processors and sizes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .autoencoder import Options
from .processors import Processor
from .report import Report


def report(
    mechanisms: Sequence[str] = ("spof", "dpsgd-da"),
    *,
    sizes: Sequence[tuple[int, int]] = ((14, 7),),
    processors: Sequence[str | Path | Processor] = ("k7",),
    options: Options | None = None,
) -> Report:
    raise NotImplementedError
