"""Triton's kernels compiled for every supported device: registers, shared memory, no spills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

CAPABILITIES = (80, 90, 100)


def run() -> dict[str, Any]:
    """Compile all forms in a process of its own, which must not interpret."""
    command = [sys.executable, "-m", "tests.triton_aot", *map(str, CAPABILITIES)]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    text = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    reports: list[dict[str, Any]] = json.loads(text.stdout)
    wrong = [r for r in reports if r["stack"] or r["local"] or r["inexact"]]
    return {
        "passed": bool(reports) and not wrong,
        "capabilities": list(CAPABILITIES),
        "kernels": [
            {
                name: report[name]
                for name in ("module", "kernel", "capability", "reg", "stack", "dynamic_shared")
            }
            for report in reports
        ],
        "wrong": [f"{r['module']}.{r['kernel']} sm_{r['capability']}" for r in wrong],
    }
