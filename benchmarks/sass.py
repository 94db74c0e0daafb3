"""Report what the device kernels are as machine code, and what that predicts; no GPU is needed.

    python -m benchmarks sass [--arch 90 ...] [--json PATH]

Registers, shared memory, spills and occupancy of every CUDA kernel on every architecture that
wheels ship; instructions per value by pipe; the loops of Triton's products; and predicted times.
All of it comes from nvcc, ptxas and Triton. Not yet run on a GPU.
"""

from __future__ import annotations

import math
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dpkern.ops.backends import _gram_shares
from tests.ops.backends import cuda_gate as gate
from tests.ops.backends.triton_versions import compiled

from . import sass_steps
from .machine_code import Code, kernels
from .sass_device import L2, Gpu, occupancy
from .sass_values import CASES, Case, per_value

Row = dict[str, Any]
GPUS = ("h100", "h200")
VALUES_ARCH = 90
PRODUCTS = (
    r"^(linear_(norm|gradient|sum)-(wide|vocabulary)(-direct)?"
    r"|linear_norm-vit-gram|linear_norms-vit|linear_sum-vit|rounded_gradient-wide|conv_(norm|gradient|sum)-(block|last))-(bfloat16|float32)$"
)
"""Calls of products at real shapes (``tests/ops/backends/triton_calls.py``)."""
_SIZES = {"bfloat16": 2, "float32": 4}


def cuobjdump() -> Path:
    """Return the disassembler, which Triton's wheel ships.

    Raises:
        FileNotFoundError: Triton is not installed.
    """
    found = find_spec("triton")
    if found is None or found.origin is None:
        raise FileNotFoundError("cuobjdump: pip install triton, which ships it")
    return Path(found.origin).parent / "backends/nvidia/bin/cuobjdump"


