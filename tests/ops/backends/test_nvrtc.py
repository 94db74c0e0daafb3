"""The CUDA sources under the run-time compiler, without a GPU, as the cupy backend compiles them.

It has no host headers at all: whatever a source includes for the host must be out of its sight.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dpkern.ops.backends import _cupy_sources, _generated
from dpkern.ops.backends._kernels import KERNELS
from tests.ops.backends import cuda_gate as gate
from tests.ops.backends import nvrtc

pytestmark = pytest.mark.skipif(nvrtc.library() is None, reason="libnvrtc is not installed")
FOLDER = _cupy_sources.sources()
OPTIONS = (*_cupy_sources.options(FOLDER), "--gpu-architecture=sm_90")


@pytest.mark.slow
@pytest.mark.parametrize("source", _generated.sources())
def test_every_kernel_compiles_under_its_name(source: str) -> None:
    kernels = nvrtc.expressions(source)
    code = (FOLDER / "cuda" / f"{source}.cu").read_text()
    compiled = nvrtc.compile_source(code, OPTIONS, kernels)
    assert compiled.ok, compiled.log
    assert not compiled.log
    assert len(set(compiled.names.values())) == len(kernels)
    assert not gate.findings(compiled.ptx, fused=source not in gate.EXACT)


def test_every_kernel_of_the_sources_is_listed() -> None:
    defined = set()
    for path in (FOLDER / "cuda").glob("*.cu*"):
        defined |= set(re.findall(r"__global__[^;{]*?(\w+_kernel)\(", path.read_text()))
    assert {kernel.name for kernel in KERNELS} == defined
    assert {f"{name}.cu" for name in (*_generated.sources(), "runtime")} == {
        path.name for path in (FOLDER / "cuda").glob("*.cu")
    }


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        ("#include <cmath>\n", "cannot open source file"),
        ("int host();\n__global__ void f(int* x) { *x = host(); }", "execution space|host"),
        ("__global__ void f() { int unused; }", "never referenced"),
    ],
)
def test_what_the_compiler_rejects_is_reported(code: str, complaint: str) -> None:
    assert re.search(complaint, nvrtc.compile_source(code, OPTIONS).log)


def test_an_absent_kernel_is_noticed() -> None:
    assert not nvrtc.compile_source("__global__ void f() {}", OPTIONS, ["f<int>"]).ok


def test_sources_are_found_beside_and_inside_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "dpkern" / "ops" / "backends" / "_cupy_sources.py"
    monkeypatch.setattr(_cupy_sources, "__file__", str(module))
    assert _cupy_sources.sources() == tmp_path / "csrc"
    (tmp_path / "dpkern" / "csrc").mkdir(parents=True)
    assert _cupy_sources.sources() == tmp_path / "dpkern" / "csrc"
