"""Draw the figures of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..base.report import Figure, Mark, Series
from . import break_even, processors
from ._numbers import percent, tidy
from .comparison import ComparisonSpec
from .crossing import turns_in_l
from .processors import Processor
from .sensitivity import reduction, sensitivities
from .systems import CostModel

_BESIDE = "Beside each bar: source of the noise, epsilon claimed / certified."

_NO_BREAK = "\N{NO-BREAK SPACE}"


def figures(
    question: ComparisonSpec, turns: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]
) -> list[Figure]:
    """Return figures of stacked operations and prices, noise, cost against n and l, processors.

    Where a figure can show one size, noise source or processor, it shows the first one requested.
    """
    price = break_even.figure(question)
    return [
        *_stacked(question, rows),
        *([] if price is None else [price]),
        _against_n(question, turns),
        _against_l(question, turns),
        _processors(question),
        *(_prices(question, system) for system in question.others),
    ]


def _stacked(question: ComparisonSpec, rows: Sequence[dict[str, Any]]) -> list[Figure]:
    """Stack the operations of every mechanism and source, with its epsilon in the bar's name."""
    machine, (n, code) = question.machines[0], question.sizes[0]
    place = (machine, n, code, question.batches[0])
    shown = [r for r in rows if (r["machine"], r["n"], r["l"], r["batch"]) == place]
    bars = [(system, row) for row in shown for system in question.systems]
    # No line of a label breaks within an epsilon.
    titles = [
        f"{s.title}, {r['noise']}, {r['epsilons'][s.name].words.replace(' ', _NO_BREAK)}"
        for s, r in bars
    ]
    done = [machine.operations(question.counts(s, n, code, r["noise"])) for s, r in bars]
    present = [o for o in machine.costs if any(o in counts for counts in done)]
    where = f"n = {n}, l = {code}, {machine.title}"
    return [
        Figure(
            name="operations",
            title=f"Operations of one step, {where}",
            caption=f"How often each operation of {machine.title} occurs in one step. {_BESIDE}",
            kind="stacked",
            horizontal=len(bars) > 2,
            x_label="mechanism, noise, ε claimed / certified",
            y_label="operations",
            series=[Series(label=o, x=titles, y=[c.get(o, 0) for c in done]) for o in present],
        ),
        Figure(
            name="cost",
            title=f"Cost of one step, {where}",
            caption=f"The same operations by their price: what the rarer ones weigh. {_BESIDE}",
            kind="stacked",
            horizontal=len(bars) > 2,
            x_label="mechanism, noise, ε claimed / certified",
            y_label=machine.unit,
            series=[
                Series(label=o, x=titles, y=[tidy(c.get(o, 0) * machine.costs[o]) for c in done])
                for o in present
                if machine.costs[o]
            ],
        ),
    ]


