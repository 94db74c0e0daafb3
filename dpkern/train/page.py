"""The contents of a run's page: the verdict first, then curves against steps, then the numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ..base import collapse
from ..base.report import Figure, Report, ReportTable, Series
from ..privacy.accounting import shown_bound, shown_lower_bound
from .display import SummaryTable, number
from .report import FigureSpec

COVERED = (
    "Epsilon covers the parameters, private ranges and every checkpoint of this run. Held-out rows "
    "are not protected: their loss and accuracy stand here as they are."
)


def report_of(
    summary: Mapping[str, Any],
    history: Sequence[Any],
    drawn: FigureSpec,
    shown: SummaryTable,
) -> Report:
    """Return the report of a complete run.

    Args:
        summary: the run in JSON terms.
        history: one record per epoch, with ``step``.
        drawn: curves and levels by panel.
        shown: results and settings of the run's kind.
    """
    results = [(name, value) for name, value in shown.results if value is not None]
    answers = "; ".join(f"{name} {number(value)}" for name, value in results)
    answers = answers[:1].upper() + answers[1:]
    spread = collapse.of_facts(summary)
    outputs = [] if spread is None else [("outputs", spread.sentence)]
    collapsed = f" {spread.sentence}." if spread is not None and spread.collapsed else ""
    notes = [*summary["warnings"], COVERED, *shown.data]
    notes += [f"{note['id']}: {note['text']}" for note in summary["notes"]]
    figures = []
    for name, values in drawn.panels.items():
        figure = _figure(name, values, history, drawn)
        if figure is None:
            notes.append(f"No figure shows {name}: it has no finite values.")
        else:
            figures.append(figure)
    return Report(
        name="training",
        kind="training",
        title=shown.title,
        summary=f"The released model is {summary['statement']}. {answers}.{collapsed}",
        facts={**summary, "history": [asdict(record) for record in history]},
        tables=[
            _epsilons(summary),
            ReportTable(
                title="The run",
                columns=("", "value"),
                rows=[
                    (name, number(value))
                    for name, value in (*results, *outputs, *shown.settings, *shown.last)
                    if value is not None
                ],
            ),
            *_ranges(summary),
        ],
        figures=figures,
        notes=notes,
    )


def _ranges(summary: Mapping[str, Any]) -> list[ReportTable]:
    """Return the table of private ranges, where a run has some."""
    found = summary.get("private_ranges")
    if not found:
        return []
    return [
        ReportTable(
            title="Private ranges",
            columns=("column", "lowest", "highest"),
            rows=[
                (name, number(low), number(high)) for name, (low, high) in found["columns"].items()
            ],
            note="Numbers outside are cut off. The ranges were released with noise, and epsilon "
            "covers them.",
        )
    ]


def _figure(
    name: str, values: Sequence[float | None], history: Sequence[Any], drawn: FigureSpec
) -> Figure | None:
    """Return the curve of one panel with its levels; None without a finite value."""
    known = [
        (record.step, value)
        for record, value in zip(history, values, strict=True)
        if value is not None and math.isfinite(value)
    ]
    if not known:
        return None
    steps, heights = zip(*known, strict=True)
    ends = (0, steps[-1])
    levels = {
        f"{label} {level.shown()}": float(level)
        for label, level in drawn.levels.get(name, {}).items()
    }
    levels |= drawn.baselines.get(name, {})
    return Figure(
        name=name.replace(" ", "-"),
        title=name[:1].upper() + name[1:],
        caption=f"{name[:1].upper()}{name[1:]} after each epoch, against optimizer steps.",
        kind="lines",
        x_label="optimizer steps",
        y_label=name,
        series=[
            Series(label=name, x=steps, y=heights),
            *(Series(label=label, x=ends, y=(level, level)) for label, level in levels.items()),
        ],
    )


def _epsilons(summary: Mapping[str, Any]) -> ReportTable:
    """Return the table of the three epsilons: claimed, certified, audited."""
    certified, audited = summary["epsilon_certified"], summary.get("epsilon_audited")
    lower = "not audited" if audited is None else f"at least {shown_lower_bound(audited)}"
    audit = summary.get("audit")
    gaussian = audit["epsilon_if_gaussian"] if isinstance(audit, dict) else None
    if gaussian is not None:
        lower += f"; {shown_lower_bound(gaussian)} if its steps are Gaussian"
    proved = "none" if certified == "inf" else f"at most {shown_bound(certified)}"
    return ReportTable(
        title="Three epsilons",
        columns=("", "epsilon", "what it is"),
        rows=[
            ("claimed", shown_bound(summary["epsilon_claimed"]), summary["claim"]),
            ("certified", proved, f"proved for {summary['certified_for']}, {summary['relation']}"),
            ("audited", lower, "what an attack on the run's step has shown"),
        ],
        note=f"All at delta = {shown_bound(summary['delta'])}.",
    )
