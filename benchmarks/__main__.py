"""Run the benchmarks, print their tables, write ``benchmarks/results/<name>.json`` and ``.md``.

Usage::

    python -m benchmarks [--name cpu] [-k EXPRESSION]       the kernels
    python -m benchmarks step [MODEL ...] [--threads N] ... whole training steps
    python -m benchmarks host [MODEL ...] ...               what privacy adds on the host
    python -m benchmarks guards [MODEL ...] ...             what the guards add to a run
    python -m benchmarks ring [--parameters N]              noise prefetched by a second thread
    python -m benchmarks noise-tables [--rounds N]          draws by source, tables included
    python -m benchmarks spof [--rounds N]                  SPOF's training time beside DP-SGD's
    python -m benchmarks calls [--rounds N]                 host time of single calls of ops
    python -m benchmarks spectral [LAYER ...] [--step] ...  mechanisms of the frequency domain
    python -m benchmarks spectral-ratio [--rounds N]        the same over DP-SGD of this package
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import tempfile
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
import typer

import dpkern
from dpkern.ops.backends import cpu

from . import calls as op_calls
from . import (
    guard_report,
    host_report,
    noise_tables_speed,
    readme_table,
    ring_speed,
    spectral_ratio,
    spectral_report,
    spof_speed,
    step_report,
)
from .spectral_cases import BY_NAME
from .step_cases import BASELINES, VARIANTS
from .step_models import TASKS

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"
COLUMNS = ("case", "isa", "threads", "ms", "torch ms", "ratio", "GB/s", "limit GB/s")


def processor() -> str:
    """Return the processor's name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.processor()


def cell(value: Any) -> str:
    """Return a table cell: three significant digits."""
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def markdown(rows: list[dict[str, Any]], machine: dict[str, Any]) -> str:
    """Return the table that is printed and committed."""
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
    return "\n".join(lines) + "\n"


def this_machine() -> dict[str, Any]:
    """Return versions and hardware, for the record."""
    return {
        "dpkern": dpkern.__version__,
        "torch": torch.__version__,
        "processor": processor(),
        "cores": torch.get_num_threads(),
        "build": cpu.build_config(),
    }


app = typer.Typer(add_completion=False)


@app.callback(invoke_without_command=True)
def kernels(
    context: typer.Context,
    name: Annotated[str, typer.Option(help="stem of the result files")] = "cpu",
    k: Annotated[str, typer.Option("-k", help="pytest expression: which benchmarks")] = "",
) -> None:
    """Run the kernels where no command is given."""
    if context.invoked_subcommand is not None:
        return
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "raw.json"
        options = ["-q", "-o", "python_files=bench_*.py", "-o", "python_functions=bench_*"]
        options += ["--benchmark-json", str(raw), "--benchmark-columns=median,rounds"]
        code = pytest.main([*options, *(["-k", k] if k else []), str(FOLDER)])
        if code != 0:
            raise SystemExit(int(code))
        rows = [entry["extra_info"] for entry in json.loads(raw.read_text())["benchmarks"]]
    machine = this_machine()
    write(RESULTS / f"{name}.json", {"machine": machine, "rows": rows}, markdown(rows, machine))


def known(names: list[str], choices: dict[str, Any], what: str) -> list[str]:
    """Return the names, or all of them if there are none.

    Raises:
        typer.BadParameter: a name that is not there.
    """
    unknown = [name for name in names if name not in choices]
    if unknown:
        raise typer.BadParameter(f"no such {what}: {unknown[0]}; there are {', '.join(choices)}")
    return names or list(choices)


@app.command()
def step(
    models: Annotated[list[str] | None, typer.Argument(help="which models; default: all")] = None,
    threads: Annotated[
        list[int] | None, typer.Option(min=1, help="threads; may be repeated; default: 1 and 2")
    ] = None,
    rounds: Annotated[int, typer.Option(min=2, help="rounds of turns")] = 15,
    variant: Annotated[list[str] | None, typer.Option(help="which private variants")] = None,
    memory: Annotated[bool, typer.Option(help="measure peak memory too")] = True,
    path: Annotated[Path | None, typer.Option("--json", help="where the results go")] = None,
) -> None:
    """Time whole training steps beside the non-private step: time, phases, peak memory."""
    tasks = known(models or [], TASKS, "model")
    private = {name: make for name, make in VARIANTS.items() if name not in BASELINES}
    variants = [*BASELINES, *known(variant or [], private, "variant")]
    speeds: list[dict[str, Any]] = []
    memories: list[dict[str, Any]] = []
    for rows in step_report.speed(tasks, variants, threads or [1, 2], rounds):
        print("\n".join(step_report.speed_table(rows)), flush=True)
        speeds += rows
    for rows in step_report.memory(tasks, variants) if memory else ():
        print("\n".join(step_report.memory_table(rows)), flush=True)
        memories += rows
    machine = this_machine() | {"opacus": importlib.metadata.version("opacus")}
    content = {"machine": machine, "speed": speeds, "memory": memories}
    table = step_report.markdown(machine, speeds, memories)
    write(path or readme_table.RESULTS, content, table)
    if path is None:
        readme_table.update()


@app.command()
def host(
    models: Annotated[list[str] | None, typer.Argument(help="default: tiny and narrow")] = None,
    threads: Annotated[int, typer.Option(min=1, help="threads")] = 1,
    rounds: Annotated[int, typer.Option(min=3, help="rounds of turns")] = 15,
    path: Annotated[Path | None, typer.Option("--json", help="where the results go")] = None,
) -> None:
    """CPU time and Python calls that privacy adds to a step, replayed and recorded."""
    rows = [
        host_report.measured(task, threads, rounds)
        for task in known(models or list(host_report.MODELS), TASKS, "model")
    ]
    machine = this_machine() | {"cores": threads}
    content = {"machine": machine, "rows": rows}
    write(path or RESULTS / "host.json", content, host_report.markdown(machine, rows))


