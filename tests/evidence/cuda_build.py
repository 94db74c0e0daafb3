"""The CUDA sources without a GPU: every architecture under nvcc and the run-time compiler, and the
emulated kernels' noise against the CPU's, with the threads of a block in both orders.

Fails as well where nvcc, libnvrtc or the emulator is missing: then nothing was shown.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from dpkern.base.laws import LAWS
from dpkern.base.rng import Purpose
from dpkern.ops import noise, testing
from dpkern.ops.backends import _cupy_sources, _generated, cuda
from tests.ops.backends import cuda_gate as gate
from tests.ops.backends import nvrtc


def compiled() -> dict[str, Any]:
    """Registers of every kernel by architecture, and what must not be there."""
    registers: dict[str, dict[str, int]] = {}
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for arch in gate.ARCHS:
            for source in gate.SOURCES:
                ptx = gate.ptx(source, Path(folder), arch)
                fused = gate.may_fuse(source)
                kernels = gate.usage(ptx, arch)
                wrong += [
                    f"sm_{arch} {source.stem}: {found}"
                    for found in (
                        *gate.findings(ptx.read_text(), fused=fused),
                        *gate.excesses(kernels),
                    )
                ]
                for name, versions in kernels.items():
                    each = registers.setdefault(name, {})
                    most = max(version.registers for version in versions)
                    each[f"sm_{arch}"] = max(most, each.get(f"sm_{arch}", 0))
    return {"registers": registers, "wrong": wrong}


def compiled_at_run_time() -> list[str]:
    """Return what the run-time compiler says against the sources."""
    folder = _cupy_sources.sources()
    said = []
    for arch in gate.ARCHS:
        options = (*_cupy_sources.options(folder), f"--gpu-architecture=sm_{arch}")
        for source in _generated.sources():
            code = (folder / "cuda" / f"{source}.cu").read_text()
            result = nvrtc.compile_source(code, options, nvrtc.expressions(source))
            if not result.ok or result.log:
                said.append(f"sm_{arch} {source}: {result.log}")
    return said


def emulated(n: int) -> dict[str, int]:
    """Draws of each law and order of threads that differ from the CPU's."""
    module = cuda._emulated()
    assert not isinstance(module, str)
    differ = {}
    try:
        for law in LAWS:
            purpose = Purpose.NOISE if law == "gaussian" else Purpose.LAPLACE
            place: dict[str, Any] = {"position": 77, "count": n, "distribution": law}
            stream = testing.KEY.stream(purpose, 1)
            want = noise.lattice_draws(stream, backend="cpu", **place)
            for reverse in (False, True):
                module.order(reverse=reverse)
                with testing.emulated("cuda"):
                    got = noise.lattice_draws(stream, backend="cuda", **place)
                differ[f"{law} {'backward' if reverse else 'forward'}"] = int((got != want).sum())
    finally:
        module.order(reverse=False)
    return differ


def run(n: int = 1_000_000) -> dict[str, Any]:
    """Compile everything; compare ``n`` draws of each law."""
    missing = [
        reason
        for reason, absent in (
            ("nvcc is not installed", gate.nvcc() is None),
            ("libnvrtc is not installed", nvrtc.library() is None),
            (f"cuda {cuda._emulated()}", isinstance(cuda._emulated(), str)),
        )
        if absent
    ]
    if missing:
        return {"passed": False, "missing": missing}
    built, said, differ = compiled(), compiled_at_run_time(), emulated(n)
    passed = not built["wrong"] and not said and not any(differ.values())
    return {"passed": passed, "figures": {**built, "nvrtc": said, "differing draws": differ}}


def headline(figures: dict[str, Any]) -> str:
    """The kernel with the most registers."""
    if "missing" in figures:
        return ", ".join(figures["missing"])
    most = {name: max(each.values()) for name, each in figures["registers"].items()}
    worst = max(most, key=lambda name: most[name])
    return f"{len(most)} kernels, at most {most[worst]} registers ({worst})"
