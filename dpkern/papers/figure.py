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
SHORT, LONG = 3, 72
"""Maximum of letters of names that stand upright below an axis, and of a line of those beside one.
"""
DASHES = ("-", "--", "-.", ":")
"""Dashes in turns, so that curves which coincide show below one another."""
CROSSED = "most runs stopped or collapsed"
PRINTED = "published"
"""The last word of the label of a source's points: rings, in the colour of our curve."""
NARROW, WIDE = 4.6, 8.4
"""Inches of a panel with curves, and of one with a row for each name."""
LETTER = 0.06
"""Inches of a letter of a legend or name, on average."""
POSSIBLE = {"accuracy %": (0.0, 100.0), "accuracy": (0.0, 1.0)}
"""Numbers that a vertical axis can have, by its label: intervals are not drawn beyond."""
LEAN = 20
"""Degrees by which long names below an axis are turned."""


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
        extent: places of the first and last column of the image, then of its first and last row,
            which stands above then; empty draws no axes.
        boxes: drawn in the place of lines and axes.
        names: names of the places 1, 2, ... of the horizontal axis; empty for numbers.
        rows: names of the places 1, 2, ... of the vertical axis, from above; what is infinite
            stands at the right edge.
    """

    title: str
    x_label: str = ""
    y_label: str = ""
    lines: Sequence[Line] = ()
    log_x: bool = False
    log_y: bool = False
    image: Sequence[Sequence[float]] = ()
    extent: Sequence[float] = ()
    boxes: Sequence[DiagramBox] = ()
    names: Sequence[str] = ()
    rows: Sequence[str] = ()


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
    # A page is as wide as two panels with letters that can be read.
    columns = 1 if any(panel.rows for panel in panels) else min(len(panels), 2)
    lines = [panels[first : first + columns] for first in range(0, len(panels), columns)]
    width = columns * max(map(_width, panels))
    below = textwrap.wrap(footer, int(0.9 * width / LETTER))
    heights = [max(map(_height, line)) for line in lines]
    around = 0.2 * headline.count("\n") + 0.17 * (len(below) + 1) * bool(below)
    with canvas.styled(FigureSize(width=width, font=FONT)):
        figures = require("matplotlib.figure")
        figure = figures.Figure(figsize=(width, sum(heights) + around), layout="constrained")
        grid = figure.add_gridspec(len(lines), columns, height_ratios=heights)
        for number, panel in enumerate(panels):
            axes = figure.add_subplot(grid[divmod(number, columns)])
            axes.set_title(panel.title, fontsize=FONT)
            if panel.image:
                figure.colorbar(_draw_image(axes, panel), ax=axes, shrink=0.8)
            elif panel.boxes:
                _draw_boxes(axes, panel.boxes)
            else:
                _draw_lines(axes, panel)
        figure.suptitle(headline, fontsize=FONT + 1)
        if below:
            figure.supxlabel("\n" + "\n".join(below), fontsize=FONT - 1)
        return figure_files.save(figure, folder, stem)


def _width(panel: Panel) -> float:
    """Return the width in inches: a box of a diagram has 1.4."""
    usual = WIDE if panel.rows else NARROW
    return max(usual, 1.4 * len({box.x for box in panel.boxes}))


def _height(panel: Panel) -> float:
    """Return the height in inches, with the legend below the axes; a box of a diagram has 0.9."""
    if panel.boxes:
        return 0.8 + 0.9 * len({box.y for box in panel.boxes})
    if panel.image:
        return 2.6
    labels = [line.label for line in panel.lines if line.label]
    labels += [CROSSED] * bool(_crosses(panel.lines))
    legend = 0.17 * math.ceil(len(labels) / _legend_columns(labels, _width(panel)))
    legend += 0.17 * any(line.half for line in panel.lines)
    if panel.rows:
        most = max(name.count("\n") + 1 for name in _wrapped(panel.rows))
        return 1.0 + legend + (0.06 + 0.13 * most) * len(panel.rows)
    return 3.4 + legend + _drop(panel)


def _wrapped(rows: Sequence[str]) -> list[str]:
    return [textwrap.fill(name, LONG) for name in rows]


def _drop(panel: Panel) -> float:
    """Return the inches that names below the axis reach down, besides one line."""
    longest = max(map(len, panel.names), default=0)
    return LETTER * longest * math.sin(math.radians(LEAN)) if longest > SHORT else 0.0


def _legend_columns(labels: Sequence[str], width: float) -> int:
    """Return 2 where the two longest labels fit beside each other, else 1."""
    longest = sum(sorted(map(len, labels))[-2:])
    return 2 if LETTER * longest + 1.2 <= width else 1


def _draw_image(axes: Any, panel: Panel) -> Any:
    """Draw the heat map, with axes where its places are known."""
    if not panel.extent:
        axes.set_axis_off()
        return axes.imshow(panel.image, cmap="magma")
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    # Places are those of the middles of cells.
    first, last, below, above = panel.extent
    x, y = (
        ((last - first) / (len(panel.image[0]) - 1)) / 2,
        ((above - below) / (len(panel.image) - 1)) / 2,
    )
    extent = (first - x, last + x, below - y, above + y)
    return axes.imshow(panel.image, cmap="magma", origin="lower", extent=extent)


def _draw_lines(axes: Any, panel: Panel) -> None:
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.grid(visible=True)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xscale("log" if panel.log_x else "linear")
    axes.set_yscale("log" if panel.log_y else "linear")
    colors = _colors(panel.lines)
    for number, line in enumerate(panel.lines):
        limits = POSSIBLE.get(panel.y_label.removeprefix("best "), (-math.inf, math.inf))
        _draw_line(axes, line, colors[number], DASHES[number % len(DASHES)], limits)
        if panel.rows:
            _draw_infinite(axes, line, colors[number])
    if crosses := _crosses(panel.lines):
        crossed = {"linestyle": "none", "marker": "x", "color": "red", "zorder": 3}
        axes.plot(*zip(*crosses, strict=True), label=CROSSED, **crossed)
    _name_places(axes, panel)
    labels = axes.get_legend_handles_labels()[1]
    if labels:
        _draw_legend(axes, panel, labels)


def _colors(lines: Sequence[Line]) -> list[str]:
    """Return each line's colour; a source's points have that of the line that is ours."""
    bases = [line.label.removesuffix(PRINTED).rstrip(", ") or line.label for line in lines]
    own = list(
        dict.fromkeys(base for base, line in zip(bases, lines, strict=True) if not line.level)
    )
    return [
        "0.35" if line.level else f"C{own.index(base)}"
        for base, line in zip(bases, lines, strict=True)
    ]


def _draw_line(axes: Any, line: Line, color: str, dash: str, limits: tuple[float, float]) -> None:
    """Draw a line, its intervals cut where no number can be."""
    drawn = [
        (x, y, half)
        for x, y, half in zip(line.x, line.y, line.half or [0.0] * len(line.x), strict=True)
        if math.isfinite(x) and math.isfinite(y)
    ]
    if not drawn:
        return
    style: dict[str, Any] = {"linestyle": dash, "color": color}
    if line.level:
        style |= {"linewidth": 1}
    elif line.points:
        style |= {"linestyle": "none", "marker": "o", "markersize": 4}
        # A ring around a point: two series that coincide are both seen.
        style |= {"markersize": 8, "fillstyle": "none"} if line.label.endswith(PRINTED) else {}
    elif len(drawn) <= MARKED:
        style |= {"marker": "."}
    x, y, half = zip(*drawn, strict=True)
    known = [one if math.isfinite(one) else math.nan for one in half]
    low = [max(b - h, min(b, limits[0])) for b, h in zip(y, known, strict=True)]
    high = [min(b + h, max(b, limits[1])) for b, h in zip(y, known, strict=True)]
    if line.half and line.band:
        axes.plot(x, y, label=line.label, **style)
        axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
    elif line.half:
        bars = [
            [b - a for a, b in zip(low, y, strict=True)],
            [b - a for a, b in zip(y, high, strict=True)],
        ]
        axes.errorbar(x, y, yerr=bars, label=line.label, capsize=2, elinewidth=0.8, **style)
    else:
        axes.plot(x, y, label=line.label, **style)


def _draw_infinite(axes: Any, line: Line, color: str) -> None:
    """Draw an arrow at the right edge of every row whose number is infinite."""
    rows = [y for x, y in zip(line.x, line.y, strict=True) if x == math.inf]
    if rows:
        edge = {"transform": axes.get_yaxis_transform(), "clip_on": False}
        axes.plot(
            [1.0] * len(rows),
            rows,
            label=f"{line.label}, infinite",
            linestyle="none",
            marker=">",
            markersize=5,
            color=color,
            **edge,
        )


def _crosses(lines: Sequence[Line]) -> list[tuple[float, float]]:
    """Return the places where most runs were stopped or collapsed."""
    return [
        (x, y)
        for line in lines
        for x, y, bad in zip(line.x, line.y, line.spoiled, strict=False)
        if bad and math.isfinite(y)
    ]


def _name_places(axes: Any, panel: Panel) -> None:
    places = sorted({x for line in panel.lines for x in line.x if math.isfinite(x)})
    if panel.log_x and not panel.rows and len(places) <= TICKS:
        axes.set_xticks(places, labels=[f"{x:g}" for x in places])
        axes.set_xticks([], minor=True)
    elif not panel.log_x and not panel.names and all(float(x).is_integer() for x in places):
        locator = require("matplotlib.ticker").MaxNLocator(integer=True, steps=[1, 2, 5, 10])
        axes.xaxis.set_major_locator(locator)
    small: dict[str, Any] = {"fontsize": FONT - 1}
    if panel.names:
        turned = {"rotation": LEAN, "ha": "right", "rotation_mode": "anchor"}
        small |= turned if _drop(panel) else {}
        axes.set_xticks(range(1, len(panel.names) + 1), labels=panel.names, **small)
        axes.set_xlim(0.5, len(panel.names) + 0.5)
    elif panel.rows:
        axes.set_yticks(range(1, len(panel.rows) + 1), labels=_wrapped(panel.rows), **small)
        axes.set_ylim(len(panel.rows) + 0.7, 0.3)


def _draw_legend(axes: Any, panel: Panel, labels: Sequence[str]) -> None:
    """Draw the legend below the names of the axis: nothing there hides a curve or a letter."""
    transforms = require("matplotlib.transforms")
    depth = 0.28 + 0.2 * bool(panel.x_label) + _drop(panel)
    down = transforms.ScaledTranslation(0, -depth, axes.figure.dpi_scale_trans)
    shapes = {"band" if line.band else "bars" for line in panel.lines if line.half}
    axes.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, 0.0),
        bbox_transform=axes.transAxes + down,
        ncols=_legend_columns(labels, _width(panel)),
        frameon=False,
        handlelength=3.5,
        fontsize=FONT - 1,
        title=f"{' and '.join(sorted(shapes))}: 95 % intervals" if shapes else None,
        title_fontsize=FONT - 1,
    )


def _draw_boxes(axes: Any, boxes: Sequence[DiagramBox]) -> None:
    axes.set_axis_off()
    before: Any = None
    for box in boxes:
        frame = {"boxstyle": "round", "facecolor": "white"}
        text = axes.text(box.x, box.y, box.text, ha="center", va="center", fontsize=7, bbox=frame)
        if before is not None and box.arrow:
            # From edge to edge of the two boxes.
            arrow = {"arrowstyle": "-|>", "color": "black", "shrinkA": 0, "shrinkB": 0}
            arrow |= {"patchA": before.get_bbox_patch(), "patchB": text.get_bbox_patch()}
            axes.annotate("", text.get_position(), before.get_position(), arrowprops=arrow)
        before = text
    across, up = ([getattr(box, side) for box in boxes] for side in ("x", "y"))
    axes.set_xlim(min(across) - 1, max(across) + 1)
    axes.set_ylim(min(up) - 1, max(up) + 1)
