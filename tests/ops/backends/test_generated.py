"""What is declared once in Python, and made of it: C++ headers, lists of kernels, grids."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpkern.base import codes, laws, layouts
from dpkern.base.dtypes import by_dtype
from dpkern.base.rng import Stream
from dpkern.base.struct_types import Struct
from dpkern.ops import clip, coef
from dpkern.ops.backends import _bindings, _generated, _structs, _tables
from dpkern.ops.backends import _kernels as table
from dpkern.ops.ghost.conv import Geometry

ROOT = Path(__file__).resolve().parents[3]
FILES = {**_generated.headers(), **_generated.units(), **_bindings.files()}


def made_in(folder: Path) -> dict[str, str]:
    """What the build's script writes, with nothing but the standard library."""
    command = [sys.executable, "-I", "-S", str(ROOT / "csrc" / "generate.py"), str(folder)]
    subprocess.run(command, check=True)
    return {
        path.relative_to(folder).as_posix(): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_the_build_needs_no_installed_package_and_keeps_what_is_unchanged(tmp_path: Path) -> None:
    assert made_in(tmp_path) == FILES
    kept, changed = tmp_path / "core" / "layouts.h", tmp_path / "core" / "tables.h"
    changed.write_text("old")
    before = kept.stat().st_mtime_ns
    assert made_in(tmp_path) == FILES
    assert kept.stat().st_mtime_ns == before


def test_the_build_compiles_every_source_of_kernels() -> None:
    text = (ROOT / "CMakeLists.txt").read_text()
    (stems,) = re.findall(r"foreach\(stem ([^)]*)\)", text)
    assert stems.split() == _generated.sources()
    makefile = (ROOT / "Makefile").read_text()
    for name in ("codes", "layouts", "laws", "signature", "signature_reader", "struct_types"):
        assert f"dpkern/base/{name}.py" in text
        assert f"dpkern/base/{name}.py" in makefile
    assert "GLOB_RECURSE signatures CONFIGURE_DEPENDS dpkern/ops/*.py" in text
    assert "dpkern/ops/*.py dpkern/ops/*/*.py" in makefile


def test_the_border_is_wrapped() -> None:
    """The formatter would break some lists of arguments elsewhere."""
    assert max(map(len, FILES["bindings/ops.cpp"].splitlines())) <= 100


@pytest.mark.parametrize("name", [name for name in FILES if name != "bindings/ops.cpp"])
def test_generated_files_are_formatted(name: str, tmp_path: Path) -> None:
    program = shutil.which("clang-format", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("clang-format is not installed")
    done = subprocess.run(
        [program, f"--style=file:{ROOT / '.clang-format'}", f"--assume-filename={name}.cpp"],
        input=FILES[name],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == FILES[name]


def test_every_struct_and_code_is_declared_before_it_is_used() -> None:
    text = FILES["core/layouts.h"]
    for struct in layouts.STRUCTS:
        for field in struct.fields.values():
            used = field.name if isinstance(field, Struct) else field.cpp
            name = used.removeprefix("const ").rstrip("*")
            if f"struct {name} {{" in text or f"enum class {name} " in text:
                place = re.search(rf"(struct|enum class) {name} ", text)
                assert place is not None
                assert place.start() < text.index(f"struct {struct.name} {{")
    named = set(re.findall(r"enum class (\w+) :", text))
    assert {codes.name_of(kind) for kind in codes.CODES} == named


def test_codes_have_the_names_that_ops_know() -> None:
    assert tuple(laws.LAWS) == tuple(codes.words(codes.DISTRIBUTIONS))
    assert clip.STYLES == codes.STYLES.words
    assert coef.FORMS == codes.COEF_FORMS.words
    # torch.float is float32, and no code of a sum in the parameters' type.
    assert [str(dtype) for dtype in by_dtype(codes.SumType)] == ["torch.int32", "torch.int64"]


def plan(**fields: int) -> Any:
    """Of coefficients."""
    return _tables.one(layouts.COEF_PLAN, **fields)


def rows(batch: int, *columns: int) -> Any:
    """Of a list of tensors."""
    chunks = sum(-(-n // 4096) for n in columns)
    sizes = {"count": len(columns), "chunks": chunks, "columns": sum(columns)}
    return _tables.one(layouts.ROWS, rows=batch, **sizes)


GRIDS: list[tuple[table.CudaKernel, dict[str, Any], table.Grid]] = [
    (table.KEYSTREAM, {"blocks": 256}, 1),
    (table.KEYSTREAM, {"blocks": 257}, 2),
    # A block makes eight tiles of 512 coordinates.
    (table.DRAWS, {"first": 512, "n": 4096}, 1),
    (table.DRAWS, {"first": 513, "n": 4096}, 2),
    (table.DRAWS, {"first": 513, "n": 0}, 0),
    # A thread answers eight symbols, 256 threads 2048.
    (table.RANDOMIZE, {"first": 8, "n": 2048}, 1),
    (table.RANDOMIZE, {"first": 9, "n": 2048}, 2),
    (table.RANDOMIZE, {"first": 9, "n": 0}, 0),
    (table.PERTURB_TILE, {"plan": plan(rows=2, columns=2048)}, (1, 2)),
    (table.PERTURB_TILE, {"plan": plan(rows=2, columns=2048, linear=5)}, (2, 2)),
    (table.PERTURB_FLAT, {"plan": plan(rows=2, columns=2048)}, 2),
    # Whole rows of a window of 1536 terms, or a row that takes several.
    (table.QUADRATIC_TILE, {"plan": plan(rows=301, columns=14)}, 3),
    (table.QUADRATIC_FLAT, {"plan": plan(rows=3, columns=3100)}, 3),
    (table.QUADRATIC_FLAT, {"plan": plan(rows=3)}, 0),
    (table.UPDATE_TILE, {"plan": _tables.one(layouts.UPDATE_PLAN, pieces=9)}, 2),
    (table.UPDATE_FLAT, {"plan": _tables.one(layouts.UPDATE_PLAN, pieces=9)}, 9),
    (table.ADVANCE, {}, 1),
    (table.POWER, {"all": rows(3, 5, 4097)}, 9),
    (table.FACTOR, {"all": rows(9, 5)}, 3),
    (table.FACTOR, {"all": rows(9)}, 0),
    # Four blocks a chunk; short rows are split where there are 32 for each part.
    (table.SUM, {"all": rows(70, 40)}, (4, 2)),
    (table.SUM, {"all": rows(31, 40)}, (4, 1)),
    (table.SUM, {"all": rows(64000, 1024 * 1024)}, (1024, 1)),
    (table.SUM, {"all": rows(64000, 4096)}, (4, 204)),
    (table.SUM, {"all": rows(0, 40)}, (0, 1)),
    (table.COMBINE, {"all": rows(70, 40), "splits": 2}, 128),
    (table.CLIP_HELD, {"all": rows(2050, 40)}, 128),
    (table.CLIP_HELD, {"all": rows(90000, 40)}, 512),
    (table.COMBINE, {"all": rows(70, 40), "splits": 1}, 0),
    (table.REPAIR, {"all": rows(70, 40)}, 70),
    (table.REPAIR, {"all": rows(70, 0)}, 0),
    (table.SQUARE, {"batch": 5}, 2),
    (table.CLIP_FACTORS, {"batch": 129}, 2),
    (table.FEATURES_SUM, {"records": 1, "numbers": 257}, 2),
    (table.FEATURES_SUM, {"records": 0, "numbers": 257}, 0),
]


@pytest.mark.parametrize(
    ("kernel", "arguments", "grid"),
    GRIDS,
    ids=[f"{kernel.name}-{i}" for i, (kernel, *_) in enumerate(GRIDS)],
)
def test_grids(kernel: table.CudaKernel, arguments: dict[str, Any], grid: table.Grid) -> None:
    assert kernel.grid(**arguments) == grid


def test_rooms_of_clipping() -> None:
    def rooms(arithmetic: codes.Arithmetic, value: str) -> list[int]:
        return [*table.clip_rooms(rows(70, 40, 3), arithmetic, value).values()]

    assert rooms(codes.Arithmetic.norm_only, "float") == [8 * 140, 0, 0, 0]
    assert rooms(codes.Arithmetic.float, "double") == [8 * 140, 8 * 140, 0, 8 * 2 * 43]
    assert rooms(codes.Arithmetic.exact64, "float") == [8 * 140, 4 * 140, 8 * 140, 0]
    assert table.partial_sums(rows(31, 40), "double") == 0


@pytest.mark.parametrize("struct", layouts.STRUCTS, ids=lambda struct: struct.name)
def test_a_packed_struct_lies_as_numpy_reads_it(struct: Struct) -> None:
    assert struct.packer.size == _tables.dtype(struct).itemsize == struct.size


def test_a_stream_and_a_geometry_travel_as_their_structs() -> None:
    stream = Stream(bytes(range(32)), 5, 6, 12)
    assert _structs.BYTES["Stream"](stream) == _tables.stream(stream).tobytes()
    line = Geometry(
        batch=3,
        in_channels=4,
        out_channels=6,
        groups=2,
        input=(7,),
        output=(4,),
        kernel=(3,),
        stride=(2,),
        padding=(1,),
        dilation=(1,),
    )
    packed = np.frombuffer(_structs.BYTES["Geometry"](line), _tables.dtype(layouts.GEOMETRY))[0]
    assert (packed["batch"], packed["in_channels"], packed["out_channels"]) == (3, 4, 6)
    for name, plane in (("input", (1, 7)), ("stride", (1, 2)), ("padding", (0, 1))):
        assert packed[name].tolist() == plane
