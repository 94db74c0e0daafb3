"""The Triton that is installed, and the oldest that dpkern declares, each in a process of its own.

``make oldest-triton`` puts the oldest into a folder; a process finds it there before the other.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dpkern.ops.backends.triton import OLDEST

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "build" / "oldest-triton"
VERSIONS = ("installed", "oldest")
LARGEST_SPILL = {"anywhere": 16, "outside of loops": 32}
"""Bytes, of kernels with products: a few addresses."""


def missing(version: str) -> str | None:
    """Why nothing can be compiled with it, if so."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    if version == "oldest" and not (FOLDER / "triton").is_dir():
        return f"Triton {'.'.join(map(str, OLDEST))} is not in {FOLDER}: make oldest-triton"
    return None


def compiled(version: str, *arguments: str) -> dict[str, Any]:
    """What ``triton_aot.py`` prints; a process that interprets kernels could not compile."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    if version == "oldest":
        paths.insert(0, str(FOLDER))
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.ops.backends.triton_aot", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(paths)},
    )
    if found.returncode:
        raise AssertionError(found.stderr[-4000:])
    printed: dict[str, Any] = json.loads(found.stdout)
    return printed


def faults(reports: list[dict[str, Any]]) -> list[str]:
    """Kernels that keep numbers outside of registers, or round as no other backend does."""
    return [
        f"{report['kernel']} in {report['call']} on sm_{report['capability']}: stack "
        f"{report['stack']}, {report['looped']} in loops, local {report['local']}, "
        f"{report['inexact']}"
        for report in reports
        if report["stack"] > _spill(report) or report["local"] or report["inexact"]
    ]


def _spill(report: dict[str, Any]) -> int:
    if not report["products"]:
        return 0
    return LARGEST_SPILL["anywhere" if report["looped"] else "outside of loops"]


def to_a_total(report: dict[str, Any]) -> bool:
    """Whether a product adds to a total in its accumulator, whose bound does not count on it.

    Sums of products of bytes are exact.
    """
    return bool(report["merged"]) and report["kernel"] not in ("chained_kernel", "products_kernel")


def in_tf32(report: dict[str, Any]) -> bool:
    """Whether a kernel rounds operands to TF32 that it must not."""
    stored = report["call"].startswith("conv_gradient-") and "-strict-" not in report["call"]
    return bool(report["tf32"]) and not (stored and report["kernel"] == "direct_kernel")
