"""Describe everything that a measured time depends on, so that results can be compared later."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from ..base.commit import commit
from ..base.version import __version__
from ..ops.backends import cpu
from .measure import largest_cache

SCHEMA = 1
"""Version of the layout of results; a reader refuses others."""
PREFIXES = ("OMP_", "GOMP_", "KMP_", "MKL_", "MALLOC_", "DPKERN_", "TORCH_", "PYTORCH_", "LD_")


def environment(date: datetime.datetime | None = None) -> dict[str, Any]:
    """Return commit, date, processor, build flags, versions, variables and load."""
    now = date or datetime.datetime.now(datetime.UTC)
    return {
        "schema": SCHEMA,
        "date": now.isoformat(timespec="seconds"),
        **commit_here(),
        "dpkern": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "processor": processor(),
        "cores": os.cpu_count(),
        "cache bytes": largest_cache(),
        "system": f"{platform.system()} {platform.release()}",
        "clock": _first(Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")),
        "build": cpu.build_config(),
        "devices": devices(),
        "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith(PREFIXES)},
        "passive waiting": os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive",
        "load": list(os.getloadavg()),
    }


def commit_here() -> dict[str, Any]:
    """Return the commit of this code and whether files differ from it; None where not known."""
    found = commit()
    if found is None:
        return {"commit": None, "dirty": None}
    return {"commit": found.removesuffix("-dirty"), "dirty": found.endswith("-dirty")}


def processor() -> str:
    """Return the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def devices() -> list[dict[str, Any]]:
    """Return the CUDA devices with driver and clocks, as the driver's tool shows them."""
    if not torch.cuda.is_available():
        return []
    names = "name,driver_version,clocks.sm,clocks.mem,clocks_throttle_reasons.active"
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={names}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=False,
        )
        lines = done.stdout.strip().splitlines() if done.returncode == 0 else []
    except OSError:  # the tool is not installed
        lines = []
    shown = [dict(zip(names.split(","), line.split(", "), strict=False)) for line in lines]
    return shown or [
        {"name": torch.cuda.get_device_name(i)} for i in range(torch.cuda.device_count())
    ]


def _first(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
