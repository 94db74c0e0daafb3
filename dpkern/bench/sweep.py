"""Show how an op's time grows as its work grows: a sweep of one size, with fitted exponents.

    time = constant * size^exponent

is fitted by least squares to the logarithms of the medians. An exponent of 1 is linear, 0 means
that something else rules; ``threads`` is an axis too, where -1 is perfect scaling.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..base.report import Figure, Report, ReportTable, Series
from ..base.validate import choice, integer
from .measure import OURS, Row
from .suite import BenchPlan, rows

THREADS = "threads"


@dataclass(frozen=True)
class Exponent:
    """A fitted exponent with its 95 % interval, from ``points`` points."""

    value: float
    low: float
    high: float
    points: int


def fitted(sizes: Sequence[float], times: Sequence[float]) -> Exponent | None:
    """Fit times to a power of sizes; None for fewer than three points, which always fit."""
    if len(sizes) < 3:
        return None
    x, y = np.log(sizes), np.log(times)
    spread = float(((x - x.mean()) ** 2).sum())
    slope = float(((x - x.mean()) * (y - y.mean())).sum()) / spread
    residuals = y - y.mean() - slope * (x - x.mean())
    freedom = len(sizes) - 2
    reach = student(freedom) * float((residuals**2).sum() / freedom / spread) ** 0.5
    return Exponent(slope, slope - reach, slope + reach, len(sizes))


STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""The 97.5 % quantiles of Student's distribution with 1 to 10 degrees of freedom."""


def student(freedom: int) -> float:
    """Return the 97.5 % quantile, within half a per cent beyond the table."""
    return STUDENT[freedom - 1] if freedom <= len(STUDENT) else 1.96 + 2.65 / freedom


def swept(
    plan: BenchPlan,
    axis: str,
    values: Sequence[int],
    measured: Callable[[BenchPlan], Iterable[Row]] = rows,
) -> Iterator[Row]:
    """Yield the rows of a plan for each value of the axis, as ``measured`` gives them.

    Raises:
        InvalidInput: a number of threads that this machine has not, or a size of 0.
    """
    for value in values:
        integer(1, os.cpu_count() if axis == THREADS else None, values=value)
    for value in values:
        if axis == THREADS:
            some = replace(plan, threads=(value,))
        else:
            some = replace(plan, shape={**(plan.shape or {}), axis: value})
        for row in measured(some):
            yield {**row, "axis": axis, "value": value}


def ways_of(found: Sequence[Row]) -> dict[str, list[tuple[int, float, bool]]]:
    """Return value, milliseconds and whether it was quiet, for each case and way of doing it."""
    curves: dict[str, list[tuple[int, float, bool]]] = {}
    for row in found:
        if "ms" not in row:
            continue
        name = f"{row['op']} {row['case']}"
        kept = {f"{name}: {OURS} {row['backend']}": row["ms"]}
        kept |= {f"{name}: torch, {way}": ms for way, ms in row["formulations ms"].items()}
        for way, ms in kept.items():
            curves.setdefault(way, []).append((row["value"], ms, row["quiet"]))
    return curves


def report(found: Sequence[Row], axis: str, environment: dict[str, Any]) -> Report:
    """Return a table of times and exponents, and a picture with logarithmic axes.

    Rows that a busy machine disturbed are marked and left out of the fits.
    """
    curves = ways_of(found)
    values = sorted({row["value"] for row in found})
    exponents = {
        way: fitted(*zip(*quiet, strict=True)) if quiet else None
        for way, points in curves.items()
        for quiet in [[(value, ms) for value, ms, is_quiet in points if is_quiet]]
    }
    disturbed = sum(not row.get("quiet", True) for row in found)
    times = ReportTable(
        title=f"Milliseconds by {axis}",
        columns=("way", *map(str, values)),
        rows=[
            (way, *({value: ms for value, ms, _ in points}.get(value) for value in values))
            for way, points in curves.items()
        ],
        note=f"{disturbed} of {len(found)} rows were measured on a busy machine.",
    )
    fits = ReportTable(
        title=f"Exponents: time = constant * {axis}^exponent",
        columns=("way", "exponent", "from", "to", "points"),
        rows=[
            (way, *((None,) * 3 if one is None else (one.value, one.low, one.high)), points)
            for way, one in exponents.items()
            for points in [0 if one is None else one.points]
        ],
        note="95 % intervals of least squares of logarithms; none for fewer than three quiet rows.",
    )
    figure = Figure(
        name=axis,
        title=f"Time by {axis}",
        caption="Straight lines are powers; their slopes are the exponents.",
        kind="lines",
        x_label=axis,
        y_label="milliseconds",
        series=[
            Series(label=way, x=[p[0] for p in points], y=[p[1] for p in points])
            for way, points in curves.items()
        ],
        log_x=True,
        log_y=True,
    )
    shown = [
        f"{way}: {one.value:.2f} ({one.low:.2f} to {one.high:.2f})"
        for way, one in exponents.items()
        if one is not None and f": {OURS} " in way
    ]
    return Report(
        name="sweep",
        title=f"Growth of time with {axis}",
        summary="; ".join(shown) or "No exponent: too few quiet rows.",
        facts={"environment": environment, "axis": axis, "rows": list(found)},
        tables=(times, fits),
        figures=(figure,),
        kind="benchmark",
    )


def check_axis(axis: str, sizes: Sequence[str]) -> None:
    """Refuse an axis that no case has.

    Raises:
        InvalidInput: see above.
    """
    choice((THREADS, *sorted(sizes)), axis=axis)
