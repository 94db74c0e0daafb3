"""Reports as text, JSON, CSV, pages and files: what must be in them, and what must not."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections import Counter
from dataclasses import replace
from datetime import datetime
from html.parser import HTMLParser
from importlib.resources import files as resources
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from dpkern.base.commit import version_with_commit
from dpkern.base.errors import InvalidInput, MissingDependency
from dpkern.base.report import Figure, Report, ReportTable, Series
from dpkern.drawing import colors, number_format
from dpkern.reports import bars, figures, files, labels, text
from dpkern.reports.page import tied
from tests.reports.cost_samples import PER_LAYER, REPORT, ROOFLINE, STACKED

VOID = {"meta", "br", "img", "link", "hr", "input"}


class Page(HTMLParser):
    """Elements with their attributes, text by element, and whether everything closes."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.said: dict[str, list[str]] = {}
        self.rows: list[list[list[str]]] = []
        self._open: list[str] = []
        self.feed(source)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "table":
            self.rows.append([])
        elif tag == "tr":
            self.rows[-1].append([])
        elif tag in ("td", "th"):
            self.rows[-1][-1].append("")
        if tag not in VOID:
            self._open.append(tag)
            self.said.setdefault(tag, []).append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open:
            self.said[self._open[-1]][-1] += data
            if self._open[-1] in ("td", "th"):
                self.rows[-1][-1][-1] += data

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def source() -> str:
    return files.render(REPORT, "html")


@pytest.fixture(scope="module")
def parsed(source: str) -> Page:
    return Page(source)


def foreign(source: str) -> list[str]:
    """Everything by which a page could ask for something outside itself."""
    found = re.findall(r"https?:|@import|//[\w.-]+\.\w+/|url\((?!#)", source)
    for tag, attributes in Page(source).elements:
        found += [tag for _ in range(tag in ("link", "img", "iframe", "object", "base", "form"))]
        found += [
            f"{tag} {name}={value}"
            for name, value in attributes.items()
            if name in ("src", "srcset", "href", "action", "data", "xlink:href")
            and not (value or "").startswith("#")
        ]
    return found


def test_page_refers_to_nothing_outside_itself(source: str) -> None:
    assert foreign(source) == []


@pytest.mark.parametrize(
    "addition",
    [
        '<link rel="stylesheet" href="style.css">',
        '<script src="x.js"></script>',
        "<style>@import 'x.css'</style>",
        "<p>https://example.org</p>",
        '<svg><use href="sprite.svg#a"/></svg>',
        '<p style="background: url(x.png)"></p>',
    ],
)
def test_that_check_finds_references(source: str, addition: str) -> None:
    assert foreign(source.replace("</main>", f"{addition}</main>"))


def test_page_fits_a_phone_and_darkness(source: str, parsed: Page) -> None:
    metas = {meta.get("name"): meta.get("content") for meta in parsed.named("meta")}
    assert metas["viewport"] == "width=device-width, initial-scale=1"
    assert source.startswith("<!doctype html>")
    assert parsed.named("html") == [{"lang": "en"}]
    for media in ("prefers-color-scheme: dark", "max-width: 36rem", "print"):
        assert media in source


def test_every_figure_has_title_caption_and_words_for_who_cannot_see_it(parsed: Page) -> None:
    count = len(REPORT.figures)
    assert len(parsed.named("figure")) == len(parsed.named("figcaption")) == count
    assert parsed.said["h3"] == [tied(figure.title) for figure in REPORT.figures]
    drawings = parsed.named("svg")
    assert Counter(svg["class"] for svg in drawings) == {"wide": count, "narrow": count}
    for svg, figure in zip(drawings[::2], REPORT.figures, strict=True):
        assert svg["role"] == "img"
        assert figure.title in (svg["aria-label"] or "")
    assert "SPOF: 364." in (drawings[0]["aria-label"] or "")
    assert "Marked: crossover near n = 127." in (drawings[2]["aria-label"] or "")


