"""Report of one mechanism: its operations line by line, their price, an execution's count."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..base import validate as check
from ..base.counts import EXECUTED, FORMULA, WALK, Item, Itemised
from ..base.report import Figure, Report, ReportTable, Series
from ..step.noise_tables.named import SOURCES
from . import processors, trace
from ._numbers import listed, percent, tidy, worded
from .autoencoder import PRINTED, CountOptions
from .processors import Processor
from .systems import SYSTEMS, CostModel, CountWay, check_layer, check_options, check_size


def report(
    mechanism: str = "spof",
    *,
    size: tuple[int, int] = (14, 7),
    processor: str | Path | Processor = "k7",
    options: CountOptions | None = None,
    noise: str | None = None,
    layer: str | None = None,
) -> Report:
    """Report what one step of ``mechanism`` takes.

    Args:
        mechanism: a name in ``systems.SYSTEMS``.
        size: features n of the autoencoder and length l of its code, 1 <= l <= n.
        processor: a name in ``processors.available()``, a TOML file, or a ``Processor``.
        options: way of counting; as printed by default.
        noise: source of the noise. None takes the one that the mechanism presumes.
        layer: kind of layer of a whole step. None takes the mechanism's own.

    Raises:
        InvalidInput: another name, size or file, options that change nothing, or a layer or source
            that the mechanism does not have.
    """
    system = SYSTEMS[check.choice(tuple(SYSTEMS), mechanism=mechanism)]
    machine = processors.load(processor)
    options = PRINTED if options is None else options
    n, code = size
    check_size(n, code)
    check_options([system], options)
    check_layer([system], layer)
    if noise is not None:
        check.choice(SOURCES, noise=noise)
    way = CountWay(options=options, source=noise or system.presumed, layer=layer)
    execution = executed(system, n, code, options) if system.traced else None
    itemised = known(system, n, code, way, execution)
    epsilon = system.epsilon(n, code, way)
    total = machine.price(itemised.counts)
    unpriced = machine.unpriced(itemised.counts)
    evidence = total_evidence(itemised, execution)
    weights = _weights(itemised, machine)
    tables = [_itemised_table(itemised, machine, evidence), _weight_table(weights, machine)]
    if execution is not None:
        tables.append(difference_table(execution["differences"], machine))
    return Report(
        name=f"count-{mechanism}",
        title=f"{system.title}: the operations of a step, n = {n}, l = {code}",
        summary=f"{_summary(system, machine, total, execution)} Noise: {way.source}; "
        f"{epsilon.words} (claimed / certified).",
        facts={
            "mechanism": mechanism,
            "title": system.title,
            "scope": system.scope,
            "source": system.reference,
            "n": n,
            "l": code,
            "processor": machine.name,
            "unit": machine.unit,
            "options": asdict(options),
            "noise": way.source,
            "layer": layer,
            "epsilon": asdict(epsilon),
            "cost": tidy(total),
            "counts": dict(itemised.counts),
            "evidence": evidence,
            "operations": machine.operations(itemised.counts),
            "unpriced": unpriced,
            "items": [_fact(item, machine) for item in itemised.items],
            "weights": weights,
            "execution": execution,
        },
        tables=tables,
        figures=_figures(system, itemised, machine),
        notes=notes(machine, unpriced),
    )


def executed(system: CostModel, n: int, code: int, options: CountOptions) -> dict[str, Any]:
    """Walk the steps on a random record with counting numbers, and compare with the closed form.

    ``agrees``: whether it counts, item by item, what the form counts when nothing is left out.
    """
    numbers = random.Random(n * 1_000_003 + code)
    sample = trace.Sample(
        x=[numbers.random() for _ in range(n)],
        hidden=[numbers.random() for _ in range(code)],
        decoder=[numbers.gauss(0, 1) for _ in range(n * code)],
        table=[numbers.gauss(0, 1) for _ in range(64)],
        stride=37,
        base=11,
    )
    counted = trace.op_trace(system.name, sample, options=options).counted
    gaps = trace.differences(system.name, n, code, counted=counted, options=options)
    model = trace.differences(system.name, n, code, options=options)
    return {
        "agrees": gaps == model,
        "counts": dict(counted.counts),
        "differences": [{"item": item.name, "counts": dict(item.counts)} for item in gaps],
    }


def known(
    system: CostModel, n: int, code: int, way: CountWay, execution: dict[str, Any] | None
) -> Itemised:
    """Return the closed form; lines that the walk confirmed carry its evidence.

    The walk reads the printed table; draws of other sources have the evidence of their kernels.
    """
    itemised = system.form(n, code, way)
    if execution is None:
        return itemised
    apart = {gap["item"] for gap in execution["differences"]}
    return Itemised(
        tuple(
            item
            if item.evidence == EXECUTED
            else replace(item, evidence=FORMULA if item.name in apart else WALK)
            for item in itemised.items
        )
    )


def total_evidence(itemised: Itemised, execution: dict[str, Any] | None) -> str:
    """Return the evidence of the weakest line; a total that leaves something out is a formula's."""
    apart = execution is not None and bool(execution["differences"])
    return FORMULA if apart else itemised.evidence


