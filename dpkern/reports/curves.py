"""Draw curves with their names at their ends and marks with labels; draw rooflines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import numpy as np

from ..base.report import Figure, Series
from ..base.validate import require
from ..drawing import canvas, colors
from ..drawing.canvas import FigureAxes, FigureSize
from ..drawing.number_format import wrapped
from . import labels

DIRECT = 12
"""Maximum of points that get their names beside them; more get a legend."""
BESIDE = 8
"""Maximum of lines that get their names at their ends."""

Names = dict[str, float] | None
"""Places of an axis of words; None for an axis of numbers."""


def draw(figure: Figure, size: FigureSize, title: str = "") -> Any:
    """Draw ``lines`` and ``roofline``."""
    sheet = FigureAxes(size, 3.3 if size.narrow else 3.6, title)
    names = _names(figure)
    artists: list[Any] = []
    coloured = 0
    _boxes(figure, sheet.axes)
    for series in figure.series:
        roof = _is_roof(figure, series)
        artists.append(_one(sheet.axes, figure, series, coloured, names, roof=roof))
        coloured += not roof
    _axes(figure, sheet, names)
    lines = [k for k, s in enumerate(figure.series) if not s.points and figure.kind == "lines"]
    beside = lines if not size.narrow and len(lines) <= BESIDE else []
    direct = _single_points(figure)
    listed = [
        k
        for k, s in enumerate(figure.series)
        if s.label and k not in beside and not _is_roof(figure, s) and not (s.points and direct)
    ]
    if listed and len(figure.series) > 1:
        chosen = [figure.series[k].label for k in listed]
        sheet.legend([artists[k] for k in listed], chosen)
    ends = {artists[k]: wrapped(figure.series[k].label, 22) for k in beside}
    if ends:
        widths = [sheet.text_size(text, size.font)[0] for text in ends.values()]
        sheet.room_beside(max(widths) + 14)
    sheet.freeze()
    _end_labels(sheet, ends)
    _marks(sheet, figure, artists, names, direct)
    return sheet.figure


def _is_roof(figure: Figure, series: Series) -> bool:
    return figure.kind == "roofline" and not series.points


def _names(figure: Figure) -> Names:
    found = dict.fromkeys(x for series in figure.series for x in series.x)
    if not any(isinstance(x, str) for x in found):
        return None
    return {str(x): float(i) for i, x in enumerate(found)}


def _place(x: float | str, names: Names) -> float:
    return float(x) if names is None else names[str(x)]


def _numbers(figure: Figure, series: Series, names: Names) -> tuple[list[float], list[float]]:
    """Return what can be drawn: gaps and what a logarithm does not take become NaN."""
    x = [_place(value, names) for value in series.x]
    y = [math.nan if value is None else float(value) for value in series.y]
    if figure.log_x:
        x = [v if v > 0 else math.nan for v in x]
    if figure.log_y:
        y = [v if v > 0 else math.nan for v in y]
    if figure.probit:
        x, y = [probit(v) for v in x], [probit(v) for v in y]
    return x, y


def probit(probability: float) -> float:
    """Return the normal quantile; NaN at 0, at 1 and for NaN."""
    return NormalDist().inv_cdf(probability) if 0 < probability < 1 else math.nan


def _boxes(figure: Figure, axes: Any) -> None:
    """Draw areas behind the lines; they ask for no room of their own."""
    patches = require("matplotlib.patches")
    for box in figure.boxes:
        left, bottom, right, top = map(probit, box) if figure.probit else box
        style = {"facecolor": colors.OTHER, "alpha": 0.35, "edgecolor": "none", "zorder": 1}
        axes.add_patch(patches.Rectangle((left, bottom), right - left, top - bottom, **style))


def _one(axes: Any, figure: Figure, series: Series, k: int, names: Names, *, roof: bool) -> Any:
    x, y = _numbers(figure, series, names)
    colour = colors.DATA[k % len(colors.DATA)]
    style: dict[str, Any]
    if roof:
        style = {"color": colors.MUTED, "linewidth": 1.4, "zorder": 2}
    elif series.points:
        style = {"linestyle": "none", "color": colour, "zorder": 4}
        style |= {
            "marker": colors.MARKERS[k % len(colors.MARKERS)],
            # Small where an interval around the point is to be seen.
            "markersize": 8 if len(x) <= 20 and not figure.boxes else 4.5,
        }
        style |= {"markeredgecolor": colors.PAGE, "markeredgewidth": 0.7}
    else:
        dash = colors.DASHES[(k // len(colors.DATA)) % len(colors.DASHES)]
        style = {"linestyle": dash, "color": colour, "linewidth": 1.8, "zorder": 3}
        style |= {"marker": "o", "markersize": 3.2} if len(x) <= 12 else {}
    (line,) = axes.plot(x, y, label=series.label, **style)
    line.set_gid(f"tip:{series.label}")
    return line


def _axes(figure: Figure, sheet: FigureAxes, names: Names) -> None:
    axes, crowded = sheet.axes, sheet.size.narrow
    axes.grid(True)
    axes.set_xlabel(figure.x_label)
    sheet.value_label(figure.y_label)
    axes.set_xscale("log" if figure.log_x else "linear")
    axes.set_yscale("log" if figure.log_y else "linear")
    if figure.probit:
        canvas.probabilities(axes.xaxis, probit, crowded=crowded)
        canvas.probabilities(axes.yaxis, probit, crowded=False)
        return
    if figure.kind == "roofline":
        axes.set_ylim(top=axes.get_ylim()[1] * 1.6)  # names stand on the ceilings
    pairs = [_numbers(figure, series, names) for series in figure.series]
    canvas.scale(axes.yaxis, [v for _, y in pairs for v in y], log=figure.log_y, crowded=crowded)
    if names is None:
        places = [v for x, _ in pairs for v in x]
        canvas.scale(axes.xaxis, places, log=figure.log_x, crowded=crowded)
        return
    ticker = require("matplotlib.ticker")
    axes.xaxis.set_major_locator(ticker.FixedLocator(list(names.values())))
    axes.xaxis.set_major_formatter(ticker.FixedFormatter([wrapped(n, 12) for n in names]))


def _single_points(figure: Figure) -> bool:
    """Whether every series of points is one point, with a name worth writing beside it."""
    points = [s for s in figure.series if s.points]
    return 0 < len(points) <= DIRECT and all(len(s.x) == 1 and s.label for s in points)


def _end_labels(sheet: FigureAxes, wrapped: dict[Any, str]) -> None:
    """Write each line's name to the right of the axes, tied to the line's end by a thin one."""
    box, font = sheet.axes.get_window_extent(), sheet.size.font
    ends: dict[Any, tuple[float, float]] = {}
    for line in wrapped:
        points = _finite(np.column_stack(line.get_data()))
        if len(points):
            x, y = sheet.axes.transData.transform(points[-1])
            ends[line] = (float(x), float(np.clip(y, box.y0, box.y1)))
    if not ends:
        return
    gap = 2 + max(sheet.text_size(wrapped[line], font)[1] for line in ends)
    # From left to right: of lines that end at one height the rightmost is named on top, so that the
    # thin lines do not cross.
    ends = dict(sorted(ends.items(), key=lambda end: end[1][0]))
    wanted = [y for _, y in ends.values()]
    placed = labels.spread(wanted, gap, box.y0 + gap / 2, box.y1 - gap / 2)
    for (line, (x, y)), at in zip(ends.items(), placed, strict=True):
        sheet.rule((x + 2, y), (box.x1 + 10, at), line.get_color())
        place = sheet.fraction(box.x1 + 13, at)
        sheet.figure.text(*place, wrapped[line], va="center_baseline", linespacing=1.1)


def _finite(points: Any) -> Any:
    return points[np.isfinite(points).all(axis=1)]


def _marks(
    sheet: FigureAxes, figure: Figure, artists: list[Any], names: Names, direct: bool
) -> None:
    """Draw rings with labels, names of single points, and names along the limits of a roofline."""
    axes, font = sheet.axes, sheet.size.font - 0.6
    placer = labels.Placer(axes, [labels.samples(axes, *a.get_data()) for a in artists])
    words: list[tuple[float, float, str]] = []
    ring = {"marker": "o", "markersize": 7, "markerfacecolor": colors.PAGE, "zorder": 6}
    ring |= {"markeredgecolor": colors.INK, "markeredgewidth": 1.3, "linestyle": "none"}
    pairs = zip(figure.series, artists, strict=True)
    drawn = {place for s, a in pairs if s.points for place in zip(*a.get_data(), strict=True)}
    for mark in figure.marks:
        x, y = _place(mark.x, names), mark.y
        if figure.probit:
            x, y = probit(x), probit(y)
        if (x, y) not in drawn:  # a point has its own sign
            axes.plot([x], [y], scalex=False, scaley=False, **ring)
        words.append((x, y, mark.text))
    for series, artist in zip(figure.series, artists, strict=True):
        if series.points and direct:
            words.append((artist.get_xdata()[0], artist.get_ydata()[0], series.label))
    words = [word for word in words if math.isfinite(word[0]) and math.isfinite(word[1])]
    for x, y, _ in words:
        px, py = axes.transData.transform((x, y))
        placer.taken((px - 5, py - 5, px + 5, py + 5))
    roofs = [a for s, a in zip(figure.series, artists, strict=True) if _is_roof(figure, s)]
    _limits(sheet, roofs, placer)
    for x, y, text in words:
        lines = wrapped(text, 24 if sheet.size.narrow else 32)
        width, height = sheet.text_size(lines, font)
        left, bottom = placer.place(x, y, (width, height))
        px, py = axes.transData.transform((x, y))
        near = (
            float(np.clip(px, left, left + width)),
            float(np.clip(py, bottom, bottom + height)),
        )
        if math.dist((px, py), near) > 12:  # tied to its point where it stands away from it
            sheet.rule((px, py), near, colors.MUTED)
        sheet.write_at((left, bottom), lines, fontsize=font, zorder=7)


def _limits(sheet: FigureAxes, limits: Sequence[Any], placer: labels.Placer) -> None:
    """Write a slope's name along it, above its middle, and a ceiling's on its right end.

    A limit of several pieces has its name on the last one.
    """
    font = sheet.size.font - 0.6
    for line in limits:
        ends = _finite(sheet.axes.transData.transform(np.column_stack(line.get_data())))
        if len(ends) < 2:
            continue
        (x0, y0), (x1, y1) = ends[-2], ends[-1]
        width, height = sheet.text_size(line.get_label(), font)
        slope = math.atan2(y1 - y0, x1 - x0)
        rising = slope > 0.1
        x, y = ((x0 + x1) / 2, (y0 + y1) / 2) if rising else (x1, y1)
        y += 4 / math.cos(slope)
        sheet.figure.text(
            *sheet.fraction(x, y),
            line.get_label(),
            rotation=math.degrees(slope) if rising else 0,
            rotation_mode="anchor",
            ha="center" if rising else "right",
            va="bottom",
            fontsize=font,
            color=colors.MUTED,
        )
        if not rising:
            placer.taken((x - width, y - 4, x, y + height))
            continue
        for along in np.linspace(-width / 2, width / 2, 12):
            px, py = x + along * math.cos(slope), y + along * math.sin(slope)
            placer.taken((px - 4, py, px + 4, py + height))
