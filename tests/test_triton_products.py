"""Products of the Triton kernels as they are compiled: sums of a chunk begin at zero.

The compiler gives a product the total that it is added to as its accumulator unless it is told not
to; the bounds of ``docs/ghost.md`` for tensor cores would not hold for it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton")

LARGEST_SPILL = 16
"""Bytes: a few addresses, outside of the loops."""
LARGEST_SHARED = 96 * 1024
"""Bytes that every device of compute capability 8.0 has."""


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, Any]]:
    # A process that interprets kernels cannot compile them.
    command = [sys.executable, "-W", "ignore", "-m", "tests.triton_aot", "90", "--only", "linear"]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    found = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    forms: list[dict[str, Any]] = json.loads(found.stdout)
    return forms


def test_no_product_adds_to_a_total(compiled: list[dict[str, Any]]) -> None:
    assert sum(form["products"] for form in compiled) >= 12
    assert [form["kernel"] for form in compiled if form["merged"]] == []


def test_tiles_fit_the_device(compiled: list[dict[str, Any]]) -> None:
    for form in compiled:
        assert form["stack"] <= LARGEST_SPILL, form
        assert form["local"] == 0, form
        assert form["dynamic_shared"] <= LARGEST_SHARED, form


def test_nothing_is_multiplied_in_tf32(compiled: list[dict[str, Any]]) -> None:
    assert not [form["kernel"] for form in compiled if form["tf32"]]
