"""Figures of reproduced items: what they say about their data, and every kind of panel."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from dpkern.papers import ComparisonRow, Result, figure
from dpkern.papers.figure import DiagramBox, Line, Panel

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

    def draw(*panels: Panel) -> Any:
        paths = figure.draw(panels, "headline", tmp_path, "x")
        assert paths["png"].read_bytes().startswith(b"\x89PNG")
        assert b"<svg" in paths["svg"].read_bytes()
        before = paths["svg"].read_bytes()
        figure.draw(panels, "headline", tmp_path, "x")
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
