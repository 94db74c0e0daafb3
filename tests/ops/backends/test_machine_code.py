"""Gates on the machine code of device kernels, made without a device.

Nothing is in local memory, nothing flushes denormal numbers, main loops load 16 bytes at a time and
take no more instructions for a value than they did.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import sass
from benchmarks.machine_code import Code
from benchmarks.sass_values import CASES, Case, per_value
from tests.ops.backends import cuda_gate as gate
from tests.ops.backends.triton_versions import VERSIONS, compiled, faults, missing

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(gate.nvcc() is None, reason="nvcc is not installed"),
    pytest.mark.skipif(missing("installed") is not None, reason="Triton ships the disassembler"),
]

MOST_INSTRUCTIONS = {
    "draws": 133,
    "add noise, int32": 136,
    "add noise, float32": 195,
    "add noise, a scale for each": 243,
    "update, Adam, int32 sums": 210,
    "update, Adam, float32 sums": 251,
    "update, Adam, int32 sums, ring": 155,
    "update, Adam, float32 sums, ring": 182,
    "clip and sum at one read, float32": 12.5,
    "clip and sum at one read, bfloat16": 14.5,
    "powers of rows, float32": 20,
    "powers of rows, bfloat16": 22.5,
    "weighted sum of rows, float32": 8.0,
    "weighted sum of rows, bfloat16": 10,
    "weighted sum of rows, bfloat16, exact": 21.5,
}
"""Of a thread for a value, as they are now and a little more: a rise must be wanted."""
ROOTS = ("MUFU", "FMUL", "FADD", "FFMA", "FCHK", "FSETP", "FSEL", "FMNMX", "F2I.FTZ.U32.TRUNC.NTZ")
"""Instructions of exact divisions and roots, which scale denormal numbers before they flush any;
the last one is of divisions of integers. PTX without any of them is asked for in ``cuda_gate``."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Binaries of the sources that the cases need."""
    made = tmp_path_factory.mktemp("cubins")
    wanted = {f"{case.source}_kernels" for case in CASES}
    for source in gate.SOURCES:
        if source.stem in wanted:
            gate.usage(gate.ptx(source, made))
    return made


def codes_of(source: str, folder: Path) -> list[Code]:
    return sass.disassembled(folder / f"{source}_kernels.90.cubin")


@pytest.mark.parametrize("source", sorted({case.source for case in CASES}))
def test_nothing_is_in_local_memory_or_flushed(source: str, folder: Path) -> None:
    codes = codes_of(source, folder)
    assert len(codes) > 5
    assert [code.name for code in codes if code.local] == []
    flushed = [line for code in codes for line in code.flushing]
    assert [line for line in flushed if not line.startswith(ROOTS)] == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_a_value_takes_no_more_instructions_than_it_did(case: Case, folder: Path) -> None:
    (code,) = (code for code in codes_of(case.source, folder) if case.symbol in code.name)
    pipes, _ = per_value(case, code)
    assert sum(pipes.values()) <= MOST_INSTRUCTIONS[case.title]
    assert sum(pipes.values()) > 0.8 * MOST_INSTRUCTIONS[case.title]  # else lower the gate


@pytest.mark.parametrize("version", VERSIONS)
def test_products_load_16_bytes_at_a_time(version: str) -> None:
    """At real shapes, a vocabulary of odd width among them, on the oldest Triton and the newest."""
    reason = missing(version)
    if reason is not None:
        pytest.skip(reason)
    calls = (
        r"^(linear_(norm|gradient|sum)-(wide|vocabulary)(-direct)?"
        r"|conv_(norm|gradient|sum)-(block|last))-bfloat16$"
    )
    found = compiled(version, "90", "--only", calls)
    assert found["failed"] == []
    loops = {(r["kernel"], r["call"]): r["loop"] for r in found["reports"] if r["loop"]}
    assert len(loops) == 12
    for (kernel, _), loop in loops.items():
        # A sum reads one factor for a whole chunk.
        assert loop["loads"].pop("4", 0) == (kernel == "samples_kernel")
    assert {name: loop["loads"] for name, loop in loops.items() if {*loop["loads"]} != {"16"}} == {}
    assert [name for name, loop in loops.items() if loop["local"]] == []
    assert all(loop["pipes"].get("tensor") for loop in loops.values())


