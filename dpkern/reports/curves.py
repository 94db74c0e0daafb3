"""Curves with their names at their ends and marks that say what they are; rooflines."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np

from .._validate import require
from ..cost.report import Figure, Series
from . import canvas, ink, labels
from .canvas import Size

DIRECT = 12
"""Points that get their names beside them; more get a legend."""


def draw(figure: Figure, size: Size) -> Any:
    """``lines`` and ``roofline``."""
    drawn, axes = canvas.sheet(size, 3.5 if size.narrow else 3.7)
    names = _names(figure)
    artists: list[Any] = []
    coloured = 0
    for series in figure.series:
        roof = figure.kind == "roofline" and not series.points
        artists.append(_one(axes, figure, series, coloured, names, roof=roof))
        coloured += not roof
    _axes(figure, size, axes, names)
    direct_points = _single_points(figure)
    lines = [k for k, s in enumerate(figure.series) if not s.points and figure.kind == "lines"]
    beside = not size.narrow and 0 < len(lines) <= 8
    in_legend = [
        k
        for k, s in enumerate(figure.series)
        if s.label
        and not (beside and k in lines)
        and not (figure.kind == "roofline" and not s.points)
        and not (s.points and direct_points)
    ]
    if len(in_legend) > (0 if len(figure.series) > 1 else 1):
        chosen = [figure.series[k].label for k in in_legend]
        canvas.legend(drawn, size, [artists[k] for k in in_legend], chosen)
    wrapped = {k: textwrap.fill(figure.series[k].label, 22) for k in lines} if beside else {}
    widths = [canvas.text_size(drawn, text, size.font)[0] for text in wrapped.values()]
    if widths:
        kept = 1 - (max(widths) + 14) / (size.width * 72)
        drawn.get_layout_engine().set(rect=(0, 0, kept, 1))
    canvas.freeze(drawn)
    if wrapped:
        _end_labels(drawn, axes, figure, artists, wrapped, size)
    _marks(drawn, axes, figure, artists, names, size, direct_points)
    return drawn


def _names(figure: Figure) -> dict[str, float] | None:
    """Places of an axis of words; None for numbers."""
    found = dict.fromkeys(x for series in figure.series for x in series.x)
    if not any(isinstance(x, str) for x in found):
        return None
    return {str(x): float(i) for i, x in enumerate(found)}


def _place(x: float | str, names: dict[str, float] | None) -> float:
    return float(x) if names is None else names[str(x)]


def _numbers(
    figure: Figure, series: Series, names: dict[str, float] | None
) -> tuple[list[float], list[float]]:
    """What can be drawn: gaps and what a logarithm does not take are not numbers."""
    x = [_place(value, names) for value in series.x]
    y = [math.nan if value is None else float(value) for value in series.y]
    if figure.log_x:
        x = [v if v > 0 else math.nan for v in x]
    if figure.log_y:
        y = [v if v > 0 else math.nan for v in y]
    return x, y


def _one(
    axes: Any, figure: Figure, series: Series, k: int, names: dict[str, float] | None, *, roof: bool
) -> Any:
    x, y = _numbers(figure, series, names)
    colour = ink.DATA[k % len(ink.DATA)]
    if roof:
        (line,) = axes.plot(x, y, color=ink.MUTED, linewidth=1.4, zorder=2, label=series.label)
    elif series.points:
        (line,) = axes.plot(
            *(x, y),
            linestyle="none",
            marker=ink.MARKERS[k % len(ink.MARKERS)],
            color=colour,
            markeredgecolor=ink.PAGE,
            markeredgewidth=0.7,
            markersize=8,
            zorder=4,
        )
    else:
        dash = ink.DASHES[(k // len(ink.DATA)) % len(ink.DASHES)]
        few = {"marker": "o", "markersize": 3.2} if len(x) <= 12 else {}
        (line,) = axes.plot(x, y, color=colour, linewidth=1.8, linestyle=dash, zorder=3, **few)
    line.set_gid(f"tip:{series.label}")
    return line


def _axes(figure: Figure, size: Size, axes: Any, names: dict[str, float] | None) -> None:
    axes.grid(True)
    axes.set_xlabel(figure.x_label)
    canvas.value_label(axes, figure.y_label, size)
    if figure.log_x:
        axes.set_xscale("log")
    if figure.log_y:
        axes.set_yscale("log")
    pairs = [_numbers(figure, series, names) for series in figure.series]
    if figure.kind == "roofline":
        axes.set_ylim(top=axes.get_ylim()[1] * 1.6)  # names stand on the ceilings
    canvas.scale(
        axes.yaxis, [v for _, y in pairs for v in y], log=figure.log_y, crowded=size.narrow
    )
    if names is None:
        places = [v for x, _ in pairs for v in x]
        canvas.scale(axes.xaxis, places, log=figure.log_x, crowded=size.narrow)
        return
    ticker = require("matplotlib.ticker", extra=canvas.EXTRA)
    axes.xaxis.set_major_locator(ticker.FixedLocator(list(names.values())))
    axes.xaxis.set_major_formatter(ticker.FixedFormatter([ink.wrapped(n, 12) for n in names]))


def _single_points(figure: Figure) -> bool:
    """Whether every series of points is one point, with a name worth writing beside it."""
    points = [s for s in figure.series if s.points]
    return 0 < len(points) <= DIRECT and all(len(s.x) == 1 and s.label for s in points)


def _end_labels(
    drawn: Any,
    axes: Any,
    figure: Figure,
    artists: Sequence[Any],
    wrapped: dict[int, str],
    size: Size,
) -> None:
    """Each line's name to the right of the axes, tied to the line's end by a thin one."""
    box = axes.get_window_extent()
    ends: dict[int, tuple[float, float]] = {}
    for k in wrapped:
        points = np.column_stack(artists[k].get_data())
        points = points[np.isfinite(points).all(axis=1)]
        if len(points):
            x, y = axes.transData.transform(points[-1])
            ends[k] = (float(x), float(np.clip(y, box.y0, box.y1)))
    if not ends:
        return
    heights = {k: canvas.text_size(drawn, wrapped[k], size.font)[1] for k in ends}
    gap = max(heights.values()) + 2
    wanted = [y for _, y in ends.values()]
    placed = labels.spread(wanted, gap, box.y0 + gap / 2, box.y1 - gap / 2)
    to_figure = drawn.transFigure.inverted().transform
    lines = require("matplotlib.lines", extra=canvas.EXTRA)
    for (k, (x, y)), at in zip(ends.items(), placed, strict=True):
        (x0, y0), (x1, y1) = to_figure([(x + 2, y), (box.x1 + 10, at)])
        colour = artists[k].get_color()
        drawn.add_artist(lines.Line2D([x0, x1], [y0, y1], color=colour, linewidth=0.8))
        drawn.text(*to_figure((box.x1 + 13, at)), wrapped[k], va="center_baseline", linespacing=1.1)


def _marks(
    drawn: Any,
    axes: Any,
    figure: Figure,
    artists: Sequence[Any],
    names: dict[str, float] | None,
    size: Size,
    direct_points: bool,
) -> None:
    """Rings with words; names of single points; names along the limits of a roofline."""
    placer = labels.Placer(axes, [labels.samples(axes, *a.get_data()) for a in artists])
    words: list[tuple[float, float, str]] = []
    for mark in figure.marks:
        x = _place(mark.x, names)
        axes.plot(
            *([x], [mark.y]),
            linestyle="none",
            marker="o",
            markersize=7,
            markerfacecolor=ink.PAGE,
            markeredgecolor=ink.INK,
            markeredgewidth=1.3,
            zorder=6,
        )
        words.append((x, mark.y, mark.text))
    for series, artist in zip(figure.series, artists, strict=True):
        if series.points and direct_points:
            words.append((artist.get_xdata()[0], artist.get_ydata()[0], series.label))
    words = [word for word in words if math.isfinite(word[0]) and math.isfinite(word[1])]
    for x, y, _ in words:
        px, py = axes.transData.transform((x, y))
        placer.taken((px - 5, py - 5, px + 5, py + 5))
    if figure.kind == "roofline":
        limits = [a for s, a in zip(figure.series, artists, strict=True) if not s.points]
        _limits(drawn, axes, limits, placer, size)
    for x, y, text in words:
        wrapped = textwrap.fill(text, 24 if size.narrow else 32)
        extent = canvas.text_size(drawn, wrapped, size.font - 0.6)
        corner = placer.place(x, y, extent)
        canvas.write_at(drawn, corner, wrapped, fontsize=size.font - 0.6, zorder=7)


def _limits(
    drawn: Any, axes: Any, limits: Sequence[Any], placer: labels.Placer, size: Size
) -> None:
    """A slope's name runs along it, above its middle; a ceiling's stands on its right end."""
    font = size.font - 0.6
    for line in limits:
        ends = axes.transData.transform(np.column_stack(line.get_data()))
        ends = ends[np.isfinite(ends).all(axis=1)]
        if len(ends) < 2:
            continue
        (x0, y0), (x1, y1) = ends[0], ends[-1]
        width, height = canvas.text_size(drawn, line.get_label(), font)
        angle = math.degrees(math.atan2(y1 - y0, x1 - x0))
        rising = angle > 5
        x, y = ((x0 + x1) / 2, (y0 + y1) / 2) if rising else (x1, y1)
        lift = 4 / math.cos(math.radians(angle))
        drawn.text(
            *drawn.transFigure.inverted().transform((x, y + lift)),
            line.get_label(),
            rotation=angle if rising else 0,
            rotation_mode="anchor",
            ha="center" if rising else "right",
            va="bottom",
            fontsize=font,
            color=ink.MUTED,
        )
        if not rising:
            placer.taken((x - width, y, x, y + height + lift))
        else:
            for step in np.linspace(-0.5, 0.5, 12):
                px, py = x + step * width * math.cos(math.radians(angle)), y + lift
                py += step * width * math.sin(math.radians(angle))
                placer.taken((px - 4, py, px + 4, py + height))