def disassembled(cubin: Path) -> list[Code]:
    """Return the kernels of a binary."""
    command = [str(cuobjdump()), "-sass", str(cubin)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return kernels(done.stdout)


def resource_rows(arch: int, folder: Path) -> list[Row]:
    """Compile every source for an architecture; return the worst instance of each kernel."""
    rows = []
    threads = {kernel.name: kernel.threads for kernel in gate_kernels()}
    for source in gate.SOURCES:
        usages = gate.usage(gate.ptx(source, folder, arch), arch)
        codes = disassembled(folder / f"{source.stem}.{arch}.cubin")
        for name, versions in usages.items():
            registers = max(version.registers for version in versions)
            shared = max(version.shared for version in versions)
            own = [code for code in codes if f"{len(name)}{name}" in code.name]
            rows.append(
                {
                    "kernel": name,
                    "arch": arch,
                    "instances": len(versions),
                    "registers": registers,
                    "shared": shared,
                    "spilled": max(version.spilled + version.stack for version in versions),
                    "local": sum(code.local for code in own),
                    "occupancy": occupancy(arch, threads[name], registers, shared),
                }
            )
    return rows


def gate_kernels() -> Iterable[Any]:
    """Return the launch table."""
    from dpkern.ops.backends._kernels import KERNELS

    return KERNELS


def value_rows(folder: Path) -> list[Row]:
    """Return instructions per value, and what they predict on each GPU."""
    rows = []
    for case in CASES:
        codes = disassembled(folder / f"{case.source}_kernels.{VALUES_ARCH}.cubin")
        (code,) = (code for code in codes if case.symbol in code.name)
        rows.append(value_row(case, code))
    return rows


def value_row(case: Case, code: Code) -> Row:
    """Return one kernel's row."""
    pipes, main = per_value(case, code)
    row: Row = {
        "case": case.title,
        "bytes": case.bytes,
        "instructions": sum(pipes.values()),
        **{pipe: pipes.get(pipe, 0.0) for pipe in ("alu", "fma", "xu", "fp64", "lsu")},
        "loads": {str(width): n for width, n in sorted(main.widths("LDG", "LD").items())},
    }
    for name in GPUS:
        gpu = Gpu.load(name)
        cycles, pipe = gpu.cycles(pipes)
        seconds, memory = cycles / gpu.clocks, case.bytes / gpu.bandwidth
        row[name] = {
            "ns per 1000": 1e12 * max(seconds, memory),
            "bound": "memory" if memory >= seconds else pipe,
            "of copy": memory / max(seconds, memory),
        }
    return row


def product_rows(version: str = "installed") -> list[Row]:
    """Return the loops of Triton's products, and what they allow."""
    found = compiled(version, str(VALUES_ARCH), "--only", PRODUCTS)
    if found["failed"]:
        raise RuntimeError("\n".join(found["failed"]))
    return [product_row(report) for report in found["reports"] if report["loop"]]


def product_row(report: Row) -> Row:
    """Return one form's row."""
    constants, loop = report["constants"], report["loop"]
    dtype = report["call"].rsplit("-", 1)[-1]
    ranges = [constants[name] for name in ("FIRST", "SECOND", "THIRD") if name in constants]
    side = constants.get("SIDE")  # of a Gram matrix's tile, whose rows are columns on the diagonal
    columns = constants.get("COLUMNS") or constants.get("WIDE", 0) + constants.get("REST", 0)
    sides = (side, side) if side else (constants.get("ROWS", 0), columns)
    threads = 32 * report["warps"]
    shared = max(report["shared"], report["dynamic_shared"])
    shape = " + ".join(map(str, ranges)) or " x ".join(map(str, sides))
    entries = _gram_shares.ENTRIES if ranges else math.prod(sides)
    flops = 2.0 * entries * constants["DEPTH"]
    loaded = side if constants.get("DIAGONAL") else sum(ranges or sides)
    traffic = loaded * constants["DEPTH"] * _SIZES[dtype]
    gpu = Gpu.load(GPUS[-1])
    wide = "fp64" in loop["pipes"]  # the pass that is made again in float64
    tensor = "tensor" in loop["pipes"] and not wide
    rounded = tensor and dtype == "float32"  # to TF32, at half the speed of 16 bits
    on_tensor_cores = (2 if rounded else 1) * flops / threads if tensor else 0.0
    cycles, pipe = gpu.cycles(loop["pipes"], on_tensor_cores)
    by_pipes, by_cache = flops / threads / cycles * gpu.clocks, flops / traffic * L2
    return {
        "call": report["call"] + (", on the diagonal" if constants.get("DIAGONAL") else ""),
        "kernel": report["kernel"],
        "triton": report["triton"],
        "products": "float64" if wide else "TF32" if rounded else dtype,
        "tile": f"{shape} x {constants['DEPTH']}",
        "registers": report["reg"],
        "shared": shared,
        "stack": report["stack"],
        "occupancy": occupancy(VALUES_ARCH, threads, report["reg"], shared),
        "instructions": loop["instructions"],
        "pipes": loop["pipes"],
        "loads": loop["loads"],
        "TFLOP/s at most": min(by_pipes, by_cache) / 1e12,
        "bound": "L2" if by_cache < by_pipes else pipe,
    }


def measured(archs: Sequence[int] = gate.ARCHS) -> Row:
    """Compile and read everything."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        resources = [row for arch in archs for row in resource_rows(arch, folder)]
        if VALUES_ARCH not in archs:
            resource_rows(VALUES_ARCH, folder)
        values = value_rows(folder)
    return {
        "run on a GPU": False,
        "resources": resources,
        "values": values,
        "products": product_rows(),
        "steps": sass_steps.rows(values),
    }


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows]


def _widths(loads: dict[str, int]) -> str:
    return ", ".join(f"{n} x {width}" for width, n in loads.items()) or "none"


def markdown(found: Row) -> str:
    """Return the tables."""
    values, gpu = found["values"], Gpu.load(GPUS[-1])
    archs = sorted({row["arch"] for row in found["resources"]})
    by_kernel: dict[str, dict[int, Row]] = {}
    for row in found["resources"]:
        by_kernel.setdefault(row["kernel"], {})[row["arch"]] = row
    lines = [
        "# Device kernels as machine code",
        "",
        "From nvcc, ptxas and Triton; **not yet run on a GPU**: times are predictions, of pipes",
        "and memory that overlap perfectly. `python -m benchmarks sass` makes this file.",
        "",
        f"## Values, compute capability 9.0, {gpu.title}",
        "",
        "Instructions of a thread per value, by the busiest pipes; loads of the main loop as count",
        "x bytes; `of copy`: share of the data sheet's bandwidth that the bound allows.",
        "",
        *_table(
            ("kernel", "bytes", "instructions", "ALU", "FMA", "XU", "float64", "loads",
             "ns per 1000", "bound", "of copy"),
            (
                (
                    row["case"],
                    f"{row['bytes']:g}",
                    *(f"{row[k]:.1f}" for k in ("instructions", "alu", "fma", "xu", "fp64")),
                    _widths(row["loads"]),
                    f"{row[gpu.name]['ns per 1000']:.2f}",
                    row[gpu.name]["bound"],
                    f"{row[gpu.name]['of copy']:.0%}",
                )
                for row in values
            ),
        ),
        "",
        "## Products in Triton",
        "",
        "The loop over positions: one chunk of a tile.",
        "",
        *_table(
            ("call", "products", "tile", "registers", "shared", "stack", "occupancy",
             "instructions", "loads", "TFLOP/s at most", "bound"),
            (
                (
                    row["call"],
                    row["products"],
                    row["tile"],
                    row["registers"],
                    row["shared"],
                    row["stack"],
                    f"{row['occupancy']:.0%}",
                    row["instructions"],
                    _widths(row["loads"]),
                    f"{row['TFLOP/s at most']:.0f}",
                    row["bound"],
                )
                for row in found["products"]
            ),
        ),
        "",
        *sass_steps.markdown(found["steps"]),
        "",
        "## CUDA kernels by architecture",
        "",
        "Registers / occupancy of the worst instance; none of them spills or has local memory"
        if not any(row["spilled"] or row["local"] for row in found["resources"])
        else "Registers / occupancy of the worst instance; bytes on the stack in brackets",
        "",
        *_table(
            ("kernel", "shared", *(f"sm_{arch}" for arch in archs)),
            (
                (name, max(row["shared"] for row in each.values()), *map(_cell, each.values()))
                for name, each in by_kernel.items()
            ),
        ),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _cell(row: Row) -> str:
    spilled = f" [{row['spilled']}]" if row["spilled"] else ""
    return f"{row['registers']} / {row['occupancy']:.0%}{spilled}"