def difference_table(differences: list[dict[str, Any]], machine: Processor) -> ReportTable:
    """Build the table of what a walk did beyond the closed form, line by line."""
    return ReportTable(
        title="A walk of the steps against the count",
        columns=("item", "operations beyond the count", f"cost ({machine.unit})"),
        rows=[
            (gap["item"], listed(gap["counts"]), tidy(machine.price(gap["counts"])))
            for gap in differences
        ],
        note="The steps were done with numbers that count each operation; all other lines agree "
        "exactly. Negative: the source counts more than is needed.",
    )


def notes(machine: Processor, unpriced: Iterable[str]) -> list[str]:
    """Return what a price on this processor leaves out, and where its numbers come from."""
    said = [f"{machine.title}, {machine.unit}. {machine.note}".strip()]
    reasons = "; ".join(f"{primitive} ({machine.missing[primitive]})" for primitive in unpriced)
    if reasons:
        said.append(f"{machine.title} has no price for {reasons}: they count as nothing here.")
    said += [f"Source: {source}." for source in machine.sources]
    return said


def _summary(
    system: CostModel, machine: Processor, total: float, execution: dict[str, Any] | None
) -> str:
    said = f"{system.title}: {worded(total)} {machine.unit} on {machine.title}, {system.scope}."
    if execution is None:
        return said
    verdict = "agrees with" if execution["agrees"] else "DIFFERS from"
    return f"{said} A walk of its steps, with the printed table, {verdict} the closed form."


def _fact(item: Item, machine: Processor) -> dict[str, Any]:
    return {
        "item": item.name,
        "counts": dict(item.counts),
        "cost": tidy(machine.price(item.counts)),
        "kind": item.kind,
        "evidence": item.evidence,
        "note": item.note,
    }


def _itemised_table(itemised: Itemised, machine: Processor, evidence: str) -> ReportTable:
    rows: list[tuple[str | int | float, ...]] = [
        (i.name, listed(i.counts), tidy(machine.price(i.counts)), f"{i.kind}, {i.evidence}", i.note)
        for i in itemised.items
    ]
    counts = itemised.counts
    whole = listed(counts), tidy(machine.price(counts))
    rows.append(("total", *whole, evidence, ""))
    return ReportTable(
        title="Operations, line by line",
        columns=("item", "operations", f"cost ({machine.unit})", "kind", "note"),
        rows=rows,
        note="printed: as the source counts; exact: to the last operation; modelled: a "
        "textbook form of a library's routine; random: depends on the noise. executed: "
        "equal to what the kernel's own template does on numbers that count; reference walk: equal "
        "to what plain code does, operation by operation; formula: a closed form and no more.",
    )


def _weights(itemised: Itemised, machine: Processor) -> list[dict[str, Any]]:
    """Return each operation's share of the cost.

    The share is also the percentage by which the cost rises when the operation's price rises by one
    percent.
    """
    done = machine.operations(itemised.counts)
    total = machine.price(itemised.counts)
    return [
        {
            "operation": operation,
            "times": times,
            "price": tidy(machine.costs[operation]),
            "cost": tidy(times * machine.costs[operation]),
            "share_percent": percent(100 * times * machine.costs[operation] / total)
            if total
            else None,
        }
        for operation, times in done.items()
    ]


def _weight_table(weights: list[dict[str, Any]], machine: Processor) -> ReportTable:
    return ReportTable(
        title="What each price weighs",
        columns=("operation", "times", f"price ({machine.unit})", "cost", "share (%)"),
        rows=[tuple(weight.values()) for weight in weights],
        note="The share is also by how many percent the cost rises per percent of the price.",
    )


def _names(itemised: Itemised) -> list[str]:
    """Return one unique name per line: lines of the same name add their kind."""
    times = Counter(item.name for item in itemised.items)
    return [i.name if times[i.name] == 1 else f"{i.name}, {i.kind}" for i in itemised.items]


def _figures(system: CostModel, itemised: Itemised, machine: Processor) -> list[Figure]:
    names = _names(itemised)
    each = [machine.operations(item.counts) for item in itemised.items]
    present = [o for o in machine.costs if any(o in done for done in each)]
    return [
        Figure(
            name="operations",
            title=f"{system.title}: operations of every line",
            caption=f"How often each operation of {machine.title} occurs.",
            kind="stacked",
            x_label="line of the count",
            y_label="operations",
            series=[Series(label=o, x=names, y=[d.get(o, 0) for d in each]) for o in present],
            horizontal=True,
        ),
        Figure(
            name="cost",
            title=f"{system.title}: cost of every line",
            caption="The same operations by their price.",
            kind="stacked",
            x_label="line of the count",
            y_label=machine.unit,
            series=[
                Series(label=o, x=names, y=[tidy(d.get(o, 0) * machine.costs[o]) for d in each])
                for o in present
                if machine.costs[o]
            ],
            horizontal=True,
        ),
    ]


__all__ = ["difference_table", "executed", "known", "notes", "report", "total_evidence"]
