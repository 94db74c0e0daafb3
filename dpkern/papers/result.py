"""Hold a reproduced table or figure, and write it: JSON, CSV, SVG and PNG.

Every row carries the published value beside ours, and the epsilon that the paper claims beside the
one that is certified. Where a paper prints nothing, the row says so; where data are generated, the
row says that.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeGuard

from ..base.json import dumps, plain
from ..base.outputs import write_atomically
from .figure import DiagramBox, Line, Panel, draw
from .verdict import Verdict

NONE_PUBLISHED = "none published"
PANELS, WIDE = 6, 100.0
"""Quantities of a table that are drawn, and the ratio from which on an axis is logarithmic."""
FORMULA = "formula"
"""The data of a row that needs none."""


@dataclass(frozen=True, kw_only=True)
class ComparisonRow:
    """One number of a paper beside ours.

    Attributes:
        item: table or figure.
        setting: cell of the table or figure.
        quantity: name of the number in ``published`` and ``ours``.
        published: the paper's number, or text such as a range. None means that it prints none.
        ours: the number found here.
        epsilon_claimed: epsilon by the paper's rule. None means that the row is not about privacy.
        epsilon_certified: proved for what is released; infinite where nothing is.
        relation: neighbouring relation of ``epsilon_certified``.
        data: name of the data, or ``formula``.
        seeds: number of repetitions behind ``ours``; 0: none is random.
        spread: half the range over the seeds, or half a 95 % interval where a note says so.
        ms_per_step: wall time of a training step, where it was requested.
        stopped: number of runs that the divergence guard stopped; None where nothing was trained.
        collapsed: number of runs whose outputs are the same for every held-out record.
        note: note that a reader of the row needs.
    """

    item: str
    setting: str
    quantity: str
    published: float | str | None = None
    ours: float | str | None = None
    epsilon_claimed: float | None = None
    epsilon_certified: float | None = None
    relation: str = ""
    data: str = FORMULA
    seeds: int = 0
    spread: float | None = None
    ms_per_step: float | None = None
    stopped: int | None = None
    collapsed: int | None = None
    note: str = ""

    @property
    def guard(self) -> str:
        """The runs that tell nothing of their method, in words; empty where nothing was trained."""
        counts = [(self.stopped, "stopped"), (self.collapsed, "collapsed")]
        if all(count is None for count, _ in counts):
            return ""
        found = ", ".join(f"{count} {name}" for count, name in counts if count)
        return f"{found or 'none'} of {self.seeds}"


@dataclass(frozen=True, kw_only=True)
class Result:
    """A reproduced item.

    Attributes:
        paper, item: the requested paper and item.
        title: name in words.
        rows: the table.
        panels: the figure; without any, published and own numbers are drawn row by row.
        notes: readings, defects by their register's id, and what the data are.
        settings: the numbers that the item was computed with.
        verdicts: printed claims, and what the numbers say of each.
        control: what training without noise reached, and whether that is enough; empty without it.
    """

    paper: str
    item: str
    title: str
    rows: Sequence[ComparisonRow]
    panels: Sequence[Panel] = ()
    notes: Sequence[str] = ()
    settings: dict[str, Any]
    verdicts: Sequence[Verdict] = ()
    control: str = ""

    def judged(self, verdicts: Sequence[Verdict]) -> Result:
        """Return the same item with these verdicts."""
        return replace(self, verdicts=verdicts)

    @property
    def stem(self) -> str:
        """The stem of the file names."""
        return f"{self.paper}-{self.item}" if self.item else self.paper

    def to_dict(self) -> dict[str, Any]:
        """Return the result in JSON terms.

        Infinity is ``"inf"``, an unpublished value ``"none published"``.
        """
        content: dict[str, Any] = plain(asdict(self))
        for row in content["rows"]:
            row["published"] = NONE_PUBLISHED if row["published"] is None else row["published"]
        return content

    def write(self, folder: Path, *, figure: bool = True) -> dict[str, Path]:
        """Write ``<paper>-<item>.json``, ``.csv``, ``.svg`` and ``.png``, each whole or not at all.

        Raises:
            InvalidInput: the folder cannot be written.
            MissingDependency: a figure without matplotlib.
        """
        paths = {kind: folder / f"{self.stem}.{kind}" for kind in ("json", "csv")}
        if figure:
            panels = list(self.panels) or _of_rows(self)
            paths |= draw(panels, self._headline(), folder, self.stem, footer=self.footer)
        write_atomically(paths["csv"], lambda file: file.write(self.csv().encode()))
        text = dumps(self.to_dict(), indent=2) + "\n"
        write_atomically(paths["json"], lambda file: file.write(text.encode()))
        return paths

    @property
    def guard(self) -> str:
        """The number of runs that were stopped or collapsed; empty where nothing was trained."""
        # Several rows may tell different numbers of the same runs.
        trained = {row.setting: row for row in self.rows if row.guard}.values()
        if not trained:
            return ""
        runs, stopped, collapsed = (
            sum(getattr(row, name) or 0 for row in trained)
            for name in ("seeds", "stopped", "collapsed")
        )
        return (
            f"guard: of {runs} runs {stopped} were stopped, {collapsed} collapsed (the same output "
            "for every record)"
        )

    @property
    def footer(self) -> str:
        """The control and the guard in one text, which stands below figure and table."""
        return "; ".join(text for text in (self.control, self.guard) if text)

    def _headline(self) -> str:
        """Return the figure's headline, with the data that its numbers were measured on."""
        title = f"{self.stem.replace('-', ' ', 1)}: {self.title}"
        data = sorted({row.data for row in self.rows} - {FORMULA})
        return f"{title}\ndata: {'; '.join(data)}" if data else title

    def csv(self) -> str:
        """Return the rows as CSV, with a header."""
        text = io.StringIO()
        names = [field.name for field in fields(ComparisonRow)]
        writer = csv.DictWriter(text, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.to_dict()["rows"])
        return text.getvalue()


