"""Run the benchmark of the guards, a process for each model, and write its tables."""

from __future__ import annotations

import statistics
from typing import Any

from .guard_cost import FIRSTS
from .step_models import TASKS
from .step_report import worker

MODELS = ("mlp", "lenet", "resnet", "encoder")

Rows = list[dict[str, Any]]


def measured(task: str, steps: int, rounds: int) -> dict[str, Any]:
    """Return the figures of one model: medians of ``rounds`` processes."""
    found = [worker("guard_cost", {"task": task, "steps": steps}) for _ in range(rounds)]
    row: dict[str, Any] = {"task": task, "steps": steps, "rounds": rounds}
    for part in ("cpu", "wall", "parts ms"):
        row[part] = {
            name: statistics.median(each[part][name] for each in found) for name in found[0][part]
        }
    for part in ("cpu", "wall"):
        row[part]["all"] = sum(row[part][name] for name in ("first", "secret", "passes"))
    return row


def _table(columns: list[str], rows: list[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows)]


def _percent(value: float) -> str:
    return f"{100 * value:.2f}"


def table(rows: Rows) -> list[str]:
    """Return what the guards add, in percent of a run without them."""
    lines = []
    for row in rows:
        cpu, wall = row["cpu"], row["wall"]
        shares = [_percent(cpu[part]) for part in ("all", "first", "secret", "passes")]
        others = [f"{cpu['pass us']:.0f}", f"{cpu['epoch ms']:.2g}", _percent(wall["all"])]
        lines.append([TASKS[row["task"]].title, f"{cpu['step ms']:.3g}", *shares, *others])
    columns = ["model", "step ms", "all %", "first step %", "secret probes %", "every pass %"]
    return _table([*columns, "us a pass", "next epoch ms", "all %, wall clock"], lines)


def parts_table(rows: Rows) -> list[str]:
    """Return CPU milliseconds inside each part."""
    parts = ("first probe", "gradients", "secret probe", "rows", "scans")
    lines = [
        [TASKS[row["task"]].title, *(f"{row['parts ms'][part]:.3g}" for part in parts)]
        for row in rows
    ]
    return _table(["model", *(f"{part} ms" for part in parts)], lines)


def markdown(machine: dict[str, Any], rows: Rows) -> str:
    """Return what is printed and committed."""
    first, rounds = rows[0], ", ".join(str(row["rounds"]) for row in rows)
    lines = [
        f"dpkern {machine['dpkern']}, torch {machine['torch']}, {machine['processor']}, "
        "one thread.",
        "",
        f"Runs of {first['steps']} steps in the plain loop. CPU time of the thread unless the "
        "column says more. `all` = first step + secret probes + every pass. `first step` has the "
        "probe and the check of records: medians of fresh runs with and without guards, "
        f"{FIRSTS} of each in one process, over both orders in which they take turns. "
        "`secret probes`: their expected number times the time of one. `every pass`: the median "
        "difference of steps that begin no epoch, in epochs of four steps of one run with the "
        "guards and without them in turns, times their number. `next epoch` is what the first step "
        "of another epoch adds, beside a run of one. Records are rows of a `TensorDataset`; all "
        f"figures are medians of processes, {rounds} by model, which differ by a third.",
        "",
        *table(rows),
        "",
        "Inside the guards, CPU ms (rows and scans: of an ordinary step; rows: with the loss; "
        "gradients: the passes in which the first batch shows that its gradients stay apart, which "
        "both runs take):",
        "",
        *parts_table(rows),
    ]
    return "\n".join(lines) + "\n"
