"""Build dpkern: CMake compiles ``dpkern._C``, setuptools packs it. Nothing here imports torch.

Environment variables of the build (unset = the first value):

* ``DPKERN_NATIVE=on|off``: ``off`` installs pure Python, no compiler needed.
* ``DPKERN_CUDA=auto|on|off``: ``on`` fails where there is no nvcc.
* ``DPKERN_CUDA_ARCHS=``: for these only, such as ``90-real``; empty: for every supported GPU.
* ``DPKERN_WERROR=off|on``: ``on`` makes warnings errors, as contributors and CI want them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
COMPILED_AT_RUN_TIME = ("core/*.h", "cuda/*.h", "cuda/*.cuh", "cuda/*.cu")
"""The sources of ``csrc`` that CuPy compiles where dpkern is installed."""


def setting(name: str, choices: tuple[str, ...]) -> str:
    """The environment variable, one of ``choices``, the first by default."""
    value = os.environ.get(name, "") or choices[0]
    if value.lower() not in choices:
        raise SystemExit(
            f"{name}: expected {', '.join(choices[:-1])} or {choices[-1]}, got {value!r}."
        )
    return value.lower()


def find_cmake() -> str:
    """cmake from PATH or from the environment that runs this build."""
    scripts = sysconfig.get_path("scripts")
    cmake = shutil.which("cmake") or shutil.which("cmake", path=scripts)
    if cmake is None:
        raise SystemExit(
            "cmake: expected an installed command, found none. Install it (apt-get install cmake, "
            "or pip install cmake), or set DPKERN_NATIVE=off for pure Python without kernels."
        )
    return cmake


def commit() -> str:
    """Return the commit that is built, ``-dirty`` if files differ; empty outside a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    if not (ROOT / ".git").exists():
        return ""
    try:
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


class BuildSources(build_py):
    """Pure Python, and the CUDA sources for the backend that compiles them at run time."""

    def run(self) -> None:
        if not self.editable_mode:
            # A build folder outlives the files that were removed or renamed since.
            shutil.rmtree(Path(self.build_lib) / "dpkern", ignore_errors=True)
        super().run()
        if not self.editable_mode:
            for target, source in self.native_sources().items():
                self.mkpath(str(target.parent))
                self.copy_file(str(source), str(target))
            self.commit_file.write_text(commit() + "\n")

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        outputs = super().get_outputs(include_bytecode)
        if self.editable_mode:
            return outputs
        return [*outputs, *map(str, self.native_sources()), str(self.commit_file)]

    @property
    def commit_file(self) -> Path:
        """Name the file that ``dpkern.base.commit`` reads."""
        return Path(self.build_lib) / "dpkern" / "base" / "commit.txt"

    def native_sources(self) -> dict[Path, Path]:
        """Target below the build folder -> file of ``csrc``."""
        package = Path(self.build_lib) / "dpkern"
        found = (f for pattern in COMPILED_AT_RUN_TIME for f in (ROOT / "csrc").glob(pattern))
        return {package / f.relative_to(ROOT): f for f in sorted(found)}


class BuildKernels(build_ext):
    """Configure and build with CMake, in a folder that survives: rebuilds are incremental."""

    def build_extension(self, ext: Extension) -> None:
        cmake = find_cmake()
        config = "Debug" if self.debug else "Release"
        tag = f"{sys.implementation.cache_tag}-{sysconfig.get_platform()}"
        folder = ROOT / "build" / f"cmake-{tag}-{config.lower()}"
        werror = setting("DPKERN_WERROR", ("off", "on"))
        configure = [
            cmake,
            *("-S", str(ROOT), "-B", str(folder)),
            f"-DCMAKE_BUILD_TYPE={config}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DDPKERN_CUDA={setting('DPKERN_CUDA', ('auto', 'on', 'off'))}",
            f"-DDPKERN_CUDA_ARCHS={os.environ.get('DPKERN_CUDA_ARCHS', '')}",
            f"-DDPKERN_WERROR={werror}",
        ]
        jobs = str(self.parallel or os.cpu_count() or 1)
        for command in (configure, [cmake, "--build", str(folder), "--parallel", jobs]):
            result = subprocess.run(command, check=False)
            if result.returncode != 0:
                remedy = "; DPKERN_WERROR=off lets warnings pass" if werror == "on" else ""
                raise SystemExit(
                    f"The native build failed (messages above{remedy}): {' '.join(command)}"
                )
        target = Path(self.get_ext_fullpath(ext.name))
        self.mkpath(str(target.parent))
        self.copy_file(str(folder / target.name), str(target))


native = setting("DPKERN_NATIVE", ("on", "off")) == "on"
setup(
    ext_modules=[Extension("dpkern._C", sources=[])] if native else [],
    cmdclass={"build_py": BuildSources, "build_ext": BuildKernels},
)