@app.command()
def guards(
    models: Annotated[list[str] | None, typer.Argument(help="which models; default: four")] = None,
    steps: Annotated[int, typer.Option(min=2, help="steps of a run")] = 200,
    rounds: Annotated[int, typer.Option(min=1, help="runs of each kind")] = 3,
    path: Annotated[Path | None, typer.Option("--json", help="where the results go")] = None,
) -> None:
    """Time private training with all guards beside the same training without them, one thread."""
    rows = []
    for task in known(models or list(guard_report.MODELS), TASKS, "model"):
        rows.append(guard_report.measured(task, steps, rounds))
        print("\n".join(guard_report.table(rows[-1:])[2:]), flush=True)
    machine = this_machine() | {"cores": 1}
    content = {"machine": machine, "rows": rows}
    write(path or RESULTS / "guards.json", content, guard_report.markdown(machine, rows))


@app.command()
def spectral(
    layers: Annotated[list[str] | None, typer.Argument(help="which layers; default: all")] = None,
    threads: Annotated[
        list[int] | None, typer.Option(min=1, help="threads; may be repeated; default: 2")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="rounds of turns")] = 9,
    memory: Annotated[bool, typer.Option(help="measure peak memory too")] = True,
    step: Annotated[bool, typer.Option("--step", help="whole training steps too")] = False,
    path: Annotated[Path | None, typer.Option("--json", help="where the results go")] = None,
) -> None:
    """Time releases of single convolutions in the frequency domain, DP-SGD and literal forms."""
    names = known(layers or [], BY_NAME, "layer")
    speeds, memories = [], []
    for row in spectral_report.speed(names, threads or [2], rounds):
        print("\n".join(spectral_report.speed_table([row])[2:-1]), flush=True)
        speeds.append(row)
    for row in spectral_report.memory(speeds) if memory else ():
        print("\n".join(spectral_report.memory_table([row])[2:-1]), flush=True)
        memories.append(row)
    machine = this_machine()
    whole = list(spectral_report.steps((threads or [2])[0], rounds, memory)) if step else []
    content = {"machine": machine, "layers": speeds, "memory": memories, "steps": whole}
    table = spectral_report.markdown(machine, speeds, memories, whole)
    write(path or RESULTS / "spectral.json", content, table)


@app.command("spectral-ratio")
def spectral_over_dpsgd(
    rounds: Annotated[int, typer.Option(min=1, help="rounds of turns")] = 15,
    path: Annotated[Path | None, typer.Option("--json", help="where the results go")] = None,
) -> None:
    """Time steps and layers of the frequency domain over DP-SGD of this package, one thread."""
    result = step_report.worker("spectral_ratio", {"threads": 1, "rounds": rounds}, "retained")
    machine = this_machine()
    table = spectral_ratio.markdown({**result, "processor": machine["processor"]})
    write(path or RESULTS / "spectral-ratio.json", {"machine": machine, **result}, table)


@app.command()
def ring(
    parameters: Annotated[int, typer.Option(min=1000, help="how many")] = 10_000_000,
    rounds: Annotated[int, typer.Option(min=2, help="rounds of turns")] = 9,
    path: Annotated[Path | None, typer.Option("--json", help="where the results go")] = None,
) -> None:
    """Time noise prefetched by a second thread, beside noise drawn in the update and no noise."""
    rows = [ring_speed.measured(parameters, threads, rounds) for threads in (1, 2)]
    machine = this_machine()
    table = ring_speed.markdown(machine, rows)
    write(path or RESULTS / "ring.json", {"machine": machine, "rows": rows}, table)


@app.command()
def noise_tables(
    rounds: Annotated[int, typer.Option(min=2, help="rounds of turns")] = 15,
    path: Annotated[Path | None, typer.Option("--json", help="where the results go")] = None,
) -> None:
    """Time draws by their source: inline, prefetched, a cumulative table, a table of samples."""
    machine = this_machine() | {"cores": 1, "load": noise_tables_speed.load()}
    rows = noise_tables_speed.measured(rounds)
    table = noise_tables_speed.markdown(machine, rows)
    write(path or RESULTS / "noise-tables.json", {"machine": machine, "rows": rows}, table)


@app.command()
def calls(
    rounds: Annotated[int, typer.Option(min=1, help="bursts of each way of a call")] = 400,
    path: Annotated[Path | None, typer.Option("--json", help="where the results go")] = None,
) -> None:
    """Host time of single calls of ops: raw kernel, through Python, as users call them."""
    rows, machine = op_calls.measured(rounds), this_machine()
    write(
        path or RESULTS / "calls.json",
        {"machine": machine, "rows": rows},
        op_calls.markdown(machine, rows),
    )


@app.command()
def spof(
    rounds: Annotated[int, typer.Option(min=2, help="rounds of turns")] = 21,
    path: Annotated[Path | None, typer.Option("--json", help="where the results go")] = None,
) -> None:
    """Time epochs of SPOF and of DP-SGD in several forms each, for one autoencoder."""
    found = spof_speed.measured(rounds)
    machine = this_machine()
    write(
        path or RESULTS / "spof.json",
        {"machine": machine, **found},
        spof_speed.markdown(machine, found),
    )


def write(path: Path, content: dict[str, Any], table: str) -> None:
    """Print the tables and keep both: JSON at ``path``, the tables beside it."""
    print(table)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
    path.with_suffix(".md").write_text(table)


if __name__ == "__main__":
    app()
