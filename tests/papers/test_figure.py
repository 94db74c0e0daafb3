"""Figures of reproduced items: what they say about their data, and every kind of panel."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from dpkern.papers import ComparisonRow, Result, figure
from dpkern.papers.figure import DiagramBox, Line, Panel
from dpkern.papers.result import by_row

X = (0.1, 1.0, 10.0)
CURVES = Panel(
    title="curves",
    lines=[
        Line(label="measured", x=X, y=(1.0, 2.0, math.inf), half=(0.5, math.inf, 0.1)),
        Line(label="claimed", x=X, y=(1.0, 1.0, 1.0), level=True),
        Line(label="rows", x=X, y=(math.nan, 1.0, 0.0), points=True),
        Line(label="nothing", x=X, y=(math.nan,) * 3),
    ],
    log_x=True,
    log_y=True,
)
CHAIN = [DiagramBox(text=str(i), x=3.0 * i, y=0) for i in range(5)]


@pytest.fixture
def drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Draws panels and returns matplotlib's figure."""
    figures, made = pytest.importorskip("matplotlib.figure"), []

    class Kept(figures.Figure):  # type: ignore[misc, name-defined]
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            made.append(self)

    monkeypatch.setattr(figures, "Figure", Kept)

    def draw(*panels: Panel, footer: str = "") -> Any:
        paths = figure.draw(panels, "headline", tmp_path, "x", footer=footer)
        assert paths["png"].read_bytes().startswith(b"\x89PNG")
        assert b"<svg" in paths["svg"].read_bytes()
        before = paths["svg"].read_bytes()
        figure.draw(panels, "headline", tmp_path, "x", footer=footer)
        assert paths["svg"].read_bytes() == before, "the same figure gives the same file"
        return made[-1]

    return draw


def test_curves_have_bars_levels_and_a_legend_that_hides_none_of_them(drawn: Any) -> None:
    made = drawn(CURVES)
    (axes,) = made.axes
    curves = {line.get_label(): line for line in axes.lines}
    assert curves["claimed"].get_marker() == "None"
    assert curves["rows"].get_linestyle() == "None"
    ((_, _, (bars,)),) = axes.containers
    heights = [segment[:, 1].tolist() for segment in bars.get_segments() if len(segment)]
    # What is not finite has neither point nor bar.
    assert [height for height in heights if math.isfinite(sum(height))] == [[0.5, 1.5]]
    legend = axes.get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["claimed", "rows", "measured"]
    assert legend.get_title().get_text() == "bars: 95 % intervals"
    assert legend.get_window_extent().y1 <= axes.get_window_extent().y0
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["0.1", "1", "10"]


def test_a_legend_covers_neither_the_names_below_the_axis_nor_the_panel_beside_it(
    drawn: Any,
) -> None:
    long = [
        Line(label=f"released code, noise of a fixed label for {n} records", x=X, y=X)
        for n in range(5)
    ]
    names = [Line(label="after the last epoch", x=(1, 2), y=(0.0, 1.0), spoiled=(True, False))]
    made = drawn(
        Panel(title="curves", x_label="epsilon", lines=long),
        Panel(title="points", lines=names, names=("released, first", "corrected")),
        footer="what the control reached " * 8,
    )
    curves, points = made.axes
    legends = [axes.get_legend().get_window_extent() for axes in (curves, points)]
    assert legends[0].y1 < curves.xaxis.label.get_window_extent().y0
    for tick in points.get_xticklabels():
        assert legends[1].y1 < tick.get_window_extent().y0
    assert legends[0].x1 < legends[1].x0
    for axes, legend in zip((curves, points), legends, strict=True):
        width = axes.get_window_extent().width
        assert width > 0.7 * made.bbox.width / 2, "legends do not squeeze their panels"
        assert legend.y0 > made._supxlabel.get_window_extent().y1


