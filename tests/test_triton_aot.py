"""Triton's kernels compile for devices that are not here: exact arithmetic, nothing spilled."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
CAPABILITY = 90
MODULES = {
    *("noise", "update", "clip", "explicit", "affine", "embedding", "tied", "linear", "conv"),
    *("symbols", "coef", "coef_features"),
}


def compiled(*arguments: str) -> list[dict[str, Any]]:
    """Reports of a process of its own: one that interprets kernels cannot compile them."""
    command = [sys.executable, "-m", "tests.triton_aot", str(CAPABILITY), *arguments]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    found = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert found.returncode == 0, found.stderr[-4000:]
    reports: list[dict[str, Any]] = json.loads(found.stdout)
    return reports


def faults(reports: list[dict[str, Any]]) -> list[str]:
    """Kernels that keep numbers outside of registers, or round as no other backend does."""
    return [
        f"{report['module']}.{report['kernel']}: stack {report['stack']}, {report['inexact']}"
        for report in reports
        if report["stack"] or report["local"] or report["inexact"]
    ]


def test_every_kernel_compiles_without_spills_and_in_exact_arithmetic() -> None:
    reports = compiled("--first")
    assert {report["module"] for report in reports} == MODULES
    assert faults(reports) == []


def test_faults_are_found() -> None:
    inexact, spilling = compiled("--controls")
    assert inexact["inexact"]
    assert spilling["stack"] > 0
    assert len(faults([inexact, spilling])) == 2
