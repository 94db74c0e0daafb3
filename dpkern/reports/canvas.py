"""Axes in the house's style: a light grid, no box, numbers that people say.

Matplotlib's object interface without pyplot: no display, and no global state but the settings of a
``styled`` block. A canvas has 72 dots per inch, so that pixels are points.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .._validate import require
from . import ink

EXTRA = "demo"


@dataclass(frozen=True, kw_only=True)
class Size:
    """How wide a figure is, in inches, and its letters, in points."""

    width: float
    font: float

    @property
    def narrow(self) -> bool:
        """For a phone."""
        return self.width < 5


WIDE = Size(width=6.9, font=8.8)
NARROW = Size(width=3.9, font=8.6)


@contextmanager
def styled(size: Size, *, text_as_text: bool = False) -> Iterator[Any]:
    """Matplotlib's settings while the block runs; yields the package.

    Raises:
        MissingDependency: without matplotlib.
    """
    matplotlib = require("matplotlib", extra=EXTRA)
    settings = {
        "font.size": size.font,
        "font.family": "DejaVu Sans",
        "text.color": ink.INK,
        "axes.edgecolor": ink.MUTED,
        "axes.labelcolor": ink.MUTED,
        "xtick.color": ink.MUTED,
        "ytick.color": ink.MUTED,
        "axes.linewidth": 0.6,
        "grid.color": ink.GRID,
        "grid.linewidth": 0.7,
        "axes.unicode_minus": True,
        "svg.fonttype": "none" if text_as_text else "path",
        # The same report gives the same file.
        "svg.hashsalt": "dpkern",
    }
    with matplotlib.rc_context(settings):
        yield matplotlib


def sheet(size: Size, height: float) -> tuple[Any, Any]:
    """A figure and its axes."""
    figures = require("matplotlib.figure", extra=EXTRA)
    backend = require("matplotlib.backends.backend_agg", extra=EXTRA)
    drawn = figures.Figure(figsize=(size.width, height), dpi=72, layout="constrained")
    backend.FigureCanvasAgg(drawn)
    drawn.get_layout_engine().set(w_pad=0.03, h_pad=0.04)
    axes = drawn.add_subplot()
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(which="both", length=0)
    return drawn, axes


def scale(axis: Any, values: Iterable[float], *, log: bool, crowded: bool) -> None:
    """Ticks of a numeric axis."""
    ticker = require("matplotlib.ticker", extra=EXTRA)
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: ink.short(value)))
    if not log:
        axis.set_major_locator(ticker.MaxNLocator(5 if crowded else 7, steps=[1, 2, 2.5, 5, 10]))
        return
    axis.set_minor_formatter(ticker.NullFormatter())
    positive = [v for v in values if v > 0 and math.isfinite(v)]
    decades = math.log10(max(positive) / min(positive)) if positive else 1.0
    if positive and decades < 4 and all(math.log2(v).is_integer() for v in positive):
        axis.set_major_locator(ticker.LogLocator(base=2, numticks=12))
        axis.set_minor_locator(ticker.NullLocator())
    elif decades < (1.5 if crowded else 2.5):
        axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5), numticks=12))
    else:
        axis.set_major_locator(ticker.LogLocator(numticks=6 if crowded else 9))


def text_size(drawn: Any, text: str, font: float) -> tuple[float, float]:
    """Width and height in pixels."""
    probe = drawn.text(0, 0, text, fontsize=font, linespacing=1.15)
    box = probe.get_window_extent(drawn.canvas.get_renderer())
    probe.remove()
    return float(box.width), float(box.height)


def value_label(axes: Any, label: str, size: Size) -> None:
    """What a vertical axis counts, above it: turned text is hard to read and costs width."""
    axes.set_title(label, loc="left", color=ink.MUTED, fontsize=size.font, pad=6)


def legend(drawn: Any, size: Size, handles: Sequence[Any], names: Sequence[str]) -> None:
    """Names in rows above the axes, as many in a row as fit; the figure grows by their height."""
    width = max(text_size(drawn, name, size.font)[0] for name in names) + 3.4 * size.font
    columns = max(1, min(len(names), int((size.width * 72 - 8) // width)))
    rows = -(-len(names) // columns)
    drawn.set_figheight(drawn.get_figheight() + (1.45 * rows + 0.8) * size.font / 72)
    drawn.legend(
        handles,
        names,
        loc="outside upper left",
        ncols=columns,
        frameon=False,
        handlelength=1.4,
        handletextpad=0.6,
        columnspacing=1.2,
        borderpad=0.1,
    )


def freeze(drawn: Any) -> None:
    """Lay out once; what is placed afterwards stays where it was put."""
    drawn.get_layout_engine().execute(drawn)
    drawn.set_layout_engine("none")


def write_at(drawn: Any, corner: tuple[float, float], text: str, **options: Any) -> None:
    """Text whose lower left corner is at these pixels, whatever the resolution of the file."""
    x, y = drawn.transFigure.inverted().transform(corner)
    plate = {"boxstyle": "square,pad=0.12", "facecolor": ink.PAGE, "edgecolor": "none"}
    options |= {"va": "bottom", "ha": "left", "linespacing": 1.15, "bbox": plate | {"alpha": 0.8}}
    drawn.text(x, y, text, **options)
