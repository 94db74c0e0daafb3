"""Report the phases of a step, private and non-private."""

from __future__ import annotations

from typing import Any

from ..base.report import Figure, ReportTable, Series
from .measured import Measured, Side
from .roofline import Point
from .trace import PHASES


def by_phase(side: Side) -> dict[str, float]:
    """Return the seconds of each phase; they add up to the step."""
    found: dict[str, float] = {}
    for (phase, _), seconds in side.seconds.items():
        found[phase] = found.get(phase, 0.0) + seconds
    return found


def untraced(side: Side) -> dict[str, float]:
    """Return the seconds of each phase as shares of the median step without tracing.

    They add up to the time that the report states first; tracing itself takes time.
    """
    found = by_phase(side)
    scale = side.median / sum(found.values())
    return {phase: scale * seconds for phase, seconds in found.items()}


def facts(measured: Measured) -> dict[str, Any]:
    """Return the seconds of each phase of both steps."""
    return {"private": by_phase(measured.private), "non-private": by_phase(measured.plain)}


def of_torch(side: Side) -> list[Point]:
    """Return torch's phases of a step without ops: counted work, measured time."""
    seconds = by_phase(side)
    points = []
    for phase in dict.fromkeys(phase for phase, _ in side.moved):
        mine = [moved for (one, _), moved in side.moved.items() if one == phase]
        points.append(
            Point(
                name=f"torch {phase}",
                calls=1,
                bytes=sum(moved.bytes for moved in mine),
                flops=sum(moved.flops for moved in mine),
                words=0,
                launches=0,
                seconds=seconds.get(phase, 0.0),
            )
        )
    return points


def table(measured: Measured) -> ReportTable:
    """Build a table with one row per phase, and their sum."""
    private, plain = untraced(measured.private), untraced(measured.plain)
    whole = sum(private.values())
    rows: list[tuple[str | float | None, ...]] = []
    for phase in PHASES:
        if phase in private or phase in plain:
            mine, theirs = private.get(phase), plain.get(phase)
            rows.append(
                (
                    phase,
                    None if mine is None else 1e3 * mine,
                    None if theirs is None else 1e3 * theirs,
                    mine / theirs if mine and theirs else None,
                    (mine or 0.0) / whole,
                )
            )
    other = sum(plain.values())
    rows.append(("step", 1e3 * whole, 1e3 * other, whole / other, 1.0))
    return ReportTable(
        title="Phases of a step",
        columns=("phase", "private, ms", "non-private, ms", "ratio", "share of private"),
        rows=rows,
        note="Shares of a traced step, of the median time without tracing. Norms that are taken "
        "inside the backward pass count as norms. Noise that is added "
        "within the update: that call's time less that of the same call without noise, on copies. "
        "Without privacy the last phase is the optimizer's own step.",
    )


def figure(measured: Measured) -> Figure:
    """Draw both steps as stacked bars."""
    private, plain = untraced(measured.private), untraced(measured.plain)
    series = [
        Series(
            label=phase,
            x=("non-private", "private"),
            y=(1e3 * plain.get(phase, 0.0), 1e3 * private.get(phase, 0.0)),
        )
        for phase in PHASES
        if phase in private or phase in plain
    ]
    return Figure(
        name="phases",
        title="Where the time of a step goes",
        caption="The private step does what the other does, and takes norms, clips, sums and adds "
        "noise.",
        kind="stacked",
        x_label="",
        y_label="milliseconds",
        series=series,
        horizontal=True,
    )
