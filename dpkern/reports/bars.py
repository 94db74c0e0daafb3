"""Draw bars: one stack per category, or series side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..base.report import Figure, Series
from ..base.validate import require
from ..drawing import canvas, colors
from ..drawing.canvas import FigureAxes, FigureSize
from ..drawing.number_format import cell, on_bar, wrapped

NAMED = 7
"""Maximum of the parts of a stack with a colour of their own; smaller ones are drawn as one."""


def categories(figure: Figure) -> list[str]:
    """Return the categories in the order in which the series name them."""
    return list(dict.fromkeys(str(x) for series in figure.series for x in series.x))


def lie(figure: Figure, size: FigureSize) -> bool:
    """Whether the bars lie: as asked, or because their names would collide."""
    names = categories(figure)
    letters = sum(max(map(len, wrapped(n, 14).split("\n"))) for n in names)
    return figure.horizontal or letters > (0 if size.narrow else 60)


def values(series: Series, names: list[str]) -> list[float]:
    """Return one value per category; a missing one is NaN."""
    known = {str(x): y for x, y in zip(series.x, series.y, strict=True)}
    found = [known.get(name) for name in names]
    return [math.nan if y is None else float(y) for y in found]


def named(figure: Figure) -> list[str]:
    """Return the parts with a colour of their own: all, or the largest where they are too many."""
    names = [series.label for series in figure.series]
    if len(names) <= NAMED + 1:
        return names
    weight = {s.label: sum(y for y in s.y if y is not None) for s in figure.series}
    largest = sorted(names, key=lambda name: -weight[name])[:NAMED]
    return [name for name in names if name in largest]


def palette(figures: Sequence[Figure]) -> dict[str, str]:
    """Assign one colour per name for all stacks of a report, if there are enough colours."""
    stacks = [figure for figure in figures if figure.kind == "stacked"]
    names = list(dict.fromkeys(name for figure in stacks for name in named(figure)))
    few = len(names) <= len(colors.DATA)
    return dict(zip(names, colors.DATA, strict=False)) if few else {}


def parts(figure: Figure, colours: Mapping[str, str]) -> list[tuple[str, list[float], str]]:
    """Return label, values and colour of each part; parts without a name are joined to one."""
    names, kept = categories(figure), named(figure)
    found = {s.label: values(s, names) for s in figure.series}
    drawn = [
        (label, found[label], colours.get(label, colors.DATA[i])) for i, label in enumerate(kept)
    ]
    rest = [y for label, y in found.items() if label not in kept]
    if not rest:
        return drawn
    other = [sum(v for v in column if v == v) for column in zip(*rest, strict=True)]
    return [*drawn, (f"{len(rest)} smaller parts", other, colors.OTHER)]


def draw(
    figure: Figure, size: FigureSize, title: str = "", colours: Mapping[str, str] | None = None
) -> Any:
    """Draw ``stacked`` and ``bars``; ``colours`` of parts by name, else in order of ``DATA``."""
    names, flat, stacked = categories(figure), lie(figure, size), figure.kind == "stacked"
    coloured = parts(figure, colours or {}) if stacked else _side_by_side(figure, names)
    across = 1 if stacked else len(coloured)
    slot = 0.1 + 0.17 * across if across > 1 else 0.26 if len(names) > 12 else 0.33
    if flat and any("\n" in label for label in _wrapped(names, size, flat)):
        slot = max(slot, 0.36)
    height = 0.5 + slot * max(len(names), 2)
    sheet = FigureAxes(size, height if flat else 3.0, title)
    axes = sheet.axes
    box = 0.68 if stacked or across == 1 else 0.76
    bars = axes.barh if flat else axes.bar
    side = "left" if flat else "bottom"
    base = [0.0] * len(names)
    shown: list[Any] = []
    for k, (label, y, colour) in enumerate(coloured):
        shift = 0.0 if stacked else (k - (across - 1) / 2) * box / across
        places = [i + shift for i in range(len(names))]
        lengths = [0.0 if v != v else v for v in y]
        start = {side: list(base)} if stacked else {}
        container = bars(
            places,
            lengths,
            box if stacked else box / across,
            color=colour,
            edgecolor=colors.PAGE,
            linewidth=0.5,
            label=label,
            **start,
        )
        for name, patch, v in zip(names, container, y, strict=True):
            patch.set_gid(f"tip:{name}, {label}: {cell(v)}")
        shown.append((container, y, colour))
        if stacked:
            base = [b + v for b, v in zip(base, lengths, strict=True)]
    _axes(figure, sheet, names, flat)
    if len(coloured) > 1:
        handles = [container for container, _, _ in shown]
        sheet.legend(handles, [label for label, _, _ in coloured])
    _room(axes, flat, figure.log_y, 0.14 if size.narrow else 0.1)
    sheet.freeze()
    if stacked:
        _inside(sheet, shown, flat)
        _ends(axes, [(i, b, b) for i, b in enumerate(base)], flat, size)
    elif len(names) * across <= 40:
        ends = []
        for container, y, _ in shown:
            for patch, v in zip(container, y, strict=True):
                middle = patch.get_y() + patch.get_height() / 2
                if not flat:
                    middle = patch.get_x() + patch.get_width() / 2
                ends += [(middle, v, v)] if v == v else []
        small = across > 1 and len(names) > 6
        _ends(axes, ends, flat, size, smaller=small)
    return sheet.figure


def _side_by_side(figure: Figure, names: list[str]) -> list[tuple[str, list[float], str]]:
    colours = (*colors.DATA, colors.OTHER)
    return [
        (s.label, values(s, names), colours[i % len(colours)]) for i, s in enumerate(figure.series)
    ]


def _wrapped(names: list[str], size: FigureSize, flat: bool) -> list[str]:
    """Wrap names into lines that fit beside lying bars, or below standing ones."""
    letters = max(12, 66 // max(len(names), 1))
    if flat:
        letters = 18 if size.narrow else 30
    return [wrapped(name, letters) for name in names]


def _axes(figure: Figure, sheet: FigureAxes, names: list[str], flat: bool) -> None:
    axes, size = sheet.axes, sheet.size
    ticker = require("matplotlib.ticker")
    along, across = (axes.yaxis, axes.xaxis) if flat else (axes.xaxis, axes.yaxis)
    along.set_major_locator(ticker.FixedLocator(list(range(len(names)))))
    along.set_major_formatter(ticker.FixedFormatter(_wrapped(names, size, flat)))
    along.set_tick_params(labelcolor=colors.INK)
    across.grid(True)
    if figure.log_y:
        (axes.set_xscale if flat else axes.set_yscale)("log")
    numbers = [y for s in figure.series for y in s.y if y is not None]
    canvas.scale(across, numbers, log=figure.log_y, crowded=size.narrow and flat)
    if flat:
        across.set_label_text(figure.y_label)
    else:
        sheet.value_label(figure.y_label)
    # The names of categories speak for themselves where the bars lie.
    along.set_label_text("" if flat else figure.x_label)
    if flat:
        axes.set_ylim(len(names) - 0.45, -0.55)
        axes.spines["left"].set_visible(min(numbers, default=0) >= 0)
    if min(numbers, default=0) < 0:
        (axes.axvline if flat else axes.axhline)(0, color=colors.MUTED, linewidth=0.8)


def _room(axes: Any, flat: bool, log: bool, part: float) -> None:
    """Make space for the number behind the longest bar, and before the longest negative one."""
    low, high = axes.get_xlim() if flat else axes.get_ylim()
    if log:
        more = (high / low) ** part
        low, high = low, high * more
    else:
        extent = high - low
        low, high = low - part * extent * (low < 0), high + part * extent * (high > 0)
    (axes.set_xlim if flat else axes.set_ylim)(low, high)


def _inside(sheet: FigureAxes, shown: list[Any], flat: bool) -> None:
    """Write the number of each part that has room for it."""
    font = sheet.size.font - 0.8
    for container, y, colour in shown:
        for patch, v in zip(container, y, strict=True):
            box = patch.get_window_extent()
            width, height = sheet.text_size(on_bar(v), font)
            if v != v or width + 6 > box.width or height + 2 > box.height:
                continue
            sheet.axes.text(
                patch.get_x() + patch.get_width() / 2,
                patch.get_y() + patch.get_height() / 2,
                on_bar(v),
                ha="center",
                va="center_baseline" if flat else "center",
                fontsize=font,
                color=colors.contrast_color(colour),
            )


def _ends(
    axes: Any,
    ends: list[tuple[float, float, float]],
    flat: bool,
    size: FigureSize,
    smaller: bool = False,
) -> None:
    """Write a number behind the end of each bar: (place, end, number)."""
    for place, end, number in ends:
        away = 3 if number >= 0 else -3
        axes.annotate(
            on_bar(number),
            (end, place) if flat else (place, end),
            (away, 0) if flat else (0, away),
            textcoords="offset points",
            ha=("left" if away > 0 else "right") if flat else "center",
            va="center" if flat else ("bottom" if away > 0 else "top"),
            fontsize=size.font - (1.8 if smaller else 0.8),
            annotation_clip=False,
        )