def _against_n(question: ComparisonSpec, turns: Sequence[dict[str, Any]]) -> Figure:
    machine = question.machines[0]
    points = _points(turns, machine, question.sources[0], "n, l = n/2")
    asked = max(n for n, _ in question.sizes)
    near = [round(1.6 * point["near"]) for point in points]
    last = max(asked, min(question.largest, max([64, *near])))
    codes = _spread(1, (last + 1) // 2)
    sizes = [(2 * code, code) for code in codes]
    return Figure(
        name="cost-against-n",
        title=f"Cost against the features n, code l = n/2, {machine.title}",
        caption=_caption(points, "n", f"n = {last}"),
        kind="lines",
        x_label="features n",
        y_label=machine.unit,
        series=_lines(question, machine, sizes, [n for n, _ in sizes]),
        marks=_marks(points, "n"),
    )


def _against_l(question: ComparisonSpec, turns: Sequence[dict[str, Any]]) -> Figure:
    """Plot prices against l at the first n requested.

    If no crossover lies at l <= n there, n is the first size past the crossover in n instead.
    """
    machine, n, source = question.machines[0], question.sizes[0][0], question.sources[0]
    points = _points(turns, machine, source, f"l, n = {n}")
    in_n = _points(turns, machine, question.sources[0], "n, l = n/2")
    if not points and in_n:
        n = in_n[0]["to"]
        later = [turns_in_l(question, machine, system, n, source) for system in question.others]
        points = _points(later, machine, source, f"l, n = {n}")
    sizes = [(n, code) for code in _spread(1, n)]
    return Figure(
        name="cost-against-l",
        title=f"Cost against the length l of the code, n = {n}, {machine.title}",
        caption=_caption(points, "l", f"l = n = {n}"),
        kind="lines",
        x_label="length l of the code",
        y_label=machine.unit,
        series=_lines(question, machine, sizes, [code for _, code in sizes]),
        marks=_marks(points, "l"),
    )


def _points(
    turns: Sequence[dict[str, Any]], machine: Processor, source: str, along: str
) -> list[dict[str, Any]]:
    return [
        point
        for turn in turns
        if (turn["processor"], turn["along"], turn["noise"]) == (machine.name, along, source)
        for point in turn["points"]
    ]


def _marks(points: Sequence[dict[str, Any]], letter: str) -> list[Mark]:
    return [
        Mark(x=point["near"], y=point["cost"], text=f"{letter} = {point['near']:.1f}")
        for point in points
    ]


def _lines(
    question: ComparisonSpec,
    machine: Processor,
    sizes: Sequence[tuple[int, int]],
    x: Sequence[int],
) -> list[Series]:
    return [
        Series(
            label=system.title,
            x=x,
            y=[tidy(question.price(system, machine, n, code)) for n, code in sizes],
        )
        for system in question.systems
    ]


def _caption(points: Sequence[dict[str, Any]], letter: str, end: str) -> str:
    if points:
        near = ", ".join(f"{letter} = {point['near']:.1f}" for point in points)
        return f"The cheaper mechanism changes near {near}."
    return f"No crossover up to {end}."


def _spread(first: int, last: int, most: int = 33) -> list[int]:
    """Return evenly spaced integers from ``first`` to ``last``, at most ``most`` of them."""
    steps = min(most - 1, last - first)
    if not steps:
        return [first]
    return sorted({first + round(i * (last - first) / steps) for i in range(steps + 1)})


def _processors(question: ComparisonSpec) -> Figure:
    """Compare the requested processors with every shipped one that prices all operations."""
    n, code = question.sizes[0]
    counts = {s.name: question.counts(s, n, code) for s in question.systems}
    asked = {machine.name: machine for machine in question.machines}
    shipped = [processors.load(name) for name in processors.available() if name not in asked]
    priced = [m for m in shipped if not any(m.unpriced(c) for c in counts.values())]
    machines = [*asked.values(), *priced]
    base = counts[question.baseline.name]
    return Figure(
        name="processors",
        title=f"Saved against {question.baseline.title} by processor, n = {n}, l = {code}",
        caption="The same counts at other prices.",
        kind="bars",
        x_label="processor",
        y_label="% saved",
        series=[
            Series(
                label=system.title,
                x=[machine.title for machine in machines],
                y=[
                    percent(reduction(m.price(counts[system.name]), m.price(base)))
                    for m in machines
                ],
            )
            for system in question.others
        ],
        horizontal=True,
    )


def _prices(question: ComparisonSpec, system: CostModel) -> Figure:
    machine, (n, code) = question.machines[0], question.sizes[0]
    mine, base = (question.counts(s, n, code) for s in (system, question.baseline))
    now = reduction(machine.price(mine), machine.price(base))
    found = [s for s in sensitivities(mine, base, machine) if s.cost]
    found.sort(key=lambda s: -abs(s.slope))
    names = [s.operation for s in found]
    return Figure(
        name=f"prices-{system.name}",
        title=f"What one price does to the saving of {system.title}, n = {n}, l = {code}",
        caption=f"{machine.title}: percentage points away from {percent(now)} %.",
        kind="bars",
        x_label="operation",
        y_label="percentage points",
        series=[
            Series(label=label, x=names, y=[_away(value, now) for value in values])
            for label, values in (
                ("price halved", [s.halved for s in found]),
                ("price doubled", [s.doubled for s in found]),
            )
        ],
        horizontal=True,
    )


def _away(value: float | None, now: float | None) -> float | None:
    return None if value is None or now is None else round(value - now, 2)


__all__ = ["figures"]
