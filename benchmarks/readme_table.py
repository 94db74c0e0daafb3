"""The table of steps on the README's first screen, made of ``benchmarks/results/step.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .step_models import TASKS
from .step_report import disturbed

FOLDER = Path(__file__).parent
README = FOLDER.parent / "README.md"
RESULTS = FOLDER / "results" / "step.json"
BEGIN, END = "<!-- benchmarks/results/step.json -->\n", "<!-- end -->"
COLUMNS = {"dpkern": "dpkern", "Opacus ghost": "Opacus ghost", "Opacus hooks": "Opacus hooks"}
"""Headings, and the variant below each of them."""
THREADS = (1, 2)


def table(measured: dict[str, Any]) -> str:
    """Return the Markdown table: ratios at one and two threads, with the default allocator.

    A ratio that a busy machine disturbed is left out, and the heading says how many were.
    """
    machine = measured["machine"]
    used = [row for row in measured["speed"] if row["heap"] == "default"]
    rows = {
        (row["task"], row["threads"], row["variant"]): None if disturbed(row) else row["ratio"]
        for row in used
    }
    head = f"{machine['processor']}, torch {machine['torch']}; 1 / 2 threads"
    if all("guard" in row for row in used):
        busy = sum(bool(disturbed(row)) for row in used)
        head += "; machine quiet" if not busy else f"; {busy} of {len(used)} rows disturbed"
    lines = [f"| {head} | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for name, task in TASKS.items():
        cells = []
        for variant in COLUMNS.values():
            ratios = [rows.get((name, threads, variant)) for threads in THREADS]
            cells.append(" / ".join("-" if r is None else _ratio(r) for r in ratios))
        if any(cell != "- / -" for cell in cells):
            cells[0] = f"**{cells[0]}**"
            lines.append(f"| {task.title} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _ratio(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def parts(readme: str) -> tuple[str, str, str]:
    """Return the page before the table, the table, and the page after it."""
    before, _, rest = readme.partition(BEGIN)
    shown, _, after = rest.partition(END)
    return before + BEGIN, shown, END + after


def update() -> None:
    """Write the table into the README."""
    before, _, after = parts(README.read_text())
    README.write_text(before + table(json.loads(RESULTS.read_text())) + after)
