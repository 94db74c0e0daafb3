"""Write the report of a run, as JSON and as a figure: the part that all kinds of runs share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..base.json import dumps
from ..base.outputs import write_atomically
from ..base.validate import require
from ..privacy.accounting import shown_bound
from ..privacy.accounting.shown import ShownBound

CERTIFIED = ("delta", "relation", "accountant", "certified_for")
"""The facts that a report repeats of its certificate, beside the epsilon."""


@dataclass(frozen=True, kw_only=True)
class FigureSpec:
    """The contents of a figure.

    Attributes:
        title: above all panels.
        panels: curves by name: one value for each epoch, None where it was not computed.
        levels: horizontal lines by panel and name.
    """

    title: str
    panels: Mapping[str, Sequence[float | None]]
    levels: Mapping[str, Mapping[str, ShownBound]] = field(default_factory=dict)


def statement(facts: Mapping[str, Any], certificate: Mapping[str, Any]) -> str:
    """State the privacy of a run in one sentence."""
    epsilon, delta = certificate["epsilon"], certificate["delta"]
    if epsilon != "inf":
        what = shown_bound(epsilon)
        what = f"({what}, {shown_bound(delta)})" if delta else what
        return (
            f"{what}-differentially private: {certificate['relation']}, "
            f"for {certificate['certified_for']}"
        )
    if math.isfinite(float(facts.get("epsilon_if_seed_secret", math.inf))):
        return "not private against anyone who knows the seed of the noise"
    return f"not private: {facts['non_private'] or 'nothing can be certified'}"


def write_report(path: Path, report: dict[str, Any], history: Sequence[Any]) -> None:
    """Write the report with one record per epoch, each a dataclass, atomically."""
    content = report | {"history": [asdict(epoch) for epoch in history]}
    text = dumps(content, indent=2) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()))


def write_figure(path: Path, history: Sequence[Any], drawn: FigureSpec) -> None:
    """Draw the panels over the epochs, side by side, as PNG.

    An infinite value is said in words instead of drawn, and so is a run that diverged.

    Raises:
        MissingDependency: without matplotlib.
    """
    figures = require("matplotlib.figure")
    agg = require("matplotlib.backends.backend_agg")
    # Figure and canvas without pyplot: no global state, no display, works in any thread.
    figure = figures.Figure(figsize=(2 + 3 * len(drawn.panels), 3.4), layout="constrained")
    epochs = [record.epoch for record in history]
    diverged = bool(history) and getattr(history[-1], "diverged", False)
    for number, (label, values) in enumerate(drawn.panels.items(), start=1):
        axes = figure.add_subplot(1, len(drawn.panels), number)
        axes.set_title(label)
        axes.set_xlabel("epoch")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        known = [
            (epoch, value)
            for epoch, value in zip(epochs, values, strict=True)
            if value is not None and math.isfinite(value)
        ]
        if known:
            axes.plot(*zip(*known, strict=True), marker="o", markersize=3)
        for name, level in drawn.levels.get(label, {}).items():
            axes.axhline(level, linestyle="--", color="0.4")
            # Above its line, at the right end of the axes.
            where = {"transform": axes.get_yaxis_transform(), "ha": "right", "va": "bottom"}
            axes.text(0.98, level, f"{name} {level.shown()}", **where)
        if diverged or not known:
            text = "infinite" if any(value is not None for value in values) else "spent at once"
            text = "diverged" if diverged else text
            axes.text(0.5, 0.5, text, ha="center", transform=axes.transAxes)
    figure.suptitle(drawn.title)
    canvas = agg.FigureCanvasAgg(figure)
    write_atomically(path, lambda file: canvas.print_png(file))
