"""Axes in the house's style: a light grid, no box, numbers in a readable form.

Matplotlib's object interface without pyplot: no display, and no global state but the settings of a
``styled`` block. A canvas has 72 dots per inch, so that pixels are points.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..base.validate import require
from . import colors
from .number_format import probability, si_format


@dataclass(frozen=True, kw_only=True)
class FigureSize:
    """The width of a figure in inches, and its font size in points."""

    width: float
    font: float

    @property
    def narrow(self) -> bool:
        """Whether the figure is for a phone."""
        return self.width < 5


WIDE = FigureSize(width=6.9, font=8.8)
NARROW = FigureSize(width=3.9, font=8.6)


@contextmanager
def styled(size: FigureSize, *, text_as_text: bool = False) -> Iterator[Any]:
    """Set matplotlib's settings while the block runs; yields the package.

    Raises:
        MissingDependency: without matplotlib.
    """
    matplotlib = require("matplotlib")
    settings = {
        "font.size": size.font,
        "font.family": "DejaVu Sans",
        "text.color": colors.INK,
        "axes.edgecolor": colors.MUTED,
        "axes.labelcolor": colors.MUTED,
        "xtick.color": colors.MUTED,
        "ytick.color": colors.MUTED,
        "axes.linewidth": 0.6,
        "grid.color": colors.GRID,
        "grid.linewidth": 0.7,
        "axes.unicode_minus": True,
        "svg.fonttype": "none" if text_as_text else "path",
        # The same report gives the same file.
        "svg.hashsalt": "dpkern",
    }
    with matplotlib.rc_context(settings):
        yield matplotlib


class FigureAxes:
    """A figure with one pair of axes, a title and names above them, and room beside them.

    Args:
        size: width and font size.
        height: height of the axes with their labels, in inches; the rows above them are added.
        title: empty for none.
    """

    def __init__(self, size: FigureSize, height: float, title: str = "") -> None:
        figures = require("matplotlib.figure")
        backend = require("matplotlib.backends.backend_agg")
        self.size = size
        self.figure = figures.Figure(figsize=(size.width, height), dpi=72, layout="constrained")
        self._renderer = backend.FigureCanvasAgg(self.figure).get_renderer()
        self.axes = self.figure.add_subplot()
        self.axes.set_axisbelow(True)
        self.axes.spines[["top", "right"]].set_visible(False)
        self.axes.tick_params(which="both", length=0)
        self._above: list[tuple[float, Callable[[float, float], object]]] = []
        self._right = 0.0
        if title:
            self._title(title)

    def text_size(self, text: str, font: float) -> tuple[float, float]:
        """Return width and height in pixels."""
        probe = self.figure.text(0, 0, text, fontsize=font, linespacing=1.15)
        box = probe.get_window_extent(self._renderer)
        probe.remove()
        return float(box.width), float(box.height)

    def value_label(self, label: str) -> None:
        """Write a vertical axis's label above it: turned text is hard to read and costs width."""
        self.axes.set_title(label, loc="left", color=colors.MUTED, fontsize=self.size.font, pad=6)

    def legend(self, handles: Sequence[Any], names: Sequence[str]) -> None:
        """Write names in rows above the axes, as many in a row as fit."""
        font = self.size.font
        widths = [self.text_size(name, font)[0] + 3.6 * font for name in names]
        rows: list[list[int]] = []
        for i, width in enumerate(widths):
            if rows and sum(widths[j] for j in rows[-1]) + width <= 72 * self.size.width:
                rows[-1].append(i)
            else:
                rows.append([i])
        for number, row in enumerate(rows):
            drawn = partial(
                self.figure.legend,
                [handles[i] for i in row],
                [names[i] for i in row],
                loc="upper left",
                ncols=len(row),
                frameon=False,
                handlelength=1.3,
                handletextpad=0.6,
                columnspacing=1.5,
                borderpad=0,
                borderaxespad=0,
            )
            last = number == len(rows) - 1
            place = partial(_anchored, drawn)
            self._above.append(((2.1 if last else 1.6) * font, place))

    def _title(self, title: str) -> None:
        font = self.size.font + 1.4
        lines = textwrap.fill(title, int(72 * self.size.width / font * 1.55))
        write = partial(
            self.figure.text, s=lines, fontsize=font, weight="bold", va="top", linespacing=1.2
        )
        height = 1.35 * font * (lines.count("\n") + 1) + 0.5 * font
        self._above.append((height, lambda x, y: write(x, y)))

    def room_beside(self, pixels: float) -> None:
        """Keep this much to the right of the axes free."""
        self._right = pixels

    def freeze(self) -> None:
        """Lay out once; what is placed afterwards stays where it was put."""
        above = sum(height for height, _ in self._above)
        width, height = 72 * self.size.width, 72 * self.figure.get_figheight() + above
        self.figure.set_figheight(height / 72)
        engine = self.figure.get_layout_engine()
        kept = (0, 0, 1 - self._right / width, 1 - above / height)
        engine.set(w_pad=0.03, h_pad=0.04, rect=kept)
        engine.execute(self.figure)
        self.figure.set_layout_engine("none")
        top = height - 2
        for tall, place in self._above:
            place(2 / width, top / height)
            top -= tall

    def fraction(self, x: float, y: float) -> tuple[float, float]:
        """Convert pixels to parts of the figure, which hold at every resolution of a file."""
        x, y = self.figure.transFigure.inverted().transform((x, y))
        return float(x), float(y)

    def write_at(self, corner: tuple[float, float], text: str, **options: Any) -> None:
        """Write text on a plate of the page's colour, its lower left corner at these pixels."""
        plate = {"boxstyle": "square,pad=0.12", "facecolor": colors.PAGE, "edgecolor": "none"}
        options |= {"va": "bottom", "ha": "left", "linespacing": 1.15}
        self.figure.text(*self.fraction(*corner), text, bbox=plate | {"alpha": 0.8}, **options)

    def rule(
        self, start: tuple[float, float], end: tuple[float, float], colour: str, width: float = 0.8
    ) -> None:
        """Draw a thin line between two places in pixels."""
        lines = require("matplotlib.lines")
        (x0, y0), (x1, y1) = self.fraction(*start), self.fraction(*end)
        self.figure.add_artist(lines.Line2D([x0, x1], [y0, y1], color=colour, linewidth=width))


def _anchored(legend: Callable[..., object], x: float, y: float) -> object:
    return legend(bbox_to_anchor=(x, y))


def scale(axis: Any, values: Iterable[float], *, log: bool, crowded: bool) -> None:
    """Set the ticks of a numeric axis."""
    ticker = require("matplotlib.ticker")
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: si_format(value)))
    if not log:
        counted = all(v == v // 1 for v in values if math.isfinite(v))
        steps = [1, 2, 5, 10] if counted else [1, 2, 2.5, 5, 10]
        ticks = 5 if crowded else 7
        axis.set_major_locator(ticker.MaxNLocator(ticks, steps=steps, integer=counted))
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


def probabilities(axis: Any, place: Callable[[float], float], *, crowded: bool) -> None:
    """Set the ticks of an axis of probabilities that are drawn at ``place``."""
    ticker = require("matplotlib.ticker")
    tails = (1e-6, 1e-4, 0.01, 0.1) if crowded else (1e-6, 1e-5, 1e-4, 0.001, 0.01, 0.05, 0.2)
    ticks = [*tails, 0.5, *(1 - p for p in reversed(tails))]
    axis.set_major_locator(ticker.FixedLocator([place(p) for p in ticks]))
    axis.set_major_formatter(ticker.FixedFormatter([probability(p) for p in ticks]))
