"""First look at a GPU: its ceilings, whether every Triton form compiles, and a step's kernels.

    python -m benchmarks.gpu_first [--device cuda] [--scale 1]

Ceilings are what predictions assumed: bandwidth of a copy, speed of the library's products, odd
widths among them. Forms of Triton's kernels compile in several processes, which fills the cache of
the calls that follow. One step each of a decoder and of ResNet-18 is profiled. Not yet run on a
GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import gpu_models
from .gpu import copy_bandwidth
from .gpu_time import Setting, attempt, exit_code, keep, milliseconds, normal, setting
from .step_cases import VARIANTS, quiet

Row = dict[str, Any]
PROCESSES = 12
KERNELS = 25
"""Rows of a profile."""
PRODUCTS = {
    "one product, 16384 x 768 x 3072": (1, 16384, 768, 3072),
    "16 products, 1024 x 768 x 3072": (16, 1024, 768, 3072),
    "16 products, 1024 x 768 x 50257": (16, 1024, 768, 50257),
    "64 products, 197 x 768 x 3072": (64, 197, 768, 3072),
}
"""Batch, positions, columns and rows of ``g^T a``."""


def ceilings(where: Setting) -> list[Row]:
    """Return the copy's bandwidth, and TFLOP/s of products like those of weight gradients."""
    rows = [attempt({"what": "copy"}, lambda: {"GB/s": copy_bandwidth(where)})]
    for dtype in (torch.bfloat16, torch.float32):
        for name, shape in PRODUCTS.items():
            row = {"what": name, "dtype": str(dtype).removeprefix("torch.")}
            rows.append(attempt(row, lambda s=shape, d=dtype: product(s, d, where)))  # type: ignore[misc]
    return rows


def product(shape: tuple[int, int, int, int], dtype: torch.dtype, where: Setting) -> Row:
    """Time our materialized gradients beside the library's product."""
    from dpkern.ops import ghost
    from dpkern.ops.backends._device_products import aligned_rows, batched_product

    batch, positions, d, p = shape if where.scale == 1 else (2, 8, 8, 17)
    a, g = (normal((batch, positions, n), where, dtype) for n in (d, p))
    padded = aligned_rows(g)
    flops = 2.0 * batch * positions * d * p
    ways: dict[str, Callable[[], Any]] = {
        "library": lambda: batched_product(g, a),
        "filled up": lambda: batched_product(padded, a),
        "with norms": lambda: ghost.linear_gradient(a, g),
        "triton": lambda: ghost.linear_gradient(a, g, backend="triton"),
    }
    if dtype is torch.bfloat16:
        ways["in 16 bits, with norms"] = lambda: ghost.rounded_gradient(a, g)
    if where.device.type != "cuda":
        del ways["triton"]
    return {
        f"{name} TFLOP/s": flops / milliseconds([way], where) / 1e9 for name, way in ways.items()
    }


def compiled(where: Setting) -> list[Row]:
    """Compile all forms of Triton's kernels in several processes, by calling them."""
    count = PROCESSES if where.scale == 1 else 1
    command = [sys.executable, "-m", "benchmarks.gpu_first", "--device", str(where.device)]
    running = [
        subprocess.Popen(
            [*command, "--scale", str(where.scale)],
            env={**os.environ, "DPKERN_COMPILE": f"{i}/{count}"},
        )
        for i in range(count)
    ]
    codes = [process.wait() for process in running]
    row: Row = {"what": "all forms compile", "processes": count}
    return [row | ({"failed": f"exit codes {codes}"} if any(codes) else {"ok": True})]


def compile_part(part: str, where: Setting) -> int:
    """Call every n-th of the calls that between them launch every form; 1 if one fails."""
    from tests.ops.backends.triton_calls import calls

    i, count = map(int, part.split("/"))
    failed = []
    torch.set_default_device(where.device)
    for place, (name, call) in enumerate(calls()):
        if place % count == i and (where.scale == 1 or place < 3):
            row = attempt({"call": name}, lambda c=call: {"ok": c() is None or True})  # type: ignore[misc]
            failed += [row] if "failed" in row else []
    for row in failed:
        print(row, flush=True)
    return int(bool(failed))


def profiled(where: Setting) -> list[Row]:
    """Return the kernels of a private step by their time, of a decoder and of ResNet-18."""
    wanted = ("decoder 16 50257", "resnet18")
    rows = []
    for task in gpu_models.tasks(where):
        if task.name in wanted:
            with quiet():
                rows += profile(task, where)
    return rows


def profile(task: Any, where: Setting) -> list[Row]:
    """Profile one step of a model, after three others."""
    runner = VARIANTS["dpkern"](task, lr=1e-3).begin(1.0)

    def step() -> None:
        runner.loss(runner.hand_out()).backward()
        runner.update()

    for _ in range(3):
        step()
    on_device = where.device.type == "cuda"
    activity = torch.profiler.ProfilerActivity
    kinds = [activity.CUDA] if on_device else [activity.CPU]
    with torch.profiler.profile(activities=kinds) as profiler:
        step()
        if on_device:
            torch.cuda.synchronize(where.device)
    key = "device_time_total" if on_device else "cpu_time_total"
    events = sorted(profiler.key_averages(), key=lambda event: -getattr(event, key))
    return [
        {
            "what": task.name,
            "kernel": event.key[:100],
            "calls": event.count,
            "ms": getattr(event, key) / 1e3,
        }
        for event in events[:KERNELS]
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Look at everything; 1 if something failed."""
    where = setting("first look at a GPU", argv)
    part = os.environ.get("DPKERN_COMPILE")
    if part:
        return compile_part(part, where)
    failed = 0
    looks: dict[str, Callable[[Setting], list[Row]]] = {
        "ceilings": ceilings,
        "compile": compiled,
        "profile": profiled,
    }
    for name, look in looks.items():
        rows = look(where)
        keep(name, rows, where)
        failed |= exit_code(rows)
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
