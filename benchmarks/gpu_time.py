"""Share a device, times by events and result files among the GPU benchmarks.

Everything here needs torch and numpy only, and no network. ``--device cpu`` runs the same code on
small sizes without writing results: that is how it is tested where there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import dpkern
from dpkern.base import dispatch
from dpkern.base.errors import BackendError, DPKernError

from .gpu_ready import NO_DEVICE

try:
    from triton.errors import TritonError
except ImportError:  # then nothing raises it

    class TritonError(Exception):  # type: ignore[no-redef]
        """An error that stands for one of Triton's: a kernel does not compile."""


ROUNDS = 21
FOLDER = Path(os.environ.get("OUT") or Path(__file__).parent / "results")


@dataclass(frozen=True)
class Setting:
    """The device and the size of a benchmark.

    Attributes:
        device: what is measured.
        scale: fraction of the full sizes.
    """

    device: torch.device
    scale: float = 1.0

    @property
    def real(self) -> bool:
        """Whether the results are worth keeping."""
        return self.device.type == "cuda" and self.scale == 1.0

    def size(self, full: int, least: int = 8) -> int:
        """Return a size for this setting."""
        return max(least, int(full * self.scale))


def setting(description: str, argv: Sequence[str] | None = None) -> Setting:
    """Read the setting from the command line.

    The program ends with a typed line where there is no such device.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scale", type=float, default=1.0, help="fraction of the full sizes")
    given = parser.parse_args(argv)
    device = torch.device(given.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        error = BackendError(
            "GPU",
            expected="a CUDA device and a CUDA build of torch",
            got=f"torch {torch.__version__} without a device",
            remedy="Run benchmarks/gpu.sh on a machine with a GPU; nothing was measured.",
        )
        print(f"BackendError: {error}", file=sys.stderr)
        raise SystemExit(NO_DEVICE)
    return Setting(device, given.scale)


def backends(op: str, where: Setting) -> dict[str, str]:
    """Return every backend for the device, with "" or the reason why it cannot run the op."""
    reasons = {}
    for name in dispatch.PREFERENCE[where.device.type]:
        kernel = dispatch.OPS[op]._kernel(name)
        reasons[name] = kernel if isinstance(kernel, str) else ""
    return reasons


def milliseconds(calls: Sequence[Callable[[], Any]], where: Setting) -> float:
    """Measure the median over at least 20 calls, by CUDA events.

    Args:
        calls: the same work on different buffers, taken in turns, so that a call never finds its
            data in the cache; all of them run once before.
        where: the device.
    """
    for call in calls:
        call()
    rounds = ROUNDS if where.scale == 1.0 else 3
    if where.device.type != "cuda":
        return statistics.median(_host_time(calls[i % len(calls)]) for i in range(rounds))
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]
    torch.cuda.synchronize(where.device)
    for i, (start, end) in enumerate(marks):
        start.record()
        calls[i % len(calls)]()
        end.record()
    torch.cuda.synchronize(where.device)
    return statistics.median(start.elapsed_time(end) for start, end in marks)


def _host_time(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - started)


def copies(size: int, where: Setting) -> int:
    """Return how many sets of buffers of this many bytes exceed the cache."""
    if where.device.type != "cuda":
        return 1
    cache = torch.cuda.get_device_properties(where.device).L2_cache_size
    return max(1, min(8, -(-4 * cache // max(1, size))))


def normal(shape: Sequence[int], where: Setting, dtype: torch.dtype = torch.float32) -> Any:
    """Return random data on the device: zeros would compress, cache and clip too well."""
    return torch.randn(*shape, device=where.device).to(dtype)


def keep(part: str, rows: list[dict[str, Any]], where: Setting) -> None:
    """Print the rows and enter them in ``gpu.json`` and ``gpu.md`` (real measurements only)."""
    for row in rows:
        print(json.dumps(row), flush=True)
    if not where.real:
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / "gpu.json"
    content = json.loads(path.read_text()) if path.exists() else {"parts": {}}
    content["machine"] = machine(where)
    content["parts"][part] = rows
    path.write_text(json.dumps(content, indent=1) + "\n")
    path.with_suffix(".md").write_text(markdown(content))


def machine(where: Setting) -> dict[str, Any]:
    """Return versions and hardware, for the record."""
    found = torch.cuda.get_device_properties(where.device)
    return {
        "dpkern": dpkern.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "device": found.name,
        "compute_capability": f"{found.major}.{found.minor}",
        "memory_GiB": round(found.total_memory / 2**30, 1),
    }


def markdown(content: dict[str, Any]) -> str:
    """Return the tables of all parts that were run."""
    lines = [", ".join(f"{name} {value}" for name, value in content["machine"].items()), ""]
    for part, rows in content["parts"].items():
        columns = list(dict.fromkeys(name for row in rows for name in row))
        lines += [f"## {part}", "", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        lines += ["| " + " | ".join(_cell(row.get(c)) for c in columns) + " |" for row in rows]
        lines.append("")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def attempt(row: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the row with what was measured, or with the reason why not."""
    try:
        return row | measure()
    except (DPKernError, AssertionError, RuntimeError, TritonError) as error:
        if isinstance(error, BackendError) and error.name.startswith("backend "):
            return row | {"not here": error.got}  # it refused the call
        return row | {"failed": f"{type(error).__name__}: {error}"}


def exit_code(rows: Sequence[dict[str, Any]]) -> int:
    """Return 1 if a row failed."""
    return int(any("failed" in row for row in rows))
