"""The report of a run, as JSON and as a figure.

Only parameters and noised values are covered by epsilon. What else was seen while training stands
under ``diagnostics`` and is left out unless it was asked for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .._validate import require
from .files import write_atomically

DIAGNOSTICS_NOTE = "not covered by epsilon"


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """State after an epoch.

    ``epsilon`` is the certified one, infinite without privacy or with a known seed, and None
    where it was not computed; ``epsilon_if_seed_secret`` is given for seeded runs.
    """

    epoch: int
    step: int
    heldout_loss: float
    heldout_accuracy: float
    epsilon: float | None = None
    epsilon_if_seed_secret: float | None = None

    @property
    def shown_epsilon(self) -> float | None:
        """The number worth plotting; the caller labels it."""
        secret = self.epsilon_if_seed_secret
        return self.epsilon if secret is None else secret


def plain(value: Any) -> Any:
    """In JSON terms: tuples as lists, non-finite numbers as the strings inf, -inf, nan."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, range)):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def dumps(value: Any, *, indent: int | None = None) -> str:
    """Strict JSON: an infinity that ``plain`` missed is an error, not a word no parser knows."""
    return json.dumps(plain(value), indent=indent, allow_nan=False)


def write_report(path: Path, report: dict[str, Any], history: Sequence[Any]) -> None:
    """The report with one record per epoch, each a dataclass, atomically."""
    content = report | {"history": [asdict(epoch) for epoch in history]}
    text = dumps(content, indent=2) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()))


def write_figure(path: Path, history: Sequence[Epoch], *, title: str, epsilon_label: str) -> None:
    """Held-out loss, held-out accuracy and epsilon over the epochs, as PNG.

    An infinite epsilon is said in words instead of drawn.

    Raises:
        MissingDependency: without matplotlib.
    """
    figures = require("matplotlib.figure", extra="demo")
    agg = require("matplotlib.backends.backend_agg", extra="demo")
    # Figure and canvas without pyplot: no global state, no display, works in any thread.
    figure = figures.Figure(figsize=(11, 3.4), layout="constrained")
    epochs = [record.epoch for record in history]
    panels: tuple[tuple[str, list[float | None]], ...] = (
        ("held-out loss", [record.heldout_loss for record in history]),
        ("held-out accuracy", [record.heldout_accuracy for record in history]),
        (epsilon_label, [record.shown_epsilon for record in history]),
    )
    for number, (label, values) in enumerate(panels, start=1):
        axes = figure.add_subplot(1, 3, number)
        axes.set_title(label)
        axes.set_xlabel("epoch")
        axes.grid(alpha=0.3)
        drawn = [
            (epoch, value)
            for epoch, value in zip(epochs, values, strict=True)
            if value is not None and math.isfinite(value)
        ]
        if drawn:
            axes.plot(*zip(*drawn, strict=True), marker="o", markersize=3)
        else:
            text = "infinite" if any(value is not None for value in values) else "spent at once"
            axes.text(0.5, 0.5, text, ha="center", transform=axes.transAxes)
    figure.suptitle(title)
    canvas = agg.FigureCanvasAgg(figure)
    write_atomically(path, lambda file: canvas.print_png(file))
