"""Draw figures of reproduced items: curves, heat maps and diagrams, side by side."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.validate import require
from ..drawing import canvas, figure_files
from ..drawing.canvas import FigureSize

FONT = 9.0
"""Points of titles; headlines have one more, and lines of text below one less."""
MARKED = 40
"""Maximum of points of a curve that shows each of them."""
TICKS = 8
"""Maximum of places of a logarithmic axis that names each."""
DASHES = ("-", "--", "-.", ":")
"""Dashes in turns, so that curves which coincide show below one another."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A curve of a panel.

    Attributes:
        points: markers without a line.
        level: whether this is a line for comparison, such as a claim: grey, without markers.
        half: half the length of a 95 % interval around each point; empty for none.
        band: whether intervals are a band around the curve instead of bars.
        spoiled: places where most runs were stopped or collapsed: a red cross; empty for none.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    points: bool = False
    level: bool = False
    half: Sequence[float] = ()
    band: bool = False
    spoiled: Sequence[bool] = ()


@dataclass(frozen=True, kw_only=True)
class DiagramBox:
    """A part of a diagram: text in a box around ``(x, y)``; an arrow comes from the box before."""

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
        names: names of the places 1, 2, ... of the horizontal axis; empty for numbers.
    """

    title: str
    x_label: str = ""
    y_label: str = ""
    lines: Sequence[Line] = ()
    log_x: bool = False
    log_y: bool = False
    image: Sequence[Sequence[float]] = ()
    boxes: Sequence[DiagramBox] = ()
    names: Sequence[str] = ()


def withheld(title: str, reason: str) -> Panel:
    """Return what stands in the place of a panel that would show nothing of its methods."""
    said = "not drawn:\n" + textwrap.fill(reason, 44)
    return Panel(title=title, boxes=[DiagramBox(text=said, x=0.0, y=0.0)])


def draw(
    panels: Sequence[Panel], headline: str, folder: Path, stem: str, *, footer: str = ""
) -> dict[str, Path]:
    """Write the panels below their headline, with a line of text below all of them.

    Returns the paths of the files, an SVG and a PNG.

    Raises:
        InvalidInput: the folder cannot be written.
        MissingDependency: without matplotlib.
    """
    columns = min(len(panels), 2)  # a page is as wide as two panels with letters that can be read
    lines = -(-len(panels) // columns)
    size = columns * max(map(_width, panels)), lines * max(map(_height, panels))
    with canvas.styled(FigureSize(width=size[0], font=FONT)):
        figures = require("matplotlib.figure")
        figure = figures.Figure(figsize=size, layout="constrained")
        for number, panel in enumerate(panels, start=1):
            axes = figure.add_subplot(lines, columns, number)
            axes.set_title(panel.title, fontsize=FONT)
            if panel.image:
                axes.set_axis_off()
                figure.colorbar(axes.imshow(panel.image, cmap="magma"), ax=axes, shrink=0.8)
            elif panel.boxes:
                _draw_boxes(axes, panel.boxes)
            else:
                _draw_lines(axes, panel)
        figure.suptitle(headline, fontsize=FONT + 1)
        if footer:
            figure.supxlabel("\n" + textwrap.fill(footer, int(14 * size[0])), fontsize=FONT - 1)
        return figure_files.save(figure, folder, stem)


def _width(panel: Panel) -> float:
    """Return the width in inches: a box of a diagram has 1.4."""
    return max(4.6, 1.4 * len({box.x for box in panel.boxes}))


def _height(panel: Panel) -> float:
    """Return the height in inches, with the legend below the axes; a box of a diagram has 0.9."""
    if panel.boxes:
        return 0.8 + 0.9 * len({box.y for box in panel.boxes})
    legend = 0.17 * math.ceil(sum(bool(line.label) for line in panel.lines) / 2)
    return 3.6 + legend + (0.5 if panel.names else 0)


def _draw_lines(axes: Any, panel: Panel) -> None:
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.grid(visible=True)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xscale("log" if panel.log_x else "linear")
    axes.set_yscale("log" if panel.log_y else "linear")
    crosses: list[tuple[float, float]] = []
    for number, line in enumerate(panel.lines):
        drawn = [
            (x, y, half)
            for x, y, half in zip(line.x, line.y, line.half or [0.0] * len(line.x), strict=True)
            if math.isfinite(x) and math.isfinite(y)
        ]
        if not drawn:
            continue
        style: dict[str, Any] = {"linestyle": DASHES[number % len(DASHES)]}
        if line.level:
            style |= {"color": "0.35", "linewidth": 1}
        elif line.points:
            # A ring around a point: two series that coincide are both seen.
            style = {"linestyle": "none", "marker": "o", "markersize": 4}
            style |= {} if number else {"markersize": 8, "fillstyle": "none"}
        elif len(drawn) <= MARKED:
            style |= {"marker": "."}
        x, y, half = zip(*drawn, strict=True)
        for here, there, bad in zip(line.x, line.y, line.spoiled, strict=False):
            if bad and math.isfinite(there):
                crosses.append((here, there))
        if line.half and line.band:
            (curve,) = axes.plot(x, y, label=line.label, **style)
            low, high = ([b + sign * h for b, h in zip(y, half, strict=True)] for sign in (-1, 1))
            axes.fill_between(x, low, high, color=curve.get_color(), alpha=0.15, linewidth=0)
        elif line.half:
            bars = [one if math.isfinite(one) else math.nan for one in half]
            axes.errorbar(x, y, yerr=bars, label=line.label, capsize=2, elinewidth=0.8, **style)
        else:
            axes.plot(x, y, label=line.label, **style)
    if crosses:
        wrong = "most runs stopped or collapsed"
        crossed = {"linestyle": "none", "marker": "x", "color": "red", "zorder": 3}
        axes.plot(*zip(*crosses, strict=True), label=wrong, **crossed)
    places = sorted({x for line in panel.lines for x in line.x})
    if panel.log_x and len(places) <= TICKS:
        axes.set_xticks(places, labels=[f"{x:g}" for x in places])
        axes.set_xticks([], minor=True)
    if panel.names:
        axes.set_xticks(range(1, len(panel.names) + 1), labels=panel.names, fontsize=FONT - 1)
        long = max(map(len, panel.names)) > 3
        axes.tick_params("x", rotation=20 if long else 0)
        axes.set_xlim(0.5, len(panel.names) + 0.5)
    if any(line.label for line in panel.lines):
        # Below: nothing there hides a curve.
        below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16), "ncols": 2}
        if max(map(len, panel.names), default=0) > 3:
            below["bbox_to_anchor"] = (0.5, -0.3)
        shapes = {"band" if line.band else "bars" for line in panel.lines if line.half}
        title = f"{' and '.join(sorted(shapes))}: 95 % intervals" if shapes else None
        small = {"fontsize": FONT - 1, "title": title, "title_fontsize": FONT - 1}
        axes.legend(frameon=False, handlelength=3.5, **small, **below)


def _draw_boxes(axes: Any, boxes: Sequence[DiagramBox]) -> None:
    axes.set_axis_off()
    for place, box in enumerate(boxes):
        frame = {"boxstyle": "round", "facecolor": "white"}
        if place and box.arrow:
            before = boxes[place - 1]
            axes.plot([before.x, box.x], [before.y, box.y], color="black", linewidth=1, zorder=1)
            # The tip in the middle: the ends lie under the boxes.
            middle = ((before.x + box.x) / 2, (before.y + box.y) / 2)
            tip = {"arrowstyle": "-|>", "color": "black"}
            axes.annotate("", middle, (before.x, before.y), arrowprops=tip, zorder=1)
        axes.text(box.x, box.y, box.text, ha="center", va="center", fontsize=7, bbox=frame)
    across, up = ([getattr(box, side) for box in boxes] for side in ("x", "y"))
    axes.set_xlim(min(across) - 1, max(across) + 1)
    axes.set_ylim(min(up) - 1, max(up) + 1)
