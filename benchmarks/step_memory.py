"""Measure peak memory of a few steps of one variant, over what stood before: a worker.

Usage: ``python -m benchmarks.step_memory '{"task": ..., "variant": ...}'``
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from pathlib import Path
from typing import Any

from .step_cases import NOISE, VARIANTS, quiet
from .step_models import TASKS, Task

STEPS = 5
_KIB = 1024


def resident(field: str) -> int:
    """Return ``VmRSS`` or ``VmHWM`` (the peak) of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * _KIB
    raise RuntimeError(f"/proc/self/status has no {field}")


def reset_peak() -> int:
    """Give free memory back, set the peak to what is resident, and return that."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def growth(task: Task, variant: str) -> dict[str, int]:
    """Measure bytes before training, and what training adds at its peak.

    Before training there are model, optimizer and batch.

    What the variant itself allocates (wrappers, buffers, optimizer state) is counted.
    """
    prepared = VARIANTS[variant](task, lr=1e-3)
    before = reset_peak()
    runner = prepared.begin(NOISE)
    for _ in range(STEPS):
        runner.step()
    return {"before": before, "growth": resident("VmHWM") - before}


def main(request: dict[str, str]) -> dict[str, Any]:
    """Measure a tiny relative first, so that lazily loaded code does not count."""
    task = TASKS[request["task"]]
    if task.small is not None:
        growth(task.small, request["variant"])
    return {**request, **growth(task, request["variant"])}


if __name__ == "__main__":
    with quiet():
        print(json.dumps(main(json.loads(sys.argv[1]))))
