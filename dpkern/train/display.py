"""Show a run on a terminal: a progress bar while training, a table at the end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from ..base import collapse
from ..privacy.accounting import shown_bound, shown_lower_bound
from ..privacy.accounting.shown import ShownBound


class WatchedSession(Protocol):
    """A session, as a progress bar sees it."""

    @property
    def steps_done(self) -> int: ...

    @property
    def steps_total(self) -> int: ...

    def describe(self, epoch: Any) -> str: ...


class ProgressCallbacks:
    """Callbacks of a session that move a progress bar."""

    def __init__(self, session: WatchedSession, progress: Progress) -> None:
        self._describe = session.describe
        self._progress = progress
        self._task = progress.add_task(
            "", total=session.steps_total, completed=session.steps_done, state=""
        )

    def on_step(self, done: int) -> None:
        self._progress.update(self._task, completed=done)

    def on_epoch(self, epoch: Any) -> None:
        self._progress.update(self._task, state=self._describe(epoch))


@contextmanager
def watching(session: WatchedSession, console: Console) -> Iterator[ProgressCallbacks]:
    """Show a progress bar on ``console`` while the block runs."""
    columns = (
        BarColumn(bar_width=10),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        # Folded, never cut: a label such as "not covered by epsilon" must stay readable.
        TextColumn("{task.fields[state]}", table_column=Column(overflow="fold", no_wrap=False)),
    )
    with Progress(*columns, console=console) as progress:
        yield ProgressCallbacks(session, progress)


def number(value: Any) -> str:
    """Format numbers with five digits, bounds rounded to their side, everything else as it is."""
    if isinstance(value, ShownBound):
        return value.shown()
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def upper(value: float | str | None) -> str | None:
    """Return an upper bound of a summary as text; None where there is none."""
    return None if value is None else shown_bound(value)


def print_table(console: Console, title: str, rows: Iterable[tuple[str, Any]]) -> None:
    """Print two columns, a name and a value per row."""
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, number(value))
    console.print(table, markup=False, highlight=False)


def print_warnings(console: Console, texts: Iterable[str]) -> None:
    """Print one line for each warning; whole, whatever the width."""
    for text in texts:
        console.print(Text(f"Warning: {text}", style="yellow"), soft_wrap=True)


def print_findings(
    console: Console, model: str, trained_parameters: int, findings: Sequence[Mapping[str, Any]]
) -> None:
    """Print the findings about a model, and what to do about each."""
    refused = sum(finding["severity"] == "refuse" for finding in findings)
    verdict = f"{refused} refused" if refused else "nothing to refuse before it runs"
    console.print(
        Text(f"{model}: {verdict}, {trained_parameters} trained parameters"), soft_wrap=True
    )
    if not findings:
        return
    table = Table()
    for heading in ("", "where", "what", "remedy"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        name, kind = finding["name"], finding["kind"]
        where = f"{name} ({kind})" if name else kind
        cells = (finding["severity"], where, finding["what"], finding["remedy"])
        table.add_row(*(Text(cell) for cell in cells))  # a shape in brackets is no markup
    console.print(table)


@dataclass(frozen=True, kw_only=True)
class SummaryTable:
    """The rows that the table at the end of a run shows for its own kind of run.

    Attributes:
        title: above the table.
        results: results as ``(name, value)``; rows without a value are left out.
        settings: settings of the run.
        data: notes on the data.
        last: rows below everything else.
    """

    title: str
    results: Sequence[tuple[str, Any]]
    settings: Sequence[tuple[str, Any]]
    data: Sequence[str]
    last: Sequence[tuple[str, Any]] = ()


def print_summary(console: Console, summary: Mapping[str, Any], shown: SummaryTable) -> None:
    """Print the end of a run; claimed and certified epsilon side by side, then the results."""
    stopped = "yes: its weights stay as they were then" if summary.get("diverged") else None
    outputs = collapse.of_facts(summary)
    rows: list[tuple[str, Any]] = [
        ("epsilon", epsilons(summary)),
        ("claim", summary["claim"]),
        ("privacy", summary["statement"]),
        *shown.results,
        ("outputs", None if outputs is None else outputs.sentence),
        ("epsilon if seed secret", upper(summary.get("epsilon_if_seed_secret"))),
        ("delta", upper(summary["delta"])),
        *(("warning", text) for text in summary["warnings"]),
        *shown.settings,
        ("seconds", f"{summary['seconds']:.1f}"),
        ("report", summary["report"]),
        ("checkpoint", summary["checkpoint"]),
        ("figure", summary["figure"]),
        ("page", summary["page"]),
        ("diverged", stopped),
        *(("note", f"{note['id']}: {note['text']}") for note in summary["notes"]),
        *(("data", note) for note in shown.data),
        *shown.last,
    ]
    print_table(console, shown.title, [(name, value) for name, value in rows if value is not None])


def epsilons(summary: Mapping[str, Any]) -> str:
    """Return each epsilon with its name; an infinite one, and an unaudited step, in words."""
    certified, target = summary["epsilon_certified"], summary.get("calibrated_to")
    proved = "non-private" if certified == "inf" else shown_bound(certified)
    text = f"claimed {shown_bound(summary['epsilon_claimed'])} | certified {proved} | "
    return text + _audited(summary) + (f" (noise calibrated to the {target} one)" if target else "")


def _audited(summary: Mapping[str, Any]) -> str:
    """Return the run's lower bound, converted as claim and certificate are; then its other form."""
    counted = summary.get("epsilon_audited")
    if counted is None:
        return "not audited"
    audit = summary["audit"]
    verdict = " (claim contradicted)" if audit["contradicts_claim"] else ""
    if audit["epsilon_if_gaussian"] is None:
        return f"audited {shown_lower_bound(counted)}{verdict}"
    gaussian = shown_lower_bound(audit["epsilon_if_gaussian"])
    return f"audited {gaussian} if Gaussian, else {shown_lower_bound(counted)}{verdict}"


def print_backends(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print ops by backends, then why the others cannot run: once for all ops, or op by op.

    Args:
        console: console to print to.
        rows: ``op, backend, available, reason``.
    """
    backends = list(dict.fromkeys(row["backend"] for row in rows))
    table = Table(title="Ops and backends", title_justify="left")
    table.add_column("op", overflow="fold")
    for backend in backends:
        table.add_column(backend, overflow="fold")
    for op in dict.fromkeys(row["op"] for row in rows):
        able = {row["backend"]: row["available"] for row in rows if row["op"] == op}
        table.add_row(op, *("yes" if able[backend] else "-" for backend in backends))
    console.print(table)
    for backend in backends:
        by_reason: dict[str, list[str]] = {}
        mine = [row for row in rows if row["backend"] == backend]
        for row in mine:
            by_reason.setdefault(row["reason"], []).append(row["op"])
        by_reason.pop("", None)
        for reason, ops in by_reason.items():
            which = "" if len(ops) == len(mine) else f" ({', '.join(ops)})"
            console.print(Text(f"{backend} {reason}{which}"), soft_wrap=True)