def test_ids_are_distinct_and_references_within_the_page_arrive(source: str, parsed: Page) -> None:
    ids = [a["id"] for _, a in parsed.elements if "id" in a]
    assert len(ids) == len(set(ids))
    uses = re.findall(r'(?:url\(|href=")#([\w-]+)', source)
    assert len(uses) > 20
    assert set(uses) <= set(ids)


def test_tables_are_tables(parsed: Page) -> None:
    assert len(parsed.rows) == len(REPORT.tables)
    for rows, table in zip(parsed.rows, REPORT.tables, strict=True):
        assert rows[0] == list(table.columns)
        assert rows[1:] == [[number_format.cell(value) for value in row] for row in table.rows]
    assert Counter(th.get("scope") for th in parsed.named("th")) == {"col": 6, "row": 3}
    assert parsed.said["caption"] == [table.title for table in REPORT.tables]


def test_page_embeds_the_facts_and_escapes_everything(source: str, parsed: Page) -> None:
    assert parsed.named("script") == [{"type": "application/json", "id": "facts"}]
    wanted = json.loads(text.as_json(REPORT))
    del wanted["made"]  # the page is the same whenever it is made
    assert json.loads(parsed.said["script"][0]) == wanted
    assert "<on paper>" not in source
    assert parsed.said["h1"] == [REPORT.title]


def variables(block: str) -> dict[str, str]:
    return dict(re.findall(r"--([\w-]+):\s*(#[0-9a-f]{6})", block))


def test_colours_of_figures_are_the_pages_and_numbers_on_bars_can_be_read(source: str) -> None:
    style = resources("dpkern.reports").joinpath("page.css").read_text()
    light, dark = style.split("@media (prefers-color-scheme: dark)")
    dark = dark.split("* { box-sizing")[0]
    day = variables(light)
    night = day | variables(dark)
    assert {name: day[name] for name in colors.VARIABLES.values()} == {
        name: "#ffffff" if colour == colors.ON_DEEP else colour
        for colour, name in colors.VARIABLES.items()
    }
    drawn = re.findall(r"<svg.*?</svg>", source, re.DOTALL)
    assert set(re.findall(r"var\(--(data-\d|ink|page|grid)\)", "".join(drawn))) >= {"ink", "data-1"}
    assert not re.search(r"#[0-9a-fA-F]{6}\b", "".join(drawn))
    for theme in (day, night):
        assert colors.contrast(theme["ink"], theme["page"]) > 12
        assert colors.contrast(theme["muted"], theme["page"]) > 4.5
        for colour in (*colors.DATA, colors.OTHER):
            bar = theme[colors.VARIABLES[colour]]
            assert colors.contrast(bar, theme["page"]) > 1.8
            assert (
                colors.contrast(bar, theme[colors.VARIABLES[colors.contrast_color(colour)]]) > 4.3
            )


def words(svg: str) -> list[str]:
    return ["".join(node.itertext()) for node in ElementTree.fromstring(svg).iter("text")]


def test_names_and_marks_stand_in_the_drawing(source: str) -> None:
    wide = words(figures.inline(REPORT.figures[1], figures.WIDE, "a"))
    for label in [s.label for s in REPORT.figures[1].series] + ["crossover near n = 127"]:
        assert label in wide
    roofline = words(figures.inline(ROOFLINE, figures.NARROW, "a"))
    for series in ROOFLINE.series:
        assert series.label in roofline


def test_bars_carry_their_totals_and_tips() -> None:
    svg = figures.inline(STACKED, figures.WIDE, "a")
    assert {"364", "1,403", "899"} <= set(words(svg))
    tips = [node.text for node in ElementTree.fromstring(svg).iter("title")]
    assert "SPOF, stabilisation: 98" in tips


