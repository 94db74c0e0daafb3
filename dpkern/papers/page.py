"""Write a paper's page: claims with verdicts, figures and tables, all of it in one file."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..base.outputs import write_atomically
from ..base.validate import require
from ..base.version import __version__
from ..privacy.accounting import shown_bound
from ..privacy.accounting.shown import shown_exactly
from ..reports.page import tied
from .result import NONE_PUBLISHED, ComparisonRow, Result
from .show import columns
from .verdict import CERTIFIED, FAILS, HOLDS, UNDECIDED, Verdict

KINDS = {HOLDS: "holds", FAILS: "fails", UNDECIDED: "open"}
"""Classes of the style sheet by verdict."""


def write(paper: str, results: Sequence[Result], path: Path, *, quick: bool) -> None:
    """Write the page of a paper's results; their figures are read beside it, where they exist.

    Raises:
        InvalidInput: the folder cannot be written.
        MissingDependency: without jinja2.
    """
    text = render(paper, results, path.parent, quick=quick)
    write_atomically(path, lambda file: file.write(text.encode()))


def render(paper: str, results: Sequence[Result], folder: Path, *, quick: bool) -> str:
    """Return the page as text; everything that results say is escaped."""
    jinja2 = require("jinja2")
    markup = require("markupsafe").Markup
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["tied"] = tied
    template = environment.from_string(_source(__package__, "page.html"))
    counts = Counter(one.verdict for result in results for one in result.verdicts)
    said = ", ".join(f"{counts[each]} {word}" for each, word in _WORDS.items())
    power = (
        " Quick runs: accuracies of few steps and seeds, on generated data unless a row says "
        "otherwise, decide nothing."
        if quick
        else ""
    )
    text: str = template.render(
        title=f"{paper}: what it prints, and what comes out",
        version=__version__,
        style=markup(_source("dpkern.reports", "page.css")),
        summary=f"{sum(counts.values())} claims: {said}.{power} The certified epsilon stands "
        "beside every number that claims one.",
        items=[_item(result, folder) for result in results],
    )
    return text


_WORDS = {HOLDS: "hold", FAILS: "fail", UNDECIDED: "not decidable here"}


def _source(package: str | None, name: str) -> str:
    assert package is not None
    return files(package).joinpath(name).read_text(encoding="utf-8")


def _item(result: Result, folder: Path) -> dict[str, Any]:
    name = f"{result.paper} {result.item}".strip()
    picture = folder / f"{result.stem}.png"
    shown = columns(result.rows)
    settings = [f"{row.setting}: {row.quantity}" for row in result.rows]
    return {
        "name": name,
        "stem": result.stem,
        "title": result.title,
        "command": f"dpkern reproduce {name}",
        "verdicts": [_verdict(one) for one in result.verdicts],
        "picture": base64.b64encode(picture.read_bytes()).decode() if picture.exists() else "",
        "guard": result.footer,
        "columns": ["setting", *shown],
        "rows": [list(cells) for cells in zip(settings, *shown.values(), strict=True)],
        "notes": [*result.notes, *_row_notes(result.rows), *_data(result)],
    }


def _verdict(one: Verdict) -> dict[str, str]:
    published = "" if one.published is None else shown_exactly(one.published)
    ours = one.number
    if one.unit == CERTIFIED and one.ours is not None:
        ours = f"{shown_bound(one.ours)} {one.unit}"
    return {
        "claim": one.claim,
        "verdict": one.verdict,
        "kind": KINDS[one.verdict],
        "published": published,
        "ours": ours,
        "reason": one.reason,
    }


def _row_notes(rows: Sequence[ComparisonRow]) -> list[str]:
    return list(dict.fromkeys(row.note for row in rows if row.note))


def _data(result: Result) -> list[str]:
    """Return the data of the rows, and that nothing was published where that is so."""
    names = dict.fromkeys(row.data for row in result.rows)
    said = [f"data: {', '.join(names)}"]
    return (
        said
        if any(row.published is not None for row in result.rows)
        else [
            NONE_PUBLISHED,
            *said,
        ]
    )


__all__ = ["render", "write"]
