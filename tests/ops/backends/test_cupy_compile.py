"""What the cupy backend compiles and loads: machine code of the options that are tested, no others.

Exact bits on a device are shown by the tests marked ``gpu``; here the compiler is real where it is
installed, and CuPy is a stand-in.
"""

from __future__ import annotations

from typing import Any

import pytest

from dpkern.base.errors import BackendError
from dpkern.ops.backends import _cupy_sources, _generated
from dpkern.ops.backends import _kernels as table
from dpkern.ops.backends._cupy_compile import Compiler
from dpkern.ops.backends._cupy_launch import Compiling
from tests.ops.backends import cuda_gate as gate
from tests.ops.backends import nvrtc
from tests.ops.backends.fake_cupy import FakeCupy

RELEASE = "noise", "add_noise_float_kernel<float, Gaussian>"
needs_nvrtc = pytest.mark.skipif(nvrtc.library() is None, reason="libnvrtc is not installed")


def test_a_kernel_is_compiled_once_with_the_tested_options_and_no_others() -> None:
    fake = FakeCupy()
    starter = Compiling(fake)
    for law in ("Gaussian", "Laplace", "Gaussian"):
        assert starter.start(table.DRAWS, (law,), (1, 1), [], 77) == 0
    first, second = fake.nvrtc.programs
    assert first.options == (
        *_cupy_sources.options(_cupy_sources.sources()),
        "--gpu-architecture=sm_90",
    )
    assert second.options == first.options
    assert "--fmad=false" in first.options
    assert "draws_kernel" in first.code
    assert first.headers == _generated.headers()
    assert len(fake.binaries) == 2
    assert not fake.nvrtc.alive
    assert fake.streams == [77] * 3
    assert [name for name, *_ in fake.launches] == [
        f"draws_kernel<{law}>" for law in ("Gaussian", "Laplace", "Gaussian")
    ]


def test_every_device_gets_code_of_its_own() -> None:
    fake = FakeCupy()
    compiler = Compiler(fake)
    for fake.device, fake.capability in ((0, "90"), (1, "80"), (0, "90")):
        compiler.kernel(*RELEASE)
    assert [program.options[-1] for program in fake.nvrtc.programs] == [
        "--gpu-architecture=sm_90",
        "--gpu-architecture=sm_80",
    ]


@pytest.mark.parametrize(
    ("capability", "architecture", "kind"),
    [("90", "sm_90", b"cubin"), ("86", "compute_80", b"ptx"), ("131", "compute_100", b"ptx")],
)
def test_devices_that_the_compiler_does_not_know_get_ptx(
    capability: str, architecture: str, kind: bytes
) -> None:
    fake = FakeCupy()
    fake.capability = capability
    Compiler(fake).kernel(*RELEASE)
    assert fake.nvrtc.programs[0].options[-1] == f"--gpu-architecture={architecture}"
    assert fake.binaries[0].startswith(kind)


def test_a_refused_source() -> None:
    fake = FakeCupy()
    fake.nvrtc.fails = "unknown option"
    with pytest.raises(BackendError, match=r"csrc/cuda/noise\.cu: .* got unknown option") as raised:
        Compiler(fake).kernel(*RELEASE)
    assert isinstance(raised.value.__cause__, nvrtc.NVRTCError)
    assert not fake.nvrtc.alive


def test_a_refused_binary() -> None:
    fake = FakeCupy()
    fake.refuses = "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"
    with pytest.raises(BackendError, match=r"expected a driver .* got CUDA_ERROR_UNSUPPORTED_PTX"):
        Compiler(fake).kernel(*RELEASE)


class Seen(nvrtc.Nvrtc):
    """The compiler; keeps the PTX of what it hands out, and adds options if it is told to."""

    def __init__(self, *added: str) -> None:
        super().__init__()
        self.added, self.ptx = added, ""

    def compileProgram(self, program: int, options: Any) -> None:
        super().compileProgram(program, (*options, *self.added))

    def getCUBIN(self, program: int) -> bytes:
        self.ptx = self.getPTX(program).decode()
        return super().getCUBIN(program)


@needs_nvrtc
@pytest.mark.parametrize(
    ("source", "kernel"),
    [
        RELEASE,
        ("update", "update_flat_kernel<float, float, false>"),
        ("coef", "perturb_flat_kernel<float, true>"),
    ],
    ids=["noise", "update", "coef"],
)
def test_what_is_loaded_computes_what_is_written(source: str, kernel: str) -> None:
    fake = FakeCupy(Seen())
    Compiler(fake).kernel(source, kernel)
    assert fake.binaries[0].startswith(b"\x7fELF")
    assert not gate.findings(fake.nvrtc.ptx, fused=False)


@needs_nvrtc
def test_the_option_that_cupy_adds_would_be_noticed() -> None:
    fake = FakeCupy(Seen("-ftz=true"))
    Compiler(fake).kernel(*RELEASE)
    assert any(f.startswith("flush to zero") for f in gate.findings(fake.nvrtc.ptx, fused=False))
