"""Run the long proofs, print one table, write ``benchmarks/results/evidence.json``.

Usage: ``python -m tests.evidence [--only NAME ...] [--n N]``

Every module of this folder with a ``run`` takes part. The file keeps the results of modules that
did not run this time, each with its own date. Exit code 1 if any failed.
"""

from __future__ import annotations

import inspect
import json
import math
import platform
import time
from datetime import UTC, datetime
from importlib import import_module, metadata
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

import dpkern
from dpkern.ops.backends import cpu

FOLDER = Path(__file__).parent
RESULTS = FOLDER.parents[1] / "benchmarks" / "results" / "evidence.json"
FIRST = ("bits", "statistics", "certificate", "sensitivity", "precision", "accounting_grid")
PACKAGES = ("torch", "numpy", "scipy", "dp-accounting", "opacus", "python-flint")


def modules() -> dict[str, ModuleType]:
    """Evidence modules by name, the usual ones first."""
    names = sorted(module.name for module in iter_modules([str(FOLDER)]))
    names = [n for n in FIRST if n in names] + [n for n in names if n not in FIRST]
    loaded = {n: import_module(f"{__package__}.{n}") for n in names if not n.startswith("_")}
    return {name: module for name, module in loaded.items() if hasattr(module, "run")}


def processor() -> str:
    """The processor's name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.processor()


def machine() -> dict[str, Any]:
    """Return what the results depend on."""
    return {
        "dpkern": dpkern.__version__,
        "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in PACKAGES},
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "build": cpu.build_config(),
    }


def plain(value: Any) -> Any:
    """The same as JSON values; infinity and NaN become strings."""
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def run_one(module: ModuleType, n: int | None) -> dict[str, Any]:
    """The module's result, with the number of values it was run on."""
    started = time.perf_counter()
    parameter = inspect.signature(module.run).parameters.get("n")
    size = None
    if parameter is not None:
        size = parameter.default if n is None else min(n, parameter.default)
    result = module.run() if size is None else module.run(n=size)
    rest = {key: value for key, value in result.items() if key not in ("passed", "seconds")}
    return {
        "passed": bool(result["passed"]),
        "n": size,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(time.perf_counter() - started, 1),
        "figures": plain(result.get("figures", rest)),
    }


def write(results: dict[str, Any]) -> None:
    """Merge into the file: other modules' entries stay."""
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    kept = json.loads(RESULTS.read_text())["evidence"] if RESULTS.exists() else {}
    content = {"machine": machine(), "evidence": {**kept, **results}}
    RESULTS.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")


def headline(module: ModuleType, figures: dict[str, Any]) -> str:
    """The module's own summary, or its first plain figures, at most two levels down."""
    if hasattr(module, "headline"):
        return str(module.headline(figures))
    flat: dict[str, Any] = {}
    for key, value in figures.items():
        inner = value.items() if isinstance(value, dict) else ()
        flat |= {f"{key} {name}": entry for name, entry in inner} if inner else {key: value}
    shown = [f"{k} {v:.6g}" for k, v in flat.items() if isinstance(v, (int, float))]
    return ", ".join(shown[:8])


def main(
    only: Annotated[list[str] | None, typer.Option(help="modules to run; all by default")] = None,
    n: Annotated[float | None, typer.Option("--n", "--N", help="at most this many values")] = None,
) -> None:
    """Run, print, write."""
    available = modules()
    unknown = sorted(set(only or ()) - set(available))
    if unknown:
        raise typer.BadParameter(f"{', '.join(unknown)}; there are {', '.join(available)}")
    if n is not None and n < 1:
        raise typer.BadParameter("--n must be at least 1")
    console = Console()
    table = Table("evidence", "passed", "n", "seconds", "figures", title="dpkern evidence")
    results: dict[str, Any] = {}
    for name in only or available:
        console.print(f"{name} ...", highlight=False)
        entry = results[name] = run_one(available[name], None if n is None else int(n))
        size = "-" if entry["n"] is None else f"{entry['n']:.0e}"
        passed = "yes" if entry["passed"] else "[red]NO[/red]"
        figures = headline(available[name], entry["figures"])
        table.add_row(name, passed, size, str(entry["seconds"]), figures)
        write(results)
    console.print(table)
    failed = [name for name, entry in results.items() if not entry["passed"]]
    if failed:
        console.print(f"[red]failed: {', '.join(failed)}[/red]")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