@pytest.mark.parametrize("version", VERSIONS)
def test_products_of_the_frequency_domain_load_no_number_by_itself(version: str) -> None:
    """Where blocks and maps have widths that are multiples of 4; a sum reads one factor a term."""
    reason = missing(version)
    if reason is not None:
        pytest.skip(reason)
    calls = (
        r"^(circulant_(norm|sum|product)-(layer|wide|positions|grams)(-row)?"
        r"|spectral_(norm|bins|sum)-block)-float32$"
    )
    found = compiled(version, "90", "--only", calls)
    assert found["failed"] == []
    loops = {(r["kernel"], r["call"]): r["loop"] for r in found["reports"] if r["loop"]}
    assert {kernel for kernel, _ in loops} >= {
        "transform_kernel",
        "frequency_kernel",
        "inverse_kernel",
        "power_kernel",
        "square_kernel",
        "power_map_kernel",
    }
    for (_, call), loop in loops.items():
        wide = {"8", "16"} | ({"4"} if call.startswith("spectral_sum") else set())
        assert {*loop["loads"]} <= wide, call
        assert loop["local"] == 0, call
    assert all(
        loop["pipes"].get("tensor")
        for (kernel, _), loop in loops.items()
        if kernel == "power_kernel"
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_stored_gradients_of_float32_convolutions_are_made_on_tensor_cores(version: str) -> None:
    """In TF32, where torch may take it; not where it may not, and never for norms and sums."""
    reason = missing(version)
    if reason is not None:
        pytest.skip(reason)
    found = compiled(version, "90", "--only", r"^conv_(norm|gradient|sum)-(block|strict)-float32$")
    assert found["failed"] == []
    rounded = {r["call"]: r["tf32"] for r in found["reports"] if r["products"]}
    assert [call for call, tf32 in rounded.items() if tf32] == ["conv_gradient-block-float32"]
    assert {"conv_gradient-strict-float32", "conv_sum-block-float32"} <= {*rounded}
    (loop,) = (
        r["loop"]
        for r in found["reports"]
        if r["call"] == "conv_gradient-block-float32" and r["products"]
    )
    assert loop["pipes"].get("tensor")
    assert loop["local"] == 0


@pytest.mark.parametrize("version", VERSIONS)
def test_chained_sums_stay_in_registers_where_they_are_made(version: str) -> None:
    """Copies by hardware, and of each chunk a sample's place and factor: no other loads."""
    reason = missing(version)
    if reason is not None:
        pytest.skip(reason)
    found = compiled(version, "80", "90", "100", "--only", "^linear_sum-vit-(bfloat16|float16)$")
    assert found["failed"] == []
    made = {r["capability"]: r for r in found["reports"] if r["products"]}
    assert [made[arch]["kernel"] for arch in (80, 100)] == ["samples_kernel"] * 2
    report = made[90]
    assert report["kernel"] == "chained_kernel"
    assert (report["stack"], report["local"], report["loop"]["local"]) == (0, 0, 0)
    assert report["loop"]["loads"] == {"4": 2}
    assert report["loop"]["pipes"]["tensor"] == 16  # 2 times 64 rows, 4 steps, 2 accumulators
    assert report["loop"]["instructions"] < 490


@pytest.mark.parametrize("version", VERSIONS)
def test_norms_of_197_positions_stay_in_registers_where_programs_own_samples(version: str) -> None:
    """Rows are copied by hardware; before compute capability 9 the tiles are 128 x 128."""
    reason = missing(version)
    if reason is not None:
        pytest.skip(reason)
    calls = "^linear_norm(-vit-gram|s-vit)-(bfloat16|float16)$"
    found = compiled(version, "80", "90", "100", "--only", calls)
    assert found["failed"] == []
    made: dict[int, set[str]] = {}
    for report in found["reports"]:
        made.setdefault(report["capability"], set()).add(report["kernel"])
    assert "gram_tile_kernel" in made[80]
    assert "gram_samples_kernel" not in made[80]
    reports = [r for r in found["reports"] if r["kernel"] == "gram_samples_kernel"]
    forms = {(r["capability"], r["constants"]["LAYERS"]) for r in reports}
    assert forms == {(arch, layers) for arch in (90, 100) for layers in (1, 2)}
    assert faults(reports) == []
    for report in reports:
        assert report["loop"]["local"] == 0
        assert report["stack"] == 0 or version == "oldest"
        assert report["loop"]["loads"] == {}
        assert report["products"] == 12 * report["constants"]["LAYERS"]
        assert report["merged"] == 0


def test_scalar_loads_are_found() -> None:
    """A width below those that are filled up is read number by number."""
    found = compiled("installed", "90", "--only", "^linear_norm-narrow-direct-bfloat16$")
    (loop,) = (r["loop"] for r in found["reports"] if r["loop"])
    assert "2" in loop["loads"]
