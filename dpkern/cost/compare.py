"""Report of several mechanisms on several processors and sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..base.report import Report, ReportTable
from ..privacy import accounting
from . import break_even, compare_figures, comparison, crossing
from ._numbers import tidy, worded
from .autoencoder import CountOptions
from .comparison import ComparisonSpec
from .count import difference_table, executed, known, notes, total_evidence
from .equal_work import equal_work
from .parts import PARTS, SAMPLES
from .processors import Processor
from .systems import SYSTEMS


def report(
    mechanisms: Sequence[str] = ("spof", "dpsgd-da"),
    *,
    sizes: Sequence[tuple[int, int]] = ((14, 7),),
    processors: Sequence[str | Path | Processor] = ("k7",),
    options: CountOptions | None = None,
    noise: Sequence[str] | None = None,
    layer: str | None = None,
    batches: Sequence[int] = (1,),
) -> Report:
    """Report the costs of mechanisms, and the reduction of each against the last.

    Args:
        mechanisms: two or more names in ``SYSTEMS``; the last is the baseline.
        sizes: pairs of features n and code length l, 1 <= l <= n.
        processors: names in ``processors.available()``, TOML files, or ``Processor``s.
        options: way of counting; as printed by default.
        noise: sources of the noise, names in ``step.noise_tables.named.SOURCES``. None takes all
            for the steps of Appendix G, the printed table first, and ``inline`` for whole steps.
        layer: kind of layer of whole steps: ``dense``, ``circulant`` or ``conv``. None takes a
            convolution where a mechanism works in the frequency domain, else a dense layer.
        batches: samples of a whole step. Norms and sums grow with them; noise and update do not.

    Raises:
        InvalidInput: fewer than two mechanisms or none of the others; a name, size or file that
            cannot be used; a layer, batch or source that a mechanism does not have; mechanisms of
            unequal work.
    """
    question = comparison.asked(mechanisms, sizes, processors, options, noise, layer, batches)
    rows = comparison.rows(question)
    turns = crossing.turns(question)
    weights = comparison.weights(question)
    corrections = comparison.corrections(question)
    evens = break_even.facts(question)
    first, options = question.sizes[0], question.options
    runs = {s.name: executed(s, *first, options) for s in question.systems if s.traced}
    executions = [{"mechanism": name, **run} for name, run in runs.items()]
    evidence = {}
    for system in question.systems:
        run = runs.get(system.name)
        itemised = known(system, *first, question.first, run)
        evidence[system.name] = total_evidence(itemised, run)
    return Report(
        name="compare-" + "-".join(system.name for system in question.systems),
        title=" against ".join(
            (", ".join(s.title for s in question.others), question.baseline.title)
        ),
        summary=_summary(question, rows, turns),
        facts={
            "mechanisms": [
                {**comparison.system_fact(system), "evidence": evidence[system.name]}
                for system in question.systems
            ],
            "baseline": question.baseline.name,
            "processors": [comparison.processor_fact(machine) for machine in question.machines],
            "options": asdict(question.options),
            "noise": list(question.sources),
            "layer": question.layer,
            "batches": list(question.batches),
            "work": [
                {"n": n, "l": code, **asdict(equal_work(question.systems, n, code, question.first))}
                for n, code in question.sizes
            ],
            "costs": [cost for row in rows for cost in row["costs"]],
            "reductions": [r for row in rows for r in row["reductions"]],
            "crossovers": turns,
            "sensitivity": weights,
            "corrections": corrections,
            "break_even": evens,
            "execution": executions,
        },
        tables=_tables(question, rows, turns, weights, corrections, executions, evens),
        figures=compare_figures.figures(question, turns, rows),
        notes=_notes(question, rows, turns, evidence),
    )


def _summary(
    question: ComparisonSpec, rows: list[dict[str, Any]], turns: list[dict[str, Any]]
) -> str:
    first = rows[0]
    machine, base = first["machine"], question.baseline
    costs = {cost["mechanism"]: cost["cost"] for cost in first["costs"]}
    said = []
    for system, fact in zip(question.others, first["reductions"], strict=True):
        less = fact["reduction_percent"]
        words = "the baseline is free" if less is None else _less(less)
        said.append(
            f"{system.title} costs {worded(costs[system.name])} {machine.unit} on {machine.title}, "
            f"{base.title} {worded(costs[base.name])}: {words}, at {_place_words(question, first)}"
            f"{_noise_words(first)}."
        )
    for turn in turns:
        here = turn["processor"] == machine.name and turn["noise"] == first["noise"]
        if turn["along"].startswith("n") and here and turn["points"]:
            title = SYSTEMS[turn["mechanism"]].title
            near = turn["points"][0]
            way = "costs more" if near["cheaper_below"] else "costs less"
            said.append(f"With l = n/2, {title} {way} from n = {near['to']} on.")
    said += _as_noise_becomes_real(question, rows)
    return " ".join(said)


def _place_words(question: ComparisonSpec, row: dict[str, Any]) -> str:
    """Return the size of the work that a row compares."""
    said = f"n = {row['n']}, l = {row['l']}"
    if not question.whole:
        return said
    work = equal_work(question.systems, row["n"], row["l"], question.first)
    samples = "1 sample" if row["batch"] == 1 else f"{row['batch']:,} samples"
    return f"{said} ({work.parameters:,} parameters of a {work.layer} layer each, {samples})"


def _noise_words(row: dict[str, Any]) -> str:
    """Name the source of a row's noise where it protects nothing."""
    least = min(fact.claimed for fact in row["epsilons"].values())
    return f", with noise from a {row['noise']}: epsilon infinite" if math.isinf(least) else ""