def test_small_parts_of_a_stack_are_one_and_none_is_lost() -> None:
    parts = bars.parts(PER_LAYER, {})
    named = [f"part {p}" for p in range(4, 11)]
    assert [label for label, _, _ in parts] == [*named, "4 smaller parts"]
    for i in range(len(PER_LAYER.series[0].x)):
        whole = sum(series.y[i] or 0 for series in PER_LAYER.series)
        assert sum(y[i] for _, y, _ in parts) == pytest.approx(whole)


def test_a_name_has_one_colour_in_all_stacks_of_a_report() -> None:
    fewer = replace(STACKED, series=STACKED.series[2:])
    colours = bars.palette([STACKED, fewer])
    assert bars.parts(fewer, colours)[0][2] == bars.parts(STACKED, colours)[2][2] != colors.DATA[0]


@pytest.mark.parametrize("kind", ["lines", "bars", "stacked", "roofline"])
@pytest.mark.parametrize("log", [False, True], ids=["linear", "log"])
def test_gaps_zeros_and_single_values_are_drawn(kind: str, log: bool) -> None:
    odd = Figure(
        name="odd",
        title="t",
        caption="c",
        kind=kind,
        x_label="x",
        y_label="y",
        series=[Series(label="a", x=[1, 2, 3], y=[0.0, None, 2]), Series(label="b", x=[2], y=[0])],
        log_y=log,
    )
    assert words(figures.inline(odd, figures.NARROW, "a"))


def test_the_same_report_gives_the_same_page() -> None:
    one = replace(REPORT, figures=[ROOFLINE])
    assert files.render(one, "html") == files.render(one, "html")


def test_figure_files(tmp_path: Path) -> None:
    one = replace(REPORT, figures=[STACKED])
    paths = files.write_figures(one, tmp_path)
    assert [path.name for path in paths] == ["sample-operations.svg", "sample-operations.png"]
    first = paths[0].read_bytes()
    assert ElementTree.fromstring(first).tag.endswith("svg")
    assert paths[1].read_bytes().startswith(b"\x89PNG")
    files.write_figures(one, tmp_path)
    assert paths[0].read_bytes() == first
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInput, match="out"):
        files.write_figures(one, tmp_path / "file")


def test_json_is_the_facts_on_one_line() -> None:
    rendered = files.render(REPORT, "json")
    assert rendered.count("\n") == 1
    found = json.loads(rendered, parse_constant=pytest.fail)
    made = found.pop("made")
    assert found.pop("made_by") == f"dpkern {version_with_commit()}"
    assert found == {**REPORT.facts, "limit": "inf"}
    assert (made["schema"], made["version"], made["report"]) == ("dpkern.cost", 1, REPORT.name)
    assert datetime.fromisoformat(made["date"]).tzinfo is not None
    assert made["host"]


def test_each_table_is_a_tidy_csv_of_its_own(tmp_path: Path) -> None:
    written = files.write_tables(REPORT, tmp_path)
    assert len(written) == len(REPORT.tables) == len(set(written))
    for path, table in zip(written, REPORT.tables, strict=True):
        rows = list(csv.reader(path.read_text().splitlines()))
        assert rows[0] == list(table.columns)
        assert rows[1:] == [["" if v is None else str(v) for v in row] for row in table.rows]


def test_a_table_that_is_too_wide_is_split_and_no_word_is_broken() -> None:
    columns = ("n", "mechanism", *(f"long heading {i}" for i in range(9)))
    wide = ReportTable(
        title="Wide", columns=columns, rows=[(14, "a_name_of.several.parts", *range(9))] * 2
    )
    parts = text.fitted(wide, 80)
    assert len(parts) > 1
    assert all(part.columns[:2] == ["n", "mechanism"] for part in parts)
    assert [c for part in parts for c in part.columns[2:]] == list(columns[2:])
    console = Console(width=80, color_system=None)
    with console.capture() as captured:
        text.as_text(Report(name="w", title="t", summary="s", facts={}, tables=[wide]), console)
    said = captured.get()
    assert max(map(len, said.splitlines())) <= 80
    assert said.count("heading") == 9
    assert said.count("mechanism") == len(parts)
    assert text.fitted(wide, 400) == [wide]


