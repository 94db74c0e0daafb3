"""Item of SPOF's figure 2 in its authors' own protocol: accuracy over the constant c, noiseless.

Three columns: as the code runs it, with its own output as target; with the record as target and the
gradient of the loss, as printed; corrected. The authors stored two sweeps, without their epsilon
and their number of rows.

Source: SPOF, figure 2; the repository theorycoder/distributedautoencoders, commits 70707c97 and
b92bab58.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ...privacy.accounting import shown_bound
from ..intervals import Interval, interval
from ..result import ComparisonRow, Line, Panel, Result
from ..runner import SEEDED, ItemRequest
from ..verdict import FAILS, HOLDS, LEAST_RUNS, UNDECIDED, Verdict, spoiled, undecided
from . import protocol_corrected
from .items import PAPER
from .protocol_corrected import CorrectedRuns
from .protocol_runs import AS_RELEASED, PRINTED, Protocol, ProtocolRuns, protocol, train
from .protocol_verdicts import COLLAPSED
from .raw_results import EPSILONS, StoredSweep
from .released import CONSTANT, ReleasedMethod, constant_accuracy, expanded

CONSTANTS, QUICK_CONSTANTS = (0.0, 0.625, 1.25, 1.875, 2.5, 3.75, 5.0), (0.0, CONSTANT)
"""Those of both stored sweeps; the printed axis ends at 2.5."""
PLATEAU = 0.001
"""Accuracy, a fraction: the sweep is flat from where nothing beyond changes it by as much."""

Means = Mapping[float, Sequence[Interval]]
"""Intervals over the constants, by epsilon."""


def constants(request: ItemRequest) -> Result:
    """Run the authors' sweep of c, as their code runs it, with the record as target, corrected."""
    where = protocol(request)
    swept = QUICK_CONSTANTS if request.quick else CONSTANTS
    columns = {
        "SPOF, as released": [replace(AS_RELEASED[0], shift=c) for c in swept],
        "record as target, gradient of the loss": [replace(PRINTED, shift=c) for c in swept],
    }
    found = train(request, where, [method for column in columns.values() for method in column])
    corrected = protocol_corrected.over_constants(request, where, swept)
    rows = [
        _row(where, name, method, epsilon, found[method])
        for name, column in columns.items()
        for method in column
        for epsilon in EPSILONS
    ]
    rows += [
        replace(row, item="released-fig2", setting=f"{row.setting}, c {c:g}")
        for (c, _), one in corrected.items()
        for row in protocol_corrected.rows(where, [one])
    ]
    rows.append(_zeros(where))
    panels = [
        *(_panel(where, name, swept, _means(column, found)) for name, column in columns.items()),
        _panel(where, "corrected, held-out rows", swept, _corrected_means(swept, corrected)),
        _spread(columns["SPOF, as released"], found),
    ]
    notes = (
        "accuracy is 1 - mean squared error over all rows, training included, of noiseless runs; "
        "corrected: of held-out rows",
        "the stored sweeps name neither epsilon nor rows: the stored script takes the smallest "
        "epsilon, the axis of the figure is labelled 10",
        *SEEDED[:1],
    )
    result = PAPER.result(
        "released-fig2",
        "accuracy over the constant in the authors' protocol",
        rows,
        panels,
        notes,
        steps=where.steps,
        runs=where.runs,
        epsilons=EPSILONS,
        constants=swept,
        copies=where.copies,
        data=where.data,
    )
    zeros = rows[-1].ours
    control = f"every output 0: {zeros:.4f}"
    column = columns["SPOF, as released"]
    verdicts = [_flat(where, swept, column, found)]
    verdicts += [_stored(sweep, swept, column, found) for sweep in _sweeps(where)]
    return replace(result, control=control).judged(verdicts)


def _sweeps(where: Protocol) -> Sequence[StoredSweep]:
    return () if where.raw is None else where.raw.sweeps


def _row(
    where: Protocol, name: str, method: ReleasedMethod, epsilon: float, found: ProtocolRuns
) -> ComparisonRow:
    finite = found.finite(epsilon)
    mean, half = interval(finite)
    runs = len(found.accuracy[epsilon])
    return ComparisonRow(
        item="released-fig2",
        setting=f"{name}, c {method.shift:g}, epsilon {shown_bound(epsilon)} a step",
        quantity="accuracy",
        ours=mean,
        spread=half if math.isfinite(half) else None,
        epsilon_claimed=epsilon,
        epsilon_certified=math.inf,
        data=where.data,
        seeds=runs,
        stopped=runs - len(finite),
        collapsed=_collapsed(found, epsilon),
    )


def _collapsed(found: ProtocolRuns, epsilon: float) -> int:
    return sum(spread < COLLAPSED for spread in found.spread[epsilon])


def _zeros(where: Protocol) -> ComparisonRow:
    values = [
        constant_accuracy(expanded(where.rows, seed, copies=where.copies), 0.0)
        for seed in range(where.runs)
    ]
    mean, half = interval(values)
    return ComparisonRow(
        item="released-fig2",
        setting="no network: every output 0",
        quantity="accuracy",
        ours=mean,
        spread=half if math.isfinite(half) else None,
        data=where.data,
        seeds=len(values),
    )


