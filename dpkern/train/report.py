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
from ..drawing import canvas, figure_files
from ..drawing.canvas import FigureSize
from ..privacy.accounting import shown_bound
from ..privacy.accounting.shown import ShownBound

FONT = 9.5
"""Points of a figure's text."""
CERTIFIED = ("delta", "relation", "accountant", "certified_for")
"""The facts that a report repeats of its certificate, beside the epsilon."""


@dataclass(frozen=True, kw_only=True)
class FigureSpec:
    """The contents of a figure.

    Attributes:
        title: above all panels.
        panels: curves by name: one value for each epoch, None where it was not computed.
        levels: horizontal lines by panel and name.
        baselines: lines to compare with, by panel and name; on the page only.
    """

    title: str
    panels: Mapping[str, Sequence[float | None]]
    levels: Mapping[str, Mapping[str, ShownBound]] = field(default_factory=dict)
    baselines: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


def statement(facts: Mapping[str, Any], certificate: Mapping[str, Any]) -> str:
    """State the privacy of a run in one sentence."""
    epsilon, delta = certificate["epsilon"], certificate["delta"]
    if epsilon != "inf":
        what = shown_bound(epsilon)
        what = f"({what}, {shown_bound(delta)})" if delta else what
        return (
            f"{what}-differentially private if {_relation(certificate['relation'])}: proved for "
            f"{certificate['certified_for']}"
        )
    if math.isfinite(float(facts.get("epsilon_if_seed_secret", math.inf))):
        return "not private against anyone who knows the seed of the noise"
    return f"not private: {facts['non_private'] or 'nothing can be certified'}"


def _relation(relation: str) -> str:
    """Return what neighbouring data sets differ in, as a sentence without its full stop."""
    kind, _, rest = relation.partition(", ")
    return _RELATIONS.get(kind, kind) + (f" ({rest})" if rest else "")


_RELATIONS = {
    "add_remove": "one record is added or removed",
    "replace_one": "one record is replaced",
    "zero_out": "the contribution of one record is set to zero",
}


def write_report(path: Path, report: dict[str, Any], history: Sequence[Any]) -> None:
    """Write the report with one record per epoch, each a dataclass, atomically."""
    content = report | {"history": [asdict(epoch) for epoch in history]}
    text = dumps(content, indent=2) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()))


def write_figure(
    path: Path, history: Sequence[Any], drawn: FigureSpec, *, collapsed: bool = False
) -> None:
    """Draw the panels over the epochs, side by side, as PNG and SVG.

    An infinite value is said in words instead of drawn, and so is a run that diverged, or whose
    outputs are the same for every record.

    Raises:
        MissingDependency: without matplotlib.
    """
    width = 2.0 + 3 * len(drawn.panels)
    with canvas.styled(FigureSize(width=width, font=FONT)):
        figure = _figure(history, drawn, width, collapsed=collapsed)
        figure_files.save(figure, path.parent, path.stem)


def _figure(history: Sequence[Any], drawn: FigureSpec, width: float, *, collapsed: bool) -> Any:
    # Without pyplot: no display and no figure that stays open.
    figure = require("matplotlib.figure").Figure(figsize=(width, 3.4), layout="constrained")
    epochs = [record.epoch for record in history]
    diverged = bool(history) and getattr(history[-1], "diverged", False)
    for number, (label, values) in enumerate(drawn.panels.items(), start=1):
        axes = figure.add_subplot(1, len(drawn.panels), number)
        axes.set_title(label)
        axes.set_xlabel("epoch")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(visible=True)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
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
    same = "\nCOLLAPSED: every held-out record gets the same output"
    figure.suptitle(drawn.title + (same if collapsed else ""))
    return figure