def _as_noise_becomes_real(question: ComparisonSpec, rows: list[dict[str, Any]]) -> list[str]:
    """Say what becomes of the first reduction with the other sources of noise."""
    first, said = rows[0], []
    place = ("n", "l", "batch")
    machine = first["machine"]
    if len(question.sources) > 1 and machine.unpriced({"RNG": 1}):
        return [f"{machine.title} has no price for random words: real noise looks cheap there."]
    for row in rows[1:]:
        same = row["machine"] is machine and all(row[k] == first[k] for k in place)
        less = row["reductions"][0]["reduction_percent"]
        if same and less is not None:
            said.append(f"{_less(less)} with {row['noise']}")
    if not said:
        return []
    return [f"As noise becomes real, {question.others[0].title} costs {', '.join(said)}."]


def _less(percent: float) -> str:
    if percent == 0:
        return "as much"
    return f"{abs(percent):.2f} % {'less' if percent > 0 else 'more'}"


def _tables(
    question: ComparisonSpec,
    rows: list[dict[str, Any]],
    turns: list[dict[str, Any]],
    weights: list[dict[str, Any]],
    corrections: list[dict[str, Any]],
    executions: list[dict[str, Any]],
    evens: list[dict[str, Any]],
) -> list[ReportTable]:
    titles = {system.name: system.title for system in question.systems}
    machines = {machine.name: machine for machine in question.machines}
    against = [f"{s.title} saves (%)" for s in question.others]
    places = ("n", "l", "batch") if question.whole else ("n", "l")
    tables = [
        ReportTable(
            title="Costs",
            columns=(*places, "noise", "processor", *titles.values(), *against),
            rows=[
                (
                    *(row[place] for place in places),
                    row["noise"],
                    row["machine"].title,
                    *(cost["cost"] for cost in row["costs"]),
                    *(r["reduction_percent"] for r in row["reductions"]),
                )
                for row in rows
            ],
            note=f"Saved against {question.baseline.title}; negative where it costs more. "
            f"Units: {_units(question)}.",
        ),
        *([_part_table(question, rows)] if question.whole else []),
        _epsilon_table(question, rows),
    ]
    if evens:
        tables.append(break_even.table(question, evens))
    if corrections:
        tables.append(
            ReportTable(
                title=f"Other ways of counting, n = {question.sizes[0][0]}, "
                f"l = {question.sizes[0][1]}, {question.machines[0].title}",
                columns=("count", *titles.values(), *against),
                rows=[
                    (fact["count"], *fact["costs"].values(), *fact["reductions_percent"].values())
                    for fact in corrections
                ],
                note="What SPOF's Appendix G counts too often, or leaves out, corrected.",
            )
        )
    if any(turn["points"] for turn in turns):
        tables.append(_crossover_table(question, turns))
    tables.append(
        ReportTable(
            title="What the reduction owes to each price",
            columns=(
                *("mechanism", "processor", "operation", "price"),
                *("points per percent of price", "% saved if free", "if halved", "if doubled"),
            ),
            rows=[
                (
                    titles[w["mechanism"]],
                    machines[w["processor"]].title,
                    w["operation"],
                    w["cost"],
                    w["slope_points_per_percent"],
                    w["reduction_if_free"],
                    w["reduction_if_halved"],
                    w["reduction_if_doubled"],
                )
                for w in weights
                if len({w[f"reduction_if_{price}"] for price in ("free", "halved", "doubled")}) > 1
            ],
            note="A price that is not listed changes nothing.",
        )
    )
    for fact in executions:
        table = difference_table(fact["differences"], question.machines[0])
        if table.rows:
            title = f"{titles[fact['mechanism']]}: {table.title.lower()}"
            tables.append(
                ReportTable(title=title, columns=table.columns, rows=table.rows, note=table.note)
            )
    return tables


