"""Run the benchmark of host time, a process for each model, and write its table."""

from __future__ import annotations

from typing import Any

from .step_models import TASKS
from .step_report import worker

MODELS = ("tiny", "narrow")

Rows = list[dict[str, Any]]


def measured(task: str, threads: int, rounds: int) -> dict[str, Any]:
    """The figures of one model."""
    request = {"task": task, "threads": threads, "rounds": rounds}
    found: dict[str, Any] = worker("host_cost", request)
    return found


def markdown(machine: dict[str, Any], rows: Rows) -> str:
    """What is printed and committed."""
    columns = ["model", "variant", "CPU ms", "ratio", "added us per parameter", "Python calls"]
    lines = [
        f"dpkern {machine['dpkern']}, torch {machine['torch']}, {machine['processor']}. Forward, "
        "loss, backward and update in turns in one process; CPU time of the thread, medians; "
        "`ratio` to torch's default optimizer in the same round. `recorded` takes every step as "
        "the first ones are taken. Python functions called in a step, builtins left out.",
        "",
        "| " + " | ".join(columns) + " |",
        "|" + "---|" * len(columns),
    ]
    for row in rows:
        for each in row["rows"]:
            cells = [TASKS[row["task"]].title, each["variant"], f"{each['ms']:.3g}"]
            cells += [f"{each['ratio']:.3g}", f"{each['added us per parameter']:.3g}"]
            lines.append("| " + " | ".join([*cells, str(each["python calls"])]) + " |")
    return "\n".join(lines) + "\n"