def test_rows_have_names_and_what_is_infinite_stands_at_the_edge(drawn: Any) -> None:
    numbers = {"published": [1.0, None, 2.0], "ours": [1.0, math.inf, math.nan]}
    made = drawn(by_row("epsilon", ["first", "second", "third " * 30], numbers))
    (axes,) = made.axes
    names = [tick.get_text() for tick in axes.get_yticklabels()]
    assert names[:2] == ["first", "second"]
    assert names[2].count("\n"), "long names are wrapped"
    bottom, top = axes.get_ylim()
    assert bottom > top, "the first row is above"
    lines = {line.get_label(): line for line in axes.lines}
    assert list(lines["published"].get_ydata()) == [1.0, 3.0]
    assert list(lines["ours"].get_ydata()) == [1.0]
    assert list(lines["ours, infinite"].get_ydata()) == [2.0]
    assert list(lines["ours, infinite"].get_xdata()) == [1.0], "the right edge of the axes"


def test_points_of_a_source_are_rings_in_the_colour_of_our_curve(drawn: Any) -> None:
    made = drawn(
        Panel(
            title="both",
            lines=[
                Line(label="SPOF", x=X, y=X),
                Line(label="SPOF, published", x=X, y=X, points=True),
                Line(label="bound", x=X, y=X, level=True),
                Line(label="FM", x=X, y=X),
                Line(label="FM, published", x=X, y=X, points=True),
            ],
        )
    )
    lines = {line.get_label(): line for line in made.axes[0].lines}
    for name in ("SPOF", "FM"):
        assert lines[name].get_color() == lines[f"{name}, published"].get_color()
        assert lines[f"{name}, published"].get_fillstyle() == "none"
    assert lines["SPOF"].get_color() != lines["FM"].get_color()


def test_intervals_end_where_no_accuracy_can_be(drawn: Any) -> None:
    x, y, half = (1.0, 2.0, 3.0), (9.0, 50.0, 98.0), (44.0, 5.0, math.inf)
    lines = [Line(label="bars", x=x, y=y, half=half)]
    bands = [Line(label="band", x=x, y=y, half=(*half[:2], 30.0), band=True)]
    made = drawn(
        Panel(title="bars", x_label="epoch", y_label="accuracy %", lines=lines),
        Panel(title="band", x_label="epoch", y_label="best accuracy %", lines=bands),
        Panel(title="other", x_label="epoch", y_label="points", lines=lines),
    )
    bars, band, other = made.axes
    segments = bars.containers[0][2][0].get_segments()
    assert [one[:, 1].tolist() for one in segments[:2]] == [[0.0, 53.0], [45.0, 55.0]]
    (shade,) = band.collections
    values = shade.get_paths()[0].vertices[:, 1]
    assert (values.min(), values.max()) == (0.0, 100.0)
    assert other.containers[0][2][0].get_segments()[0][:, 1].tolist() == [-35.0, 53.0]
    # Between whole epochs there is none to be named.
    assert all(float(tick).is_integer() for tick in bars.get_xticks())


def test_an_image_with_places_has_axes(drawn: Any) -> None:
    image = [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    known = Panel(title="a", x_label="x", y_label="y", image=image, extent=(0.0, 2.0, 10.0, 20.0))
    made = drawn(known, Panel(title="b", image=image))
    with_axes, without = (axes for axes in made.axes if axes.images)
    assert (with_axes.get_xlabel(), with_axes.get_ylabel()) == ("x", "y")
    assert tuple(with_axes.images[0].get_extent()) == (-0.5, 2.5, 5.0, 25.0)
    assert with_axes.images[0].origin == "lower"
    assert with_axes.axison
    assert not without.axison


def test_boxes_of_a_long_chain_leave_room_for_their_arrows(drawn: Any) -> None:
    made = drawn(Panel(title="chain", boxes=CHAIN), Panel(title="map", image=[[0.0, 1.0]]))
    assert made.get_size_inches()[0] > 2 * 6


@pytest.mark.parametrize(
    ("data", "line"),
    [(["formula"], ""), (["formula", "synthetic: b", "a"], "\ndata: a; synthetic: b")],
)
def test_the_headline_says_what_was_measured_on(data: list[str], line: str) -> None:
    rows = [ComparisonRow(item="y", setting="s", quantity="q", data=name) for name in data]
    result = Result(paper="x", item="y", title="of z", rows=rows, settings={})
    assert result._headline() == "x y: of z" + line