def test_csv_has_every_table() -> None:
    blocks = files.render(REPORT, "csv").split("\n\n")
    assert len(blocks) == len(REPORT.tables)
    for block, table in zip(blocks, REPORT.tables, strict=True):
        rows = list(csv.reader(block.splitlines()))
        assert rows[:2] == [[table.title], list(table.columns)]
        assert rows[2:] == [["" if v is None else str(v) for v in row] for row in table.rows]


def test_text_has_title_summary_tables_and_notes() -> None:
    rendered = files.render(REPORT, "text")
    expected = [REPORT.title, "74.06 % less", "Operations & costs", "1,234,567", *REPORT.notes]
    assert all(part in rendered for part in expected)
    assert "\x1b" not in rendered


def test_columns_that_say_the_same_in_every_row_become_a_note() -> None:
    rows = [("K7", "ADD", 1), ("K7", "MUL", 3), ("K7", "DIV", 3)]
    table = ReportTable(title="t", columns=("on", "op", "price"), rows=rows, note="N.")
    short = text.condensed(table)
    assert list(short.columns) == ["op", "price"]
    assert short.note == "Every row: on K7. N."
    few = replace(table, rows=rows[:2])
    assert text.condensed(few) is few
    assert "K7,ADD,1" in text.as_csv(replace(REPORT, tables=[table]))


def test_missing_matplotlib_is_said_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    bare = Report(name="bare", title="t", summary="s", facts={})
    with pytest.raises(MissingDependency, match="pip install matplotlib"):
        files.render(REPORT, "html")
    for kind in ("text", "json", "csv"):
        assert files.render(REPORT, kind) is not None
    assert files.render(bare, "html").count("<svg") == 0


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        *((0, "0"), (364, "364"), (1403, "1.4 k"), (999_999, "1 M"), (12_500, "12.5 k")),
        *((-4.9, "−4.9"), (3e9, "3 G"), (1.5e-5, "1.5 × 10⁻⁵"), (1e-6, "10⁻⁶"), (0.03, "0.03")),
        (999.6, "1 k"),
    ],
)
def test_short_numbers(value: float, shown: str) -> None:
    assert number_format.si_format(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        *((None, "–"), ("a", "a"), (1234567, "1,234,567"), (74.056, "74.06"), (0.1 + 0.2, "0.3")),
        *((2.5e-7, "2.5 × 10⁻⁷"), (float("inf"), "inf"), (-3, "−3"), (12345.6, "12,346")),
    ],
)
def test_cells(value: str | float | None, shown: str) -> None:
    assert number_format.cell(value) == shown


def test_long_names_break_after_dots() -> None:
    assert number_format.wrapped("layer1.0.conv1.weight", 18) == "layer1.0.\nconv1.weight"
    assert number_format.wrapped("two words", 18) == "two words"
    assert number_format.wrapped("and some more words", 9).split("\n") == [
        "and some",
        "more",
        "words",
    ]


def test_sentences_of_a_page_have_numbers_as_in_print() -> None:
    assert tied("6.6e-06 at n = 14: 74 % of 4.1e+03 ms") == (
        "6.6\u00a0×\u00a010⁻⁶ at n\u00a0=\u00a014: 74\u00a0% of 4,100 ms"
    )
    assert tied("layer2e-1 and v1.2e-05x") == "layer2e-1 and v1.2e-05x"


def test_labels_are_spread_in_order_and_no_further_than_needed() -> None:
    assert labels.spread([10, 50], 10, 0, 100) == [10, 50]
    assert labels.spread([50, 52, 10], 10, 0, 100) == [46, 56, 10]
    assert labels.spread([99, 100], 10, 0, 100) == [90, 100]
    assert labels.spread([1, 0], 10, 0, 100) == [10, 0]