def _part_table(question: ComparisonSpec, rows: list[dict[str, Any]]) -> ReportTable:
    """Build the table of a step's parts: norms for each sample, the rest for each parameter."""
    titles = {system.name: system.title for system in question.systems}
    return ReportTable(
        title="Parts of a step, for each parameter",
        columns=(
            *("n", "l", "batch", "noise", "processor", "mechanism"),
            f"{SAMPLES}, a sample",
            *PARTS[1:],
            "whole step",
        ),
        rows=[
            (
                *(row["n"], row["l"], row["batch"], row["noise"], row["machine"].title),
                titles[cost["mechanism"]],
                tidy(cost["parts"][SAMPLES] / row["batch"] / cost["parameters"]),
                *(tidy(cost["parts"][part] / cost["parameters"]) for part in PARTS[1:]),
                cost["per_parameter"],
            )
            for row in rows
            for cost in row["costs"]
        ],
        note=f"{_units(question)}, divided by the number of parameters; {SAMPLES} by the batch "
        "too. The others are paid once in a step.",
    )


def _crossover_table(question: ComparisonSpec, turns: list[dict[str, Any]]) -> ReportTable:
    titles = {system.name: system.title for system in question.systems}
    machines = {machine.name: machine for machine in question.machines}
    return ReportTable(
        title="Crossovers",
        columns=("mechanism", "processor", "noise", "along", "between", "near", "beyond it"),
        rows=[
            (
                titles[turn["mechanism"]],
                machines[turn["processor"]].title,
                turn["noise"],
                turn["along"],
                f"{point['from']} and {point['to']}",
                point["near"],
                "costs more" if point["cheaper_below"] else "costs less",
            )
            for turn in turns
            for point in turn["points"]
        ],
        note=f"Against {question.baseline.title}, searched up to n = {question.largest} and l = n. "
        f"What is not listed has no crossover there.{_tie_words(question)}",
    )


def _tie_words(question: ComparisonSpec) -> str:
    return " A difference of a tile of draws for each tensor is a tie." if question.whole else ""


def _units(question: ComparisonSpec) -> str:
    return ", ".join(f"{machine.unit} on {machine.title}" for machine in question.machines)


def _epsilon_table(question: ComparisonSpec, rows: list[dict[str, Any]]) -> ReportTable:
    titles = {system.name: system.title for system in question.systems}
    found: dict[tuple[Any, ...], None] = {}
    for row in rows:
        for name, fact in row["epsilons"].items():
            shown = (accounting.shown_bound(e) for e in (fact.claimed, fact.certified, fact.delta))
            found[row["n"], row["l"], row["noise"], titles[name], *shown, fact.of] = None
    return ReportTable(
        title="Epsilon of what is counted",
        columns=("n", "l", "noise", "mechanism", "claimed", "certified", "delta", "of"),
        rows=[*found],
        note="A table of samples that are read again and again protects nothing.",
    )


def _notes(
    question: ComparisonSpec,
    rows: list[dict[str, Any]],
    turns: list[dict[str, Any]],
    evidence: dict[str, str],
) -> list[str]:
    said = [f"{system.title}: {system.scope}; {system.reference}." for system in question.systems]
    each = ", ".join(f"{system.title} {evidence[system.name]}" for system in question.systems)
    said.append(f"Evidence of the counts, that of the weakest line: {each}.")
    if not any(turn["points"] for turn in turns):
        said.append(
            f"No crossover against {question.baseline.title} up to n = {question.largest} and "
            f"l = n.{_tie_words(question)}"
        )
    for machine in question.machines:
        unpriced = {
            primitive: None
            for row in rows
            for cost in row["costs"]
            if cost["processor"] == machine.name
            for primitive in cost["unpriced"]
        }
        said += notes(machine, unpriced)
    return said


__all__ = ["SYSTEMS", "report"]
