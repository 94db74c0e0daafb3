"""Ctrl-C in the middle of an item, and of all items of a paper: resumed, with the same numbers."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dpkern.base.exit_codes import INTERRUPTED
from dpkern.papers.pieces import FOLDER

pytestmark = pytest.mark.slow

SECONDS = 600


def command(item: str, out: Path, *options: str) -> list[str]:
    called = ["-m", "dpkern", "reproduce", *item.split(), "--quick", "--no-figure"]
    return [sys.executable, *called, "--out", str(out), *options]


def numbers(folder: Path) -> dict[str, Any]:
    """Every result without its times."""
    return {path.name: _untimed(json.loads(path.read_text())) for path in folder.glob("*.json")}


def _untimed(content: Any) -> Any:
    if isinstance(content, dict):
        return {
            name: _untimed(value)
            for name, value in content.items()
            if name not in ("ms_per_step", "notes")
        }
    return [_untimed(one) for one in content] if isinstance(content, list) else content


@pytest.mark.parametrize(("item", "kept"), [("spof rates", 3), ("ldp all", 2)])
def test_an_interrupted_item_ends_with_the_same_numbers(
    item: str, kept: int, tmp_path: Path
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    subprocess.run(command(item, whole), check=True, capture_output=True, timeout=SECONDS)
    # A pytest in the background would hand down that it ignores Ctrl-C.
    listens = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(
        command(item, parts), stderr=subprocess.PIPE, text=True, preexec_fn=listens
    ) as process:
        until = time.monotonic() + SECONDS
        while len(list(parts.glob(f"{FOLDER}/*.json"))) < kept and time.monotonic() < until:
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=SECONDS)
    assert process.returncode == INTERRUPTED
    assert "add --resume" in said
    assert "Traceback" not in said
    finished = {path: path.stat().st_mtime_ns for path in parts.glob(f"{FOLDER}/*.json")}
    assert len(finished) >= kept
    resumed = command(item, parts, "--resume")
    subprocess.run(resumed, check=True, capture_output=True, timeout=SECONDS)
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    assert len(list(parts.glob(f"{FOLDER}/*.json"))) > len(finished), "interrupted in the middle"
    assert numbers(parts) == numbers(whole)