def _means(
    column: Sequence[ReleasedMethod], found: Mapping[ReleasedMethod, ProtocolRuns]
) -> tuple[Means, Callable[[int, float], bool]]:
    """Return the means by epsilon over the constants, and whether a place's runs tell nothing."""
    means = {e: [interval(found[method].finite(e)) for method in column] for e in EPSILONS}

    def bad(place: int, epsilon: float) -> bool:
        runs = found[column[place]]
        count = len(runs.accuracy[epsilon])
        stopped = count - len(runs.finite(epsilon))
        return bool(spoiled(stopped, _collapsed(runs, epsilon), count))

    return means, bad


def _corrected_means(
    swept: Sequence[float], found: Mapping[tuple[float, float], CorrectedRuns]
) -> tuple[Means, Callable[[int, float], bool]]:
    means = {e: [interval(found[c, e].accuracy) for c in swept] for e in EPSILONS}

    def bad(place: int, epsilon: float) -> bool:
        one = found[swept[place], epsilon]
        return bool(spoiled(one.diverged, one.collapsed, len(one.accuracy)))

    return means, bad


def _panel(
    where: Protocol,
    title: str,
    swept: Sequence[float],
    of: tuple[Means, Callable[[int, float], bool]],
) -> Panel:
    means, bad = of
    corrected = title.startswith("corrected")
    lines = [
        Line(
            label=f"epsilon {shown_bound(epsilon)}{'' if corrected else ' a step'}",
            x=swept,
            y=[one.mean for one in each],
            half=[one.half for one in each],
            spoiled=[bad(place, epsilon) for place in range(len(swept))],
        )
        for epsilon, each in means.items()
    ]
    if title.endswith("as released"):
        lines += [
            Line(
                label=f"sweep of {sweep.commit}, published",
                x=list(sweep.accuracy),
                y=list(sweep.accuracy.values()),
                points=True,
            )
            for sweep in _sweeps(where)
        ]
    return Panel(title=title, x_label="c", y_label="accuracy", lines=lines)


def _spread(
    column: Sequence[ReleasedMethod], found: Mapping[ReleasedMethod, ProtocolRuns]
) -> Panel:
    """Draw how much the outputs vary over the records."""
    x = [method.shift for method in column]
    lines = [
        Line(
            label=f"epsilon {shown_bound(epsilon)} a step",
            x=x,
            y=[_spread_of(found[method], epsilon) for method in column],
        )
        for epsilon in EPSILONS
    ]
    lines.append(Line(label="collapsed below", x=x, y=[COLLAPSED] * len(x), level=True))
    return Panel(
        title="as released: spread of the outputs over the records",
        x_label="c",
        y_label="standard deviation",
        lines=lines,
        log_y=True,
    )


def _spread_of(found: ProtocolRuns, epsilon: float) -> float:
    finite = [spread for spread in found.spread[epsilon] if math.isfinite(spread)]
    return max(statistics.fmean(finite), 1e-9) if finite else math.nan


def _flat(
    where: Protocol,
    swept: Sequence[float],
    column: Sequence[ReleasedMethod],
    found: Mapping[ReleasedMethod, ProtocolRuns],
) -> Verdict:
    """Judge that accuracy does not change beyond 2.5, and say what does not change there."""
    means = {e: [interval(found[method].finite(e)).mean for method in column] for e in EPSILONS}
    first = swept.index(CONSTANT)
    changes = [abs(y - of_it[first]) for of_it in means.values() for y in of_it[first + 1 :]]
    change = max(changes, default=None)
    same = [
        method.shift
        for method in column
        if all(_collapsed(found[method], e) == len(found[method].accuracy[e]) for e in EPSILONS)
    ]
    few = f"{where.runs} runs are too few" if where.runs < LEAST_RUNS else ""
    missing = few or ("" if where.raw else f"measured on {where.data}, not as published")
    at = ", ".join(f"{c:g}" for c in same)
    said = (
        f"at c {at} every run gives all records the same output, at every epsilon: what is flat is "
        "the score of a constant"
    )
    return Verdict(
        claim="accuracy is flat from c 2.5 on, in the authors' protocol",
        verdict=UNDECIDED if missing or change is None else HOLDS if change < PLATEAU else FAILS,
        unit="largest change of a mean beyond 2.5, over epsilon",
        published=0.0,
        ours=change,
        low=change,
        high=change,
        reason=missing or said * bool(same),
    )


def _stored(
    sweep: StoredSweep,
    swept: Sequence[float],
    column: Sequence[ReleasedMethod],
    found: Mapping[ReleasedMethod, ProtocolRuns],
) -> Verdict:
    """Say what the stored sweep has where ours has the same constants."""
    both = [c for c in sweep.accuracy if c in swept]
    ours = {c: found[column[swept.index(c)]].finite(EPSILONS[0]) for c in both}
    pairs = "; ".join(
        f"c {c:g}: {sweep.accuracy[c]:.4f}, ours {interval(ours[c]).mean:.4f}" for c in both
    )
    return undecided(
        f"the released code gives the sweep stored with {sweep.commit}",
        f"the file names neither its epsilon nor its rows; at epsilon {shown_bound(EPSILONS[0])} "
        f"on {column[0].name}'s whole table: {pairs}",
    )


__all__ = ["constants"]
