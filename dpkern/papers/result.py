"""What a reproduced table or figure consists of, and how it is written: JSON, CSV, PNG.

Every row carries the published value beside ours, and the epsilon that the source claims beside
the one that is certified. Where a source prints nothing, the row says so; where data are generated,
the row says that.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from .._validate import require
from ..train.files import write_atomically
from ..train.report import dumps, plain

NONE_PUBLISHED = "none published"
FORMULA = "formula"
"""The data of a row that needs none."""
MARKED = 40
"""Points up to which a curve shows each of them."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One number of a source beside ours.

    Attributes:
        item: table or figure.
        setting: which cell of it.
        quantity: what ``published`` and ``ours`` are.
        published: the source's number, or text such as a range; None: it prints none.
        ours: the number found here.
        epsilon_claimed: by the source's rule; None where the row is not about privacy.
        epsilon_certified: proved for what is released; infinite where nothing is.
        relation: which data sets count as neighbours for ``epsilon_certified``.
        data: name of the data, or ``formula``.
        seeds: number of repetitions behind ``ours``; 0: none is random.
        spread: half the range over the seeds, or half a 95 % interval where a note says so.
        ms_per_step: wall time of a training step, where that was asked for.
        note: what a reader must know about the row.
    """

    item: str
    setting: str
    quantity: str
    published: float | str | None = None
    ours: float | str | None = None
    epsilon_claimed: float | None = None
    epsilon_certified: float | None = None
    relation: str = ""
    data: str = FORMULA
    seeds: int = 0
    spread: float | None = None
    ms_per_step: float | None = None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A curve of a panel; ``points`` draws markers without a line."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    points: bool = False


@dataclass(frozen=True, kw_only=True)
class Box:
    """A part of a diagram: text in a box around ``(x, y)``; an arrow comes from the one before."""

    text: str
    x: float
    y: float
    arrow: bool = True


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One set of axes, of an image, or of a diagram.

    Attributes:
        image: rows of numbers, drawn as a heat map in the place of lines.
        boxes: drawn in the place of lines and axes.
    """

    title: str
    x_label: str = ""
    y_label: str = ""
    lines: Sequence[Line] = ()
    log_x: bool = False
    log_y: bool = False
    image: Sequence[Sequence[float]] = ()
    boxes: Sequence[Box] = ()


@dataclass(frozen=True, kw_only=True)
class Result:
    """A reproduced item.

    Attributes:
        paper, item: what was asked for.
        title: in words.
        rows: the table.
        panels: the figure; without any, published and own numbers are drawn row by row.
        notes: readings, defects by their register's id, and what the data are.
        settings: the numbers that the item was computed with.
    """

    paper: str
    item: str
    title: str
    rows: Sequence[Row]
    panels: Sequence[Panel] = ()
    notes: Sequence[str] = ()
    settings: dict[str, Any]

    @property
    def stem(self) -> str:
        """Of the file names."""
        return f"{self.paper}-{self.item}" if self.item else self.paper

    def to_dict(self) -> dict[str, Any]:
        """In JSON terms; infinity is ``"inf"``, an unpublished value ``"none published"``."""
        content: dict[str, Any] = plain(asdict(self))
        for row in content["rows"]:
            row["published"] = NONE_PUBLISHED if row["published"] is None else row["published"]
        return content

    def write(self, folder: Path, *, figure: bool = True) -> dict[str, Path]:
        """Write ``<paper>-<item>.json``, ``.csv`` and ``.png``, each whole or not at all.

        Raises:
            InvalidInput: the folder cannot be written.
            MissingDependency: a figure without matplotlib.
        """
        paths = {kind: folder / f"{self.stem}.{kind}" for kind in ("json", "csv", "png")}
        if figure:
            _draw(self, paths["png"])
        else:
            del paths["png"]
        write_atomically(paths["csv"], lambda file: file.write(self.csv().encode()))
        text = dumps(self.to_dict(), indent=2) + "\n"
        write_atomically(paths["json"], lambda file: file.write(text.encode()))
        return paths

    def csv(self) -> str:
        """The rows, with a header."""
        text = io.StringIO()
        names = [field.name for field in fields(Row)]
        writer = csv.DictWriter(text, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.to_dict()["rows"])
        return text.getvalue()


