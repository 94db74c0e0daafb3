"""Turn a figure of a report into a drawing, an SVG for a page, and files for a paper."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from ..base.report import Figure
from ..base.validate import require
from ..drawing import canvas, colors, figure_files
from ..drawing.canvas import NARROW, WIDE, FigureSize
from ..drawing.number_format import cell
from . import bars, curves

BARS = ("stacked", "bars")

_SVG = "{http://www.w3.org/2000/svg}"
_LINK = "{http://www.w3.org/1999/xlink}href"
_DECIMALS = re.compile(r"(\d+\.\d{2})\d+")
_COLOUR = re.compile(r"#[0-9a-f]{6}\b")
_FAMILY = re.compile(r"'DejaVu Sans'[^;]*")


def draw(
    figure: Figure,
    size: FigureSize,
    *,
    titled: bool = False,
    colours: Mapping[str, str] | None = None,
) -> Any:
    """Return the matplotlib figure; call it in a ``canvas.styled`` block.

    Args:
        figure: figure to draw.
        size: ``WIDE`` or ``NARROW``.
        titled: whether to draw its title.
        colours: colours of the parts of stacks, by name.
    """
    title = figure.title if titled else ""
    if figure.kind in BARS:
        return bars.draw(figure, size, title, colours)
    return curves.draw(figure, size, title)


def inline(
    figure: Figure, size: FigureSize, prefix: str, colours: Mapping[str, str] | None = None
) -> str:
    """Return an ``svg`` element for a page: colours are the page's variables, text is text.

    Args:
        figure: figure to draw.
        size: ``WIDE`` or ``NARROW``.
        prefix: makes the ids of one page distinct.
        colours: colours of the parts of stacks, by name.

    Raises:
        MissingDependency: without matplotlib.
    """
    text = io.StringIO()
    with canvas.styled(size, text_as_text=True):
        drawn = draw(figure, size, colours=colours)
        drawn.patch.set_visible(False)
        drawn.axes[0].patch.set_visible(False)
        # Not savefig, which draws everything once more beforehand.
        svg = require("matplotlib.backends.backend_svg")
        svg.FigureCanvasSVG(drawn).print_svg(text, metadata={"Date": None})
    root = ElementTree.fromstring(text.getvalue())
    _strip(root)
    _rename(root, prefix)
    for node in root.iter():
        for key, value in node.attrib.items():
            if key in ("d", "x", "y", "transform", "points", "viewBox"):
                node.set(key, _DECIMALS.sub(r"\1", value))
            elif key == "style":
                node.set(key, _variables(value))
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    root.set("role", "img")
    root.set("aria-label", alternative(figure))
    root.set("class", "narrow" if size.narrow else "wide")
    return ElementTree.tostring(root, encoding="unicode")


def _strip(root: ElementTree.Element) -> None:
    """Remove namespaces, metadata and styles: the page says all that once."""
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{_SVG}metadata", f"{_SVG}style"):
                parent.remove(child)
    for node in root.iter():
        node.tag = node.tag.removeprefix(_SVG)
        if _LINK in node.attrib:
            node.set("href", node.attrib.pop(_LINK))


def _rename(root: ElementTree.Element, prefix: str) -> None:
    """Drop ids without a reference; those that carry a tip become it."""
    everything = " ".join(value for node in root.iter() for value in node.attrib.values())
    used = set(re.findall(r"(?:url\(|^|\s)#([\w-]+)", everything))
    for node in list(root.iter()):
        name = node.attrib.pop("id", "")
        if name.startswith("tip:"):
            tip = ElementTree.Element("title")
            tip.text = name.removeprefix("tip:")
            node.insert(0, tip)
        elif name in used:
            node.set("id", f"{prefix}{name}")
        for key, value in node.attrib.items():
            if key == "href" or "url(#" in value:
                node.set(key, re.sub(r"#([\w-]+)", rf"#{prefix}\1", value))


def _variables(style: str) -> str:
    def variable(found: re.Match[str]) -> str:
        name = colors.VARIABLES.get(found[0])
        return f"var(--{name})" if name else found[0]

    return _FAMILY.sub("var(--sans)", _COLOUR.sub(variable, style))


def alternative(figure: Figure) -> str:
    """Return the text for a screen reader: the title, then the numbers in words, if few."""
    told = [f"{figure.title}."]
    if figure.kind in BARS:
        names = bars.categories(figure)
        columns = [bars.values(series, names) for series in figure.series]
        for i, name in enumerate(names[:12]):
            column = [values[i] for values in columns]
            if figure.kind == "stacked":
                told.append(f"{name}: {cell(sum(v for v in column if v == v))}.")
            else:
                pairs = zip(figure.series, column, strict=True)
                told.append(f"{name}: {', '.join(f'{s.label} {cell(v)}' for s, v in pairs)}.")
        if len(names) > 12:
            told.append(f"And {len(names) - 12} more.")
    else:
        for series in figure.series[:12]:
            y = [v for v in series.y if v is not None and math.isfinite(v)]
            if y:
                told.append(f"{series.label}: from {cell(y[0])} to {cell(y[-1])}.")
    told += [f"Marked: {mark.text}." for mark in figure.marks]
    return " ".join(told)


def write(
    figure: Figure, folder: Path, stem: str, colours: Mapping[str, str] | None = None
) -> dict[str, Path]:
    """Write ``<stem>.svg`` and ``<stem>.png`` with their title, each whole or not at all.

    Raises:
        InvalidInput: the folder cannot be written.
        MissingDependency: without matplotlib.
    """
    with canvas.styled(WIDE):
        drawn = draw(figure, WIDE, titled=True, colours=colours)
        return figure_files.save(drawn, folder, stem, dpi=220)


__all__ = ["BARS", "NARROW", "WIDE", "alternative", "draw", "inline", "write"]
