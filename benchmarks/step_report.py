"""Run the step benchmark, worker by worker, and write its tables."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dpkern.bench.worker import PASSIVE

from .step_cases import BASELINES, PHASES, VARIANTS
from .step_models import FASTDP_SOURCE, TASKS

# The C library gives every large tensor back when it is freed, and torch has no cache of its own on
# a CPU: page faults can cost more than the arithmetic. So both settings are measured.
HEAPS: dict[str, dict[str, str]] = {
    "default": {},
    "retained": {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 34)},
}

OVER_DEFAULT = ("dpkern", "dpkern float")
"""Variants whose ratio to torch's default optimizer stands in the table as well."""

MEMORY_RUNS = 3

Rows = list[dict[str, Any]]


def worker(module: str, request: dict[str, Any], heap: str = "default") -> Any:
    """Run one worker process and read its JSON.

    Raises:
        subprocess.CalledProcessError: it failed; what it says stands above, on stderr.
    """
    command = [sys.executable, "-m", f"benchmarks.{module}", json.dumps(request)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    root = Path(__file__).parent.parent
    done = subprocess.run(
        command,
        env={**PASSIVE, **environment, **HEAPS[heap]},
        cwd=root,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def speed(
    tasks: list[str], variants: list[str], threads: list[int], heaps: list[str], rounds: int
) -> Iterator[Rows]:
    """Yield rows of one task and allocator after the other, after verifying each variant once."""
    for task in tasks:
        for heap in heaps:
            taken = _taking(task, variants)
            request = {"task": task, "variants": taken, "threads": threads, "rounds": rounds}
            found = worker("step_speed", request | {"verify": heap == heaps[0]}, heap)
            yield [{"heap": heap, **row} for row in found]


def memory(tasks: list[str], variants: list[str]) -> Iterator[Rows]:
    """Yield rows of one task after the other: medians of processes, which measure a variant each.

    How pages lie in the heap moves the peak of the same steps by up to a half.
    """
    for task in tasks:
        taken = _taking(task, variants)
        rows = [_median_growth({"task": task, "variant": name}) for name in taken]
        least = min(row["growth"] for row in rows if row["variant"] in BASELINES)
        yield [{**row, "ratio": row["growth"] / least} for row in rows]


def _median_growth(request: dict[str, Any]) -> dict[str, Any]:
    found = [worker("step_memory", request) for _ in range(MEMORY_RUNS)]
    return sorted(found, key=lambda row: row["growth"])[MEMORY_RUNS // 2]


def _taking(task: str, variants: list[str]) -> list[str]:
    return [name for name in variants if name not in TASKS[task].refused_by]


def _cell(value: float | None, digits: int = 3) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:#.{digits}g}"


def _table(columns: list[str], rows: list[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]


def _private(rows: Rows) -> list[str]:
    seen = {row["variant"] for row in rows}
    return [name for name in VARIANTS if name in seen and name not in BASELINES]


def _groups(rows: Rows, *keys: str) -> Iterator[tuple[tuple[Any, ...], dict[str, dict[str, Any]]]]:
    """Yield rows with equal keys, by variant."""
    found: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), {})[row["variant"]] = row
    yield from found.items()


def speed_table(rows: Rows) -> list[str]:
    """Return the step time of each private variant over the non-private step.

    The row names the non-private variant; a cell whose ratio is to another one names that. Where
    the machine was not quiet the guard's flags stand in the place of a ratio.
    """
    names = _private(rows)
    beside = {name: f"{name} over default" for name in OVER_DEFAULT if name in names}
    if not any("over default" in row for row in rows):
        beside = {}
    lines = []
    for (task, threads, heap), group in _groups(rows, "task", "threads", "heap"):
        baseline = group[next(iter(group.values()))["baseline"]]
        figure = TASKS[task].fastdp if threads == 2 else None
        lines.append(
            [TASKS[task].title, str(threads), heap, _named(baseline)]
            + [_ratio(group, name, baseline["variant"]) for name in names]
            + [_over_default(group.get(name, {})) for name in beside]
            + [_cell(figure)]
        )
    columns = ["model", "threads", "heap", "non-private ms", *names, *beside.values()]
    columns.append("FastDP (quoted)")
    return _table(columns, lines)


def _named(row: dict[str, Any]) -> str:
    return f"{_cell(row['ms'])} {row['variant'].removeprefix('torch ')}"


def _ratio(group: dict[str, dict[str, Any]], name: str, baseline: str) -> str:
    if name not in group:
        return "-"
    row = group[name]
    over = "" if row["baseline"] == baseline else f" ({_named(group[row['baseline']])})"
    return disturbed(row) or _cell(row["ratio"]) + over


def _over_default(row: dict[str, Any]) -> str:
    return disturbed(row) or _cell(row.get("over default"))


def disturbed(row: dict[str, Any]) -> str:
    """Return the flags of the quiet guard; empty on a quiet machine, and without a guard."""
    flags = row.get("guard", {}).get("flags", [])
    return f"disturbed: {', '.join(flags)}" if flags else ""


def phase_table(rows: Rows) -> list[str]:
    """Return where dpkern's step spends its time, beside the non-private step."""
    lines = []
    for (task, threads, heap), group in _groups(rows, "task", "threads", "heap"):
        if heap != "default" or "dpkern" not in group:
            continue
        plain = group[group["dpkern"]["baseline"]]["phases ms"]
        ours = group["dpkern"]["phases ms"]
        cells = [f"{_cell(plain[phase])} / {_cell(ours[phase])}" for phase in PHASES]
        cells[2] = _cell(ours["sums"])
        lines.append([TASKS[task].title, str(threads), *cells])
    columns = ["model", "threads", "forward", "backward, norms", "clip, sums", "noise, update"]
    return _table(columns, lines) if lines else []


def memory_table(rows: Rows) -> list[str]:
    """Return peak growth in MB and its ratio to the non-private one."""
    names = _private(rows)
    lines = []
    for (task,), group in _groups(rows, "task"):
        least = min(row["growth"] for name, row in group.items() if name in BASELINES)
        cells = [_growth(group[name]) if name in group else "-" for name in names]
        lines.append([TASKS[task].title, _cell(least / 1e6), *cells])
    return _table(["model", "non-private MB", *(f"{n} MB (ratio)" for n in names)], lines)


def _growth(row: dict[str, Any]) -> str:
    return f"{_cell(row['growth'] / 1e6)} ({_cell(row['ratio'])})"


def markdown(machine: dict[str, Any], speed: Rows, memory: Rows) -> str:
    """Return what is printed and committed."""
    lines = [
        f"dpkern {machine['dpkern']}, torch {machine['torch']}, Opacus {machine['opacus']}, "
        f"{machine['processor']}, {machine['cores']} cores. SGD with momentum, float32, the same "
        "physical batch for everybody; private: flat clipping and noise. Every variant's step was "
        "first compared, without noise, with the clipped mean gradient computed sample by sample.",
        "",
        *(f"Left out: {name}: {why}." for name, why in machine.get("absent", {}).items()),
        "",
        "## Time of a step over the non-private step",
        "",
        "Median of the ratios within a round, variants in turns in one process, over the "
        "non-private step that is named: torch's default SGD, on a CPU a loop over parameters, or "
        "the fused one, whichever is faster, or the compiled step, in brackets where a column has "
        "its own; `over default`: over the default, whichever is faster. "
        "`retained`: the allocator keeps freed pages. "
        f"Quoted: {FASTDP_SOURCE}.",
        "",
        *speed_table(speed),
    ]
    phases = phase_table(speed)
    if phases:
        lines += ["## Phases of a step, ms: non-private / dpkern", "", *phases]
    if memory:
        lines += [
            "## Peak memory that training adds",
            "",
            "Over what stood before training: imports, model, optimizer, first batch.",
            "",
            *memory_table(memory),
        ]
    return "\n".join(lines)
