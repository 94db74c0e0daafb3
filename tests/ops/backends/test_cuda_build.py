"""The CUDA sources under nvcc, without a GPU: exact arithmetic, no local memory, few registers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ops.backends import cuda_gate as gate

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(gate.nvcc() is None, reason="nvcc is not installed"),
]


@pytest.mark.parametrize("source", gate.SOURCES, ids=lambda source: source.stem)
def test_kernels_compute_what_is_written_within_their_budget(source: Path, tmp_path: Path) -> None:
    ptx = gate.ptx(source, tmp_path)
    assert not gate.findings(ptx.read_text(), fused=gate.may_fuse(source))
    assert not gate.excesses(gate.usage(ptx))


@pytest.mark.parametrize("arch", sorted({*gate.ARCHS} - {90}))
def test_every_architecture_is_compiled_for(arch: int, tmp_path: Path) -> None:
    # One source for each, that of the kernels nearest to their budget; the rest is evidence.
    source = next(source for source in gate.SOURCES if source.stem == "coef_kernels")
    ptx = gate.ptx(source, tmp_path, arch)
    assert not gate.findings(ptx.read_text(), fused=False)
    assert not gate.excesses(gate.usage(ptx, arch))


def compiled(body: str, folder: Path, flags: tuple[str, ...] = gate.FLAGS) -> Path:
    """PTX of a kernel ``void control(const float* x, float* y, int n)`` with this body."""
    source = folder / "control.cu"
    source.write_text(f"__global__ void control(const float* x, float* y, int n) {{ {body} }}")
    return gate.ptx(source, folder, flags=flags)


@pytest.mark.parametrize(
    ("body", "finding"),
    [
        ("y[0] = __expf(x[0]);", "approximation"),
        ("float z[64]; for (int i = 0; i < n; ++i) z[i] = x[i]; y[0] = z[n / 2];", "local memory"),
        ("y[0] = fmaf(x[0], x[1], x[2]);", "fused"),
        ("y[0] = x[0] * x[1] + x[2];", ""),
    ],
)
def test_forbidden_instructions_are_found(body: str, finding: str, tmp_path: Path) -> None:
    found = gate.findings(compiled(body, tmp_path).read_text(), fused=False)
    assert [name.split(":")[0] for name in found] == [finding] * bool(finding)


@pytest.mark.parametrize(
    ("flag", "finding"), [("-fmad=true", "fused"), ("-ftz=true", "flush to zero")]
)
def test_forbidden_compiler_flags_are_found(flag: str, finding: str, tmp_path: Path) -> None:
    ptx = compiled("y[0] = x[0] * x[1] + x[2];", tmp_path, ("-std=c++17", flag))
    assert any(name.startswith(finding) for name in gate.findings(ptx.read_text(), fused=False))


def test_excesses_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    big = "__shared__ float z[99]; z[threadIdx.x] = x[threadIdx.x]; __syncthreads(); y[0] = z[n];"
    kernels = gate.usage(compiled(big, tmp_path))
    assert gate.excesses(kernels) == ["control has no budget"]
    monkeypatch.setattr(gate, "budgets", lambda: {"control": {"registers": 64, "shared": 395}})
    assert gate.excesses(kernels) == ["control: shared 396, at most 395"]
    spilling = compiled(
        "float z[64]; for (int i = 0; i < n; ++i) z[i] = x[i]; y[0] = z[n / 2];", tmp_path
    )
    (excess,) = gate.excesses(gate.usage(spilling))
    assert excess == "control: stack 256, at most 0"


def test_a_warning_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="declared but never referenced"):
        compiled("int unused;", tmp_path)


def test_the_build_uses_the_flags_that_were_tested() -> None:
    text = (gate.ROOT / "CMakeLists.txt").read_text()
    options = text.split("target_compile_options(\n    dpkern_cuda")[1].split(")\n")[0]
    for flag in ("-fmad=false", "-warn-spills,-warn-lmem-usage", "-Werror=all-warnings"):
        assert flag in options
    assert "-fmad=false" in gate.FLAGS
