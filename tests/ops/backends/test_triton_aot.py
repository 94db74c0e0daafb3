"""Triton's kernels compile for a device that is not here, with the installed Triton and the oldest.

Arithmetic is exact and stays in registers, and sums of a chunk begin at zero: the compiler gives a
product the total that it is added to as its accumulator unless it is told not to, and the bounds of
``docs/ghost.md`` for tensor cores would not hold for it. Chained sums have a bound of their own.
"""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from dpkern.ops.backends.triton import OLDEST
from tests.ops.backends.triton_versions import (
    ROOT,
    VERSIONS,
    compiled,
    faults,
    in_tf32,
    missing,
    to_a_total,
)

pytestmark = pytest.mark.slow

CAPABILITY = "90"
OFTEN = r"^((linear|conv)_\w+-(wide|vocabulary|block)|linear_sum-vit)"
"""Calls whose forms are all compiled in every run; of the others, one form of each kernel.
``make evidence`` compiles all of them, for every device."""
LARGEST_SHARED = 96 * 1024
"""Bytes that every device of compute capability 8.0 has."""


@pytest.fixture(scope="module", params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    reason = missing(request.param)
    if reason is not None:
        pytest.skip(reason)
    return str(request.param)


@pytest.fixture(scope="module")
def result(version: str) -> dict[str, Any]:
    return compiled(version, CAPABILITY, "--often", OFTEN)


@pytest.fixture
def reports(result: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = result["reports"]
    return found


def test_every_kernel_compiles(result: dict[str, Any], version: str) -> None:
    assert result["failed"] == []
    assert result["missing"] == []
    (found,) = {report["triton"] for report in result["reports"]}
    if version == "oldest":
        assert tuple(map(int, found.split(".")[:2])) == OLDEST


def test_arithmetic_is_exact_and_stays_in_registers(reports: list[dict[str, Any]]) -> None:
    assert faults(reports) == []
    larger = {r["kernel"]: r["dynamic_shared"] for r in reports}
    assert larger.pop("chained_kernel") <= 227 * 1024  # for compute capability 9 alone
    assert {kernel for kernel, shared in larger.items() if shared > LARGEST_SHARED} == set()


def test_no_product_adds_to_a_total_or_is_made_in_tf32(reports: list[dict[str, Any]]) -> None:
    """But for gradients of float32 convolutions, which are normed as they are stored."""
    assert sum(report["products"] for report in reports) >= 30
    assert [report["call"] for report in reports if to_a_total(report)] == []
    assert any(report["merged"] for report in reports)
    assert [report["call"] for report in reports if in_tf32(report)] == []
    assert any(report["tf32"] for report in reports)


def test_widened_products_stay_in_float32_on_other_devices(version: str) -> None:
    """Triton 3.6 made them in tf32 for compute capability 10.0, although it was told not to."""
    calls = r"^linear_sum-(pair|one)-bfloat16$"
    result = compiled(version, "100", "--only", calls)
    assert result["failed"] == []
    kernels = [report["kernel"] for report in result["reports"]]
    assert kernels.count("positions_kernel") == 2
    assert [report["call"] for report in result["reports"] if report["tf32"]] == []


def test_forms_are_those_of_a_launch(reports: list[dict[str, Any]]) -> None:
    """Triton is told about every size: one group of channels, features that are multiples of 16."""
    forms = {r["call"]: r for r in reports if r["kernel"] == "direct_kernel"}
    wide = forms["linear_norm-wide-direct-bfloat16"]
    assert wide["types"]["sizes"] == ["i32", "i32", "i32", "constexpr", "i32", "i32"]
    assert {f"sizes.{i}" for i in (0, 1, 2, 4, 5)} <= {*wide["multiples"]}
    assert wide["copied"] == [16]
    vocabulary = forms["linear_norm-vocabulary-direct-bfloat16"]["multiples"]
    assert "sizes.1" not in vocabulary
    assert {"sizes.5", "g_strides.2"} <= {*vocabulary}
    block = forms["conv_norm-block-bfloat16"]["types"]
    assert block["geometry"].count("constexpr") > 5


def test_faults_are_found(version: str) -> None:
    result = compiled(version, CAPABILITY, "--controls")
    found = [
        r for r in result["reports"] if r["kernel"] != "_added_kernel"
    ]  # adds up what one made
    inexact, spilling, looping = found
    assert inexact["inexact"]
    assert spilling["stack"] > 0
    assert looping["looped"] > 0
    assert len(faults(found)) == 3
    (failed,) = result["failed"]
    assert failed.startswith("_refused_kernel in refused: ")


def test_the_oldest_triton_is_declared_once() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = extras["optional-dependencies"]["triton"]
    assert declared == [f"triton>={'.'.join(map(str, OLDEST))}.0"]