@dataclass(frozen=True)
class Paper:
    """The settings and notes that the items of one paper have in common.

    Attributes:
        name: name that ``dpkern reproduce`` takes.
        settings: settings that every item was computed with.
        notes: notes of every item that has none of its own.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()

    def result(
        self,
        item: str,
        title: str,
        rows: Sequence[ComparisonRow],
        panels: Sequence[Panel] = (),
        notes: Sequence[str] | None = None,
        **settings: Any,
    ) -> Result:
        """Return an item of the paper; ``settings`` are those that only this item has."""
        return Result(
            paper=self.name,
            item=item,
            title=title,
            rows=rows,
            panels=panels,
            notes=self.notes if notes is None else notes,
            settings={**self.settings, **settings},
        )


def _of_rows(result: Result) -> list[Panel]:
    """Draw the numbers of every row beside its name, a panel for each quantity."""
    quantities = dict.fromkeys(row.quantity for row in result.rows if _is_number(row.ours))
    panels = []
    for quantity in list(quantities)[:PANELS]:
        rows = [row for row in result.rows if row.quantity == quantity]
        both = {name: [getattr(row, name) for row in rows] for name in ("published", "ours")}
        panels.append(by_row(quantity, [row.setting for row in rows], both))
    return panels or [Panel(title=result.title)]


def by_row(
    title: str, settings: Sequence[str], numbers: Mapping[str, Sequence[float | str | None]]
) -> Panel:
    """Draw numbers by label, a place for each setting; what is no number is left out."""
    lines = []
    for label, values in numbers.items():
        found = [
            (float(value), float(place))
            for place, value in enumerate(values, start=1)
            if _is_number(value) and not math.isnan(value)
        ]
        if found:
            x, y = zip(*found, strict=True)
            lines.append(Line(label=label, x=x, y=y, points=True))
    drawn = [x for line in lines for x in line.x if math.isfinite(x)]
    wide = bool(drawn) and min(drawn) > 0 and max(drawn) > WIDE * min(drawn)
    return Panel(title=title, lines=lines, log_x=wide, rows=settings)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float))


__all__ = [
    "FORMULA",
    "NONE_PUBLISHED",
    "ComparisonRow",
    "DiagramBox",
    "Line",
    "Panel",
    "Result",
    "by_row",
]
