"""No program of an interpreted launch writes what another one reads or writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import gpu_smoke
from dpkern.base import dispatch
from dpkern.ops import testing
from tests.ops.backends.write_sets import watched
from tests.ops.small_cases.update import UpdateCase

_REASON = testing.emulation("triton")
pytestmark = pytest.mark.skipif(isinstance(_REASON, str), reason=f"triton {_REASON}")


def test_every_op_keeps_its_programs_apart() -> None:
    with testing.emulated("triton"), watched() as watch:
        for name, call in gpu_smoke.calls(gpu_smoke.Inputs("cpu"), "triton").items():
            if "triton" in dispatch.OPS[name].kernels:
                call()
    assert watch.found == []
    assert watch.launches >= 20


@pytest.mark.parametrize("noised", [True, False])
def test_an_update_of_all_tensors_is_one_launch(noised: bool) -> None:
    """With the bits of the compiled kernel, for tensors of many tiles, of one and of none."""
    case = UpdateCase(
        sizes=(5000, 0, 3, 513), rule="adam", sums=torch.float32, noise=noised, rounds=8
    )
    with testing.emulated("triton"), watched() as watch:
        found = case.stepped("triton")
    assert watch.launches == 2  # steps
    assert watch.found == []
    for got, want in zip(found, case.stepped("cpu"), strict=True):
        assert torch.equal(got.view(torch.int32), want.view(torch.int32))


def _kernels() -> dict[str, Any]:
    import triton
    import triton.language as tl

    @triton.jit
    def apart_kernel(x, out):
        at = tl.program_id(0) * 4 + tl.arange(0, 4)
        tl.store(out + at, tl.load(x + at) + 1)

    @triton.jit
    def overlapping_kernel(x, out):
        at = tl.program_id(0) * 3 + tl.arange(0, 4)
        tl.store(out + at, tl.load(x + at) + 1)

    @triton.jit
    def foreign_kernel(x, out):
        at = tl.program_id(0) * 4 + tl.arange(0, 4)
        tl.store(out + at, tl.load(out + 7 - at) + tl.load(x + at))

    @triton.jit
    def masked_kernel(x, out):
        at = tl.program_id(0) * 3 + tl.arange(0, 4)
        live = tl.arange(0, 4) < 3
        tl.store(out + at, tl.load(x + at, mask=live, other=0), mask=live)

    @triton.jit
    def atomic_kernel(x, out):
        tl.atomic_add(out + tl.arange(0, 4), tl.load(x + tl.arange(0, 4)))

    return {name: value for name, value in locals().items() if name.endswith("_kernel")}


@pytest.mark.parametrize(
    ("name", "finding"),
    [
        ("apart", ""),
        ("masked", ""),
        ("atomic", ""),
        ("overlapping", "1 addresses are written by two programs"),
        ("foreign", "8 addresses are read that another writes"),
    ],
)
def test_overlaps_are_found(name: str, finding: str) -> None:
    kernel = _kernels()[f"{name}_kernel"]
    with watched() as watch:
        kernel[(2,)](torch.ones(8), torch.zeros(8))
    assert watch.launches == 1
    assert [found.partition(": ")[2] for found in watch.found] == [finding] * bool(finding)
