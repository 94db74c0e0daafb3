"""The report of one mechanism: what its step takes, line by line, and what that costs."""

from __future__ import annotations

from pathlib import Path

from .autoencoder import Options
from .processors import Processor
from .report import Report


def report(
    mechanism: str = "spof",
    *,
    size: tuple[int, int] = (14, 7),
    processor: str | Path | Processor = "k7",
    options: Options | None = None,
) -> Report:
    raise NotImplementedError
