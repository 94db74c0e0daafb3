"""Run the benchmarks, print their tables, write ``benchmarks/results/<name>.json`` and ``.md``.

Usage::

    python -m benchmarks                                    every op (dpkern bench --out ...)
    python -m benchmarks step [MODEL ...] [--threads N] ... whole training steps
    python -m benchmarks host [MODEL ...] ...               what privacy adds on the host
    python -m benchmarks guards [MODEL ...] ...             what the guards add to a run
    python -m benchmarks epoch [MODEL ...] ...              steps with the making of their batches
    python -m benchmarks ring [--parameters N]              noise prefetched by a second thread
    python -m benchmarks noise-tables [--rounds N]          draws by source, tables included
    python -m benchmarks spof [--rounds N]                  SPOF's training time beside DP-SGD's
    python -m benchmarks spof-runs [--rounds N]             100 runs of SPOF at the source's size
    python -m benchmarks calls [--rounds N]                 host time of single calls of ops
    python -m benchmarks spectral [LAYER ...] [--step] ...  mechanisms of the frequency domain
    python -m benchmarks spectral-ratio [--rounds N]        the same over DP-SGD of this package
    python -m benchmarks sass [--arch 90]                   device kernels as machine code
    python -m benchmarks device-host                        launches and host time on a device
"""

from __future__ import annotations

import importlib.metadata
import json
import os
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from dpkern.bench import results, suite
from dpkern.bench.environment import environment
from dpkern.commands.bench import measure

from . import calls as op_calls
from . import (
    epoch_speed,
    guard_report,
    host_report,
    noise_tables_speed,
    readme_table,
    ring_speed,
    spectral_ratio,
    spectral_report,
    spof_runs,
    spof_speed,
    step_report,
)
from .spectral_cases import BY_NAME
from .step_cases import BASELINES, VARIANTS, absent
from .step_models import TASKS

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"


def this_machine() -> dict[str, Any]:
    """Return versions, commit and hardware, for the record."""
    return environment() | {"cores": torch.get_num_threads()}


app = typer.Typer(add_completion=False)


@app.callback(invoke_without_command=True)
def kernels(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="where the results go")] = RESULTS / "ops.json",
) -> None:
    """Measure every case of every op where no command is given."""
    if context.invoked_subcommand is not None:
        return
    plan = suite.BenchPlan(threads=suite.torch_threads_here())
    results.check_place(out, plan.complete)
    results.write(out, measure(plan, Console(soft_wrap=True)))


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
    heap: Annotated[
        list[str] | None, typer.Option(help="default or retained; default: both")
    ] = None,
    memory: Annotated[bool, typer.Option(help="measure peak memory too")] = True,
    path: Annotated[Path | None, typer.Option("--json", help="where the results go")] = None,
) -> None:
    """Time whole training steps beside the non-private step: time, phases, peak memory."""
    tasks = known(models or [], TASKS, "model")
    private = {name: make for name, make in VARIANTS.items() if name not in BASELINES}
    variants = [*BASELINES, *known(variant or [], private, "variant")]
    heaps = known(heap or [], step_report.HEAPS, "heap")
    left = absent(variants)
    variants = [name for name in variants if name not in left]
    machine = this_machine() | {"opacus": opacus_version(), "absent": left}
    content: dict[str, Any] = {"machine": machine, "speed": [], "memory": []}
    for rows in step_report.speed(tasks, variants, threads or [1, 2], heaps, rounds):
        print("\n".join(step_report.speed_table(rows)), flush=True)
        content["speed"] += rows
        keep(path, content)
    for rows in step_report.memory(tasks, variants) if memory else ():
        print("\n".join(step_report.memory_table(rows)), flush=True)
        content["memory"] += rows
        keep(path, content)
    whole = not (models or variant or threads or heap) and memory
    write(path or default("step", whole), content, step_report.markdown(**content))
    if path is None and whole:
        readme_table.update()


def opacus_version() -> str:
    """Return the version of Opacus; ``absent`` where it is not installed."""
    try:
        return importlib.metadata.version("opacus")
    except importlib.metadata.PackageNotFoundError:
        return "absent"


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
    write(path or default("host", not models), content, host_report.markdown(machine, rows))