def _draw(result: Result, path: Path) -> None:
    figures = require("matplotlib.figure", extra="demo")
    agg = require("matplotlib.backends.backend_agg", extra="demo")
    panels = list(result.panels) or [_of_rows(result)]
    columns = 2 if len(panels) == 4 else min(len(panels), 3)
    lines = -(-len(panels) // columns)
    figure = figures.Figure(figsize=(4.6 * columns, 3.6 * lines), layout="constrained")
    for number, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(lines, columns, number)
        axes.set_title(panel.title, fontsize=9)
        if panel.image or panel.boxes:
            _draw_picture(figure, axes, panel)
            continue
        axes.set_xlabel(panel.x_label)
        axes.set_ylabel(panel.y_label)
        axes.grid(alpha=0.3)
        axes.set_xscale("log" if panel.log_x else "linear")
        axes.set_yscale("log" if panel.log_y else "linear")
        for line in panel.lines:
            drawn = [
                (x, y)
                for x, y in zip(line.x, line.y, strict=True)
                if math.isfinite(x) and math.isfinite(y)
            ]
            if drawn:
                style = {"linestyle": "none"} if line.points else {}
                style |= {"marker": "."} if line.points or len(drawn) <= MARKED else {}
                axes.plot(*zip(*drawn, strict=True), label=line.label, **style)
        if any(line.label for line in panel.lines):
            axes.legend(fontsize=7)
    figure.suptitle(f"{result.paper} {result.item}: {result.title}", fontsize=10)
    canvas = agg.FigureCanvasAgg(figure)
    write_atomically(path, lambda file: canvas.print_png(file))


def _draw_picture(figure: Any, axes: Any, panel: Panel) -> None:
    """A heat map with its scale, or a diagram, without axes."""
    axes.set_axis_off()
    if panel.image:
        figure.colorbar(axes.imshow(panel.image, cmap="magma"), ax=axes, shrink=0.8)
        return
    for place, box in enumerate(panel.boxes):
        frame = {"boxstyle": "round", "facecolor": "white"}
        if place and box.arrow:
            before = panel.boxes[place - 1]
            axes.plot([before.x, box.x], [before.y, box.y], color="black", linewidth=1, zorder=1)
            # The tip in the middle: the ends lie under the boxes.
            middle = ((before.x + box.x) / 2, (before.y + box.y) / 2)
            tip = {"arrowstyle": "-|>", "color": "black"}
            axes.annotate("", middle, (before.x, before.y), arrowprops=tip, zorder=1)
        axes.text(box.x, box.y, box.text, ha="center", va="center", fontsize=7, bbox=frame)
    across, up = ([getattr(box, side) for box in panel.boxes] for side in ("x", "y"))
    axes.set_xlim(min(across) - 1, max(across) + 1)
    axes.set_ylim(min(up) - 1, max(up) + 1)


def _of_rows(result: Result) -> Panel:
    """Numbers over the number of their row."""
    found: dict[str, list[tuple[int, float]]] = {"published": [], "ours": []}
    for number, row in enumerate(result.rows, start=1):
        for name, value in (("published", row.published), ("ours", row.ours)):
            if isinstance(value, (int, float)):
                found[name].append((number, float(value)))
    lines = [
        Line(label=name, x=[x for x, _ in points], y=[y for _, y in points], points=True)
        for name, points in found.items()
    ]
    quantities = sorted({row.quantity for row in result.rows})
    label = quantities[0] if len(quantities) == 1 else "value"
    return Panel(title=result.title, x_label="row of the table", y_label=label, lines=lines)
