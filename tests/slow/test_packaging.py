"""The build and what it ships: contents of wheels and sdists, one version, and clear refusals."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import version as installed_version
from pathlib import Path

import pytest

import dpkern
from dpkern import _C
from tests.ops.backends import cuda_gate

ROOT = Path(__file__).resolve().parents[2]
AT_RUN_TIME = {"core", "cuda"}
"""Folders of ``csrc`` that CuPy compiles."""
EVERY_ARCH = " ".join(f"{arch}-real" for arch in cuda_gate.ARCHS)
STUB = """
#include <pybind11/pybind11.h>
PYBIND11_MODULE(_C, m) { m.attr("version") = DPKERN_VERSION; m.attr("cuda") = DPKERN_CUDA; }
"""
NO_BORDER = """
def files():
    return {"cpu/ops.h": "", "bindings/ops.cpp": ""}
"""


def files_below(folder: Path, *, but: frozenset[str] = frozenset({".so", ".pyc"})) -> set[str]:
    """The files of ``folder`` relative to its parent, without what a build or a run leaves."""
    return {
        file.relative_to(folder.parent).as_posix()
        for file in folder.rglob("*")
        if file.is_file() and file.suffix not in but and "__pycache__" not in file.parts
    }


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what a build reads, so that nothing is written into the checkout."""
    copy = tmp_path / "tree"
    ignore = shutil.ignore_patterns("*.so", "__pycache__")
    for name in ("dpkern", "csrc", "tests/native"):
        shutil.copytree(ROOT / name, copy / name, ignore=ignore)
    for name in ("setup.py", "pyproject.toml", "CMakeLists.txt", "MANIFEST.in", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    shutil.copy(ROOT / "README.md", copy)
    return copy


def run(
    command: list[str], *, cwd: Path, expect: int | None = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run, and check the exit status (``None``: anything but 0)."""
    result = subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    accepted = result.returncode != 0 if expect is None else result.returncode == expect
    assert accepted, result.stdout
    return result


def build(hook: str, tree: Path, **environment: str) -> Path:
    """Call a PEP 517 hook of setuptools, as pip does without build isolation."""
    out = tree.parent / "out"
    code = f"from setuptools import build_meta; build_meta.{hook}({str(out)!r})"
    run([sys.executable, "-c", code], cwd=tree, **environment)
    (built,) = out.iterdir()
    return built


def configure(tree: Path, *options: str, expect: int | None = 0, **environment: str) -> str:
    """CMake's configure step in a folder of its own; returns what it printed, unwrapped."""
    command = ["cmake", "-S", str(tree), "-B", str(tree.parent / "build"), *options]
    return " ".join(run(command, cwd=tree, expect=expect, **environment).stdout.split())


def test_one_version_everywhere() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+)?", dpkern.__version__)
    assert installed_version("dpkern") == dpkern.__version__
    assert _C.build_config()["version"] == dpkern.__version__
    title = "Unreleased" if "dev" in dpkern.__version__ else dpkern.__version__
    first = re.search(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first is not None
    assert first.group(1) == title


def test_build_config_names_what_was_built() -> None:
    config = _C.build_config()
    assert set(config) >= {"version", "compiler", "openmp", "detected_isa"}
    assert isinstance(config["openmp"], bool)
    assert config["cuda"] is (config["cuda_reason"] == "")
    assert config["cuda"] is (config["cuda_archs"] != "")


def test_every_test_but_the_long_proofs_is_in_one_of_the_two_jobs() -> None:
    expressions = re.findall(r'\$\(PYTEST\) -m "(.*)"', (ROOT / "Makefile").read_text())
    assert len(expressions) == 2
    for slow in (True, False):
        marks = {"slow": slow, "evidence": False}
        assert sum(eval(expression, marks) for expression in expressions) == 1
        marks = {"slow": slow, "evidence": True}
        assert not any(eval(expression, marks) for expression in expressions)
    jobs = dict(re.findall(r'^(gate|slow)="(.*)"$', (ROOT / ".ci" / "run").read_text(), re.M))
    assert "test" in jobs["gate"].split()
    assert "test-slow" in jobs["slow"].split()


def test_setup_imports_only_setuptools_and_the_standard_library() -> None:
    imported = set()
    for node in ast.walk(ast.parse((ROOT / "setup.py").read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            imported.add(node.module.split(".")[0])
    assert imported - sys.stdlib_module_names == {"setuptools"}


def test_extension_links_neither_torch_nor_python() -> None:
    linked = run(["ldd", _C.__file__], cwd=ROOT).stdout
    assert "libstdc++" in linked
    for library in ("libtorch", "libc10", "libpython", "libcudart"):
        assert library not in linked


def test_constraints_pin_every_requirement_exactly() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    requirements = [
        *project["build-system"]["requires"],
        *project["project"]["dependencies"],
        *extras["plot"],
        *extras["data"],
        *extras["dev"],
    ]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins)
    pinned = [re.sub(r"[-_.]+", "-", pin.split("==")[0]).lower() for pin in pins]
    assert len(pinned) == len(set(pinned))
    wanted = {re.split(r"[<>=\[]", requirement)[0] for requirement in requirements}
    assert wanted <= set(pinned)


@pytest.mark.slow
def test_pure_wheel_holds_the_package_and_the_kernel_sources(tree: Path) -> None:
    wheel = build("build_wheel", tree, DPKERN_NATIVE="off", PATH="")
    assert wheel.name == f"dpkern-{dpkern.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(f"dpkern-{dpkern.__version__}.dist-info/METADATA").decode()
    kernels = {
        f"dpkern/{name}"
        for name in files_below(ROOT / "csrc")
        if Path(name).parent.name in AT_RUN_TIME
    }
    assert "dpkern/csrc/core/chacha.h" in kernels
    assert {n for n in names if n.startswith("dpkern/")} == (
        files_below(ROOT / "dpkern") | kernels | {"dpkern/base/commit.txt"}
    )
    assert "License-Expression: Apache-2.0" in metadata


@pytest.mark.slow
def test_sdist_can_build_the_kernels(tree: Path) -> None:
    sdist = build("build_sdist", tree)
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names >= files_below(ROOT / "csrc") | files_below(ROOT / "dpkern")
    assert names >= {"setup.py", "pyproject.toml", "CMakeLists.txt", "LICENSE", "README.md"}
    assert names >= {f"tests/{name}" for name in files_below(ROOT / "tests" / "native")}


@pytest.mark.slow
def test_native_wheel_holds_the_extension(tree: Path) -> None:
    for source in (tree / "csrc").glob("*/*.cpp"):
        source.write_text("")  # only the packaging is tested here: compile next to nothing
    (tree / "csrc" / "bindings" / "module.cpp").write_text(STUB)
    (tree / "dpkern" / "ops" / "backends" / "_bindings.py").write_text(NO_BORDER)
    wheel = build("build_wheel", tree, DPKERN_CUDA="off")
    assert "none-any" not in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        (extension,) = (n for n in archive.namelist() if n.endswith(".so"))
        archive.extract(extension, tree.parent)
    assert re.fullmatch(r"dpkern/_C\.cpython-\d+-[\w-]+\.so", extension)
    code = (
        "import importlib.util as u; "
        f"spec = u.spec_from_file_location('_C', {str(tree.parent / extension)!r}); "
        "module = u.module_from_spec(spec); spec.loader.exec_module(module); "
        "print(module.version, module.cuda)"
    )
    assert run([sys.executable, "-c", code], cwd=tree).stdout.split() == [dpkern.__version__, "0"]


@pytest.mark.slow
def test_cuda_on_without_nvcc_is_refused(tree: Path) -> None:
    printed = configure(tree, "-DDPKERN_CUDA=on", expect=None, CUDACXX="/nonexistent/nvcc")
    assert "DPKERN_CUDA=on: expected nvcc on PATH or in CUDACXX, found none." in printed


@pytest.mark.slow
def test_cuda_auto_without_nvcc_builds_for_the_cpu_and_says_why(tree: Path) -> None:
    python = f"-DPython_EXECUTABLE={sys.executable}"
    printed = configure(tree, "-DDPKERN_CUDA=auto", python, CUDACXX="/nonexistent/nvcc")
    assert "CUDA 0 nvcc was not found when dpkern was built" in printed


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize(
    ("asked", "named"), [("80-real;90-real", "80-real 90-real"), ("", f"{EVERY_ARCH} 100-virtual")]
)
def test_cuda_architectures(tree: Path, asked: str, named: str) -> None:
    python = f"-DPython_EXECUTABLE={sys.executable}"
    printed = configure(tree, "-DDPKERN_CUDA=on", f"-DDPKERN_CUDA_ARCHS={asked}", python)
    assert f"CUDA 1 {named}" in printed


def flags(tree: Path, *options: str) -> str:
    """Every compiler command of a configured build."""
    python = f"-DPython_EXECUTABLE={sys.executable}"
    configure(tree, "-DDPKERN_CUDA_ARCHS=90-real", python, *options)
    return (tree.parent / "build" / "compile_commands.json").read_text()


@pytest.mark.slow
def test_warnings_are_errors_only_if_asked_for(tree: Path) -> None:
    assert "-Werror" not in flags(tree)
    assert "-Wconversion -Wno-psabi -Werror" in flags(tree, "-DDPKERN_WERROR=on")


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("test", ["DPKERN_WERROR=on", "-DDPKERN_WERROR=on"]),
        ("sanitize", ["DPKERN_WERROR=on", "-DDPKERN_WERROR=on", "-DDPKERN_WERROR=on"]),
        ("demo", ["DPKERN_WERROR=off"]),
    ],
)
def test_contributors_build_without_warnings_and_users_need_not(
    target: str, said: list[str], tmp_path: Path
) -> None:
    for name in ("Makefile", "pyproject.toml", "setup.py", "constraints.txt", "CMakeLists.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "dpkern" / "base").mkdir(parents=True)
    shutil.copy(ROOT / "dpkern" / "base" / "version.py", tmp_path / "dpkern" / "base")
    inherited = {name: value for name, value in os.environ.items() if name != "DPKERN_WERROR"}
    command = ["make", "--dry-run", target]
    printed = subprocess.run(
        command, cwd=tmp_path, env=inherited, text=True, capture_output=True, check=True
    ).stdout
    assert re.findall(r"\S*DPKERN_WERROR=\w+", printed) == said
    assert "export DPKERN_WERROR=on" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.slow
def test_unknown_cuda_value_is_refused(tree: Path) -> None:
    printed = configure(tree, "-DDPKERN_CUDA=maybe", expect=None)
    assert "DPKERN_CUDA: expected auto, on or off, got 'maybe'." in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("DPKERN_NATIVE", "on or off"),
        ("DPKERN_CUDA", "auto, on or off"),
        ("DPKERN_WERROR", "off or on"),
    ],
)
def test_unknown_build_setting_is_refused(tree: Path, name: str, choices: str) -> None:
    command = [sys.executable, "setup.py", "build_ext"]
    printed = run(command, cwd=tree, expect=None, **{name: "maybe"}).stdout
    assert f"{name}: expected {choices}, got 'maybe'." in printed
    assert not (tree / "build").exists()


@pytest.mark.slow
def test_missing_cmake_is_named_with_the_remedy(tree: Path) -> None:
    code = (
        "import runpy, shutil, sys; shutil.which = lambda *args, **kwargs: None; "
        "sys.argv = ['setup.py', 'build_ext']; runpy.run_path('setup.py')"
    )
    printed = run([sys.executable, "-c", code], cwd=tree, expect=None).stdout
    assert "cmake: expected an installed command, found none." in printed
    assert "DPKERN_NATIVE=off" in printed
