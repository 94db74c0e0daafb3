"""Render a report as one page that refers to nothing outside itself.

Figures are drawn twice, for a desk and for a phone, and the style sheet shows the one that fits;
their colours are the page's variables, so dark mode and print change them too.
"""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Any

from ..base.commit import version_with_commit
from ..base.json import dumps
from ..base.report import Figure, Report, ReportTable
from ..base.validate import require
from ..drawing.number_format import cell, scientific_text
from . import figures
from .bars import palette
from .text import condensed, numeric_columns, undated

_SCIENTIFIC = re.compile(r"(?<![\w.])\d+(?:\.\d+)?e[+-]\d+\b")
_UNBROKEN = "\N{NO-BREAK SPACE}\\1\N{NO-BREAK SPACE}"


def page(report: Report) -> str:
    """Return the page; everything that the report says is escaped.

    Raises:
        MissingDependency: without matplotlib or jinja2.
    """
    jinja2 = require("jinja2")
    markup = require("markupsafe").Markup
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    colours = palette(report.figures)
    environment.filters["tied"] = tied
    template = environment.from_string(_source("page.html"))
    text: str = template.render(
        report=report,
        version=version_with_commit(),
        style=markup(_source("page.css")),
        figures=[
            _figure(figure, number, colours, markup) for number, figure in enumerate(report.figures)
        ],
        tables=[_table(table, markup) for table in report.tables],
        pretty=dumps(dict(report.facts), indent=2),
        # Within a script element nothing is unescaped but its end, which JSON can spell otherwise.
        facts=markup(dumps(undated(report)).replace("<", "\\u003c")),
    )
    return text


def tied(text: str) -> str:
    """Typeset a sentence as in print, also 6.6e-06; no line ends in ``n = 14``, before ``%``."""
    text = re.sub(r" ([=<>×]) ", _UNBROKEN, in_print(text))
    return re.sub(r" %", "\N{NO-BREAK SPACE}%", text)


def in_print(text: str) -> str:
    """Typeset the numbers of a text: 6.6e-06, inf."""
    return re.sub(r"\binf\b", "∞", _SCIENTIFIC.sub(_number_in_print, text))


def _number_in_print(found: re.Match[str]) -> str:
    """Typeset a number; small ones keep their digits: bounds have been rounded before."""
    return scientific_text(found[0]) if "e-" in found[0] else cell(float(found[0]))


def _source(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _figure(figure: Figure, number: int, colours: dict[str, str], markup: Any) -> dict[str, Any]:
    drawn = {
        name: markup(figures.inline(figure, size, f"f{number}{name[0]}-", colours))
        for name, size in (("wide", figures.WIDE), ("narrow", figures.NARROW))
    }
    return {
        "name": figure.name,
        "title": figure.title,
        "caption": figure.caption,
        **drawn,
    }


def _table(given: ReportTable, markup: Any) -> dict[str, Any]:
    table = condensed(given)
    kinds = [markup(' class="number"') if numeric else "" for numeric in numeric_columns(table)]
    return {
        "title": table.title,
        "note": table.note,
        "columns": [
            {"name": name, "kind": kind} for name, kind in zip(table.columns, kinds, strict=True)
        ],
        "rows": [
            [
                {"text": in_print(cell(value)), "kind": kind}
                for value, kind in zip(row, kinds, strict=True)
            ]
            for row in table.rows
        ],
    }
