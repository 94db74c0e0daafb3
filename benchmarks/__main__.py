"""Run the benchmarks, print one table, write ``benchmarks/results/<name>.json`` and ``.md``.

Usage: ``python -m benchmarks [--name cpu] [-k EXPRESSION]``
"""

from __future__ import annotations

import json
import platform
import tempfile
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
import typer

import dpkern
from dpkern.backends import cpu

FOLDER = Path(__file__).parent
COLUMNS = ("case", "isa", "threads", "ms", "torch ms", "ratio", "GB/s", "limit GB/s")


def processor() -> str:
    """The processor's name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.processor()


def cell(value: Any) -> str:
    """A table cell: three significant digits."""
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def markdown(rows: list[dict[str, Any]], machine: dict[str, Any]) -> str:
    """The table that is printed and committed."""
    lines = [
        f"dpkern {machine['dpkern']}, torch {machine['torch']}, {machine['processor']}, "
        f"{machine['cores']} cores. Medians; `ratio` = torch's best formulation / ours, in turns "
        "in one process; `limit` = measured copy (clip: read) bandwidth.",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|" + "---|" * len(COLUMNS),
    ]
    lines += [
        "| " + " | ".join(cell(row.get(c)) for c in COLUMNS) + " |" for row in rows if "ms" in row
    ]
    lines += ["", *(f"{row['case']}: {row['us']:.2f} us" for row in rows if "us" in row)]
    return "\n".join(lines) + "\n"


def main(
    name: Annotated[str, typer.Option(help="stem of the result files")] = "cpu",
    k: Annotated[str, typer.Option("-k", help="pytest expression: which benchmarks")] = "",
) -> None:
    """Run, print, write."""
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "raw.json"
        options = ["-q", "-o", "python_files=bench_*.py", "-o", "python_functions=bench_*"]
        options += ["--benchmark-json", str(raw), "--benchmark-columns=median,rounds"]
        code = pytest.main([*options, *(["-k", k] if k else []), str(FOLDER)])
        if code != 0:
            raise SystemExit(int(code))
        rows = [entry["extra_info"] for entry in json.loads(raw.read_text())["benchmarks"]]
    machine = {
        "dpkern": dpkern.__version__,
        "torch": torch.__version__,
        "processor": processor(),
        "cores": torch.get_num_threads(),
        "build": cpu.build_config(),
    }
    table = markdown(rows, machine)
    print(table)
    results = FOLDER / "results"
    results.mkdir(exist_ok=True)
    (results / f"{name}.json").write_text(json.dumps({"machine": machine, "rows": rows}, indent=1))
    (results / f"{name}.md").write_text(table)


if __name__ == "__main__":
    typer.run(main)