@app.command()
def epoch(
    models: Annotated[list[str] | None, typer.Argument(help="which models; default: three")] = None,
    threads: Annotated[int, typer.Option(min=1, help="threads")] = 1,
    rounds: Annotated[int, typer.Option(min=3, help="rounds of turns")] = 21,
    path: Annotated[Path | None, typer.Option("--json", help="where the results go")] = None,
) -> None:
    """Time steps of whole loops, the making of their batches included."""
    names = known(models or list(epoch_speed.MODELS), TASKS, "model")
    rows, machine = epoch_speed.rows(names, threads, rounds), this_machine()
    table = epoch_speed.markdown(machine, rows)
    write(path or default("epoch", not models), {"machine": machine, "rows": rows}, table)


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
    write(path or default("guards", not models), content, guard_report.markdown(machine, rows))


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
    write(path or default("spectral", memory and not (layers or threads)), content, table)


@app.command("spectral-ratio")
def spectral_over_dpsgd(
    rounds: Annotated[int, typer.Option(min=1, help="rounds of turns")] = 15,
    threads: Annotated[
        list[int] | None, typer.Option(min=1, help="threads; may be repeated; default: 1 and 2")
    ] = None,
    part: Annotated[
        list[str] | None, typer.Option(help="steps, circulants or layers; default: all")
    ] = None,
    memory: Annotated[bool, typer.Option(help="measure peak memory too")] = True,
    path: Annotated[Path | None, typer.Option("--json", help="where the results go")] = None,
) -> None:
    """Time steps and layers of the frequency domain over DP-SGD of this package."""
    parts = known(part or [], dict(spectral_ratio.PARTS), "part")
    runs = spectral_ratio.measured(threads or [1, 2], rounds, parts)
    growth = list(spectral_ratio.memory()) if memory else []
    machine = this_machine()
    tables = [spectral_ratio.markdown(run, machine["processor"]) for run in runs]
    if growth:
        tables.append(spectral_ratio.memory_table(growth))
    content = {"machine": machine, "runs": runs, "memory": growth}
    whole = memory and not (part or threads)
    write(path or default("spectral-ratio", whole), content, "\n".join(tables))


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


@app.command(name="spof-runs")
def full_runs(
    rounds: Annotated[int, typer.Option(min=2, help="rounds of turns")] = 15,
    path: Annotated[Path | None, typer.Option("--json", help="where the results go")] = None,
) -> None:
    """Train 100 runs of SPOF at the source's full size in one kernel, and time single steps."""
    found = spof_runs.measured(rounds=rounds)
    machine = this_machine()
    write(
        path or RESULTS / "spof-runs.json",
        {"machine": machine, **found},
        spof_runs.markdown(machine, found),
    )


@app.command()
def sass(
    arch: Annotated[
        list[int] | None, typer.Option(help="compute capabilities; default: all of a wheel")
    ] = None,
    path: Annotated[Path | None, typer.Option("--json", help="where the results go")] = None,
) -> None:
    """Read the device kernels' machine code, and what it predicts; needs nvcc, but no GPU."""
    from . import sass as machine_code_report  # compilers of devices, which others do not need

    found = machine_code_report.measured(*([tuple(arch)] if arch else []))
    write(path or default("sass", not arch), found, machine_code_report.markdown(found))


@app.command()
def device_host(
    rounds: Annotated[int, typer.Option(min=3, help="steps of each kind, in turns")] = 30,
    path: Annotated[Path | None, typer.Option("--json", help="where the results go")] = None,
) -> None:
    """Launches of a step on a device, and the host's time for it; needs no GPU."""
    if os.environ.get("TRITON_INTERPRET") != "1":  # Triton reads it when it is first imported
        raise typer.BadParameter("run it as TRITON_INTERPRET=1 python -m benchmarks device-host")
    from . import device_host as launches  # it interprets and emulates kernels

    torch.set_num_threads(1)
    rows = [launches.measured(name, rounds) for name in launches.MODELS]
    machine = this_machine() | {"cores": 1}
    steps = [launches.graphed(name, rounds) for name in launches.MODELS]
    content = {"machine": machine, "run on a GPU": False, "rows": rows, "steps": steps}
    write(path or RESULTS / "device-host.json", content, launches.markdown(machine, rows, steps))


def default(name: str, whole: bool) -> Path | None:
    """Return the place of a committed table; None where only a part of it was measured."""
    return RESULTS / f"{name}.json" if whole else None


def write(path: Path | None, content: dict[str, Any], table: str) -> None:
    """Print the tables and keep both: JSON at ``path``, the tables beside it; None keeps nothing.

    A part of a table never takes the place of the whole: it is kept where ``--json`` says.
    """
    print(table)
    if path is None:
        print("A part of the table: not written. --json FILE keeps it.")
        return
    keep(path, content)
    path.with_suffix(".md").write_text(table)


def keep(path: Path | None, content: dict[str, Any]) -> None:
    """Write what was measured so far: a run that is stopped loses nothing. None keeps nothing."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    app()
