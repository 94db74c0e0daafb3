"""What the CUDA sources become, without a GPU: instructions, registers, memory.

nvcc turns a source into PTX, whose arithmetic must be the one that was written; ptxas turns that
into a kernel, whose registers and memory must stay within ``cuda_budgets.json``.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
_MADE = tempfile.TemporaryDirectory(prefix="dpkern-generated-")
GENERATED = Path(_MADE.name)
subprocess.run([sys.executable, ROOT / "csrc" / "generate.py", GENERATED], check=True)
SOURCES = sorted((GENERATED / "cuda").glob("*.cu"))
"""Each is a source of kernels with all its instances, as the build compiles it."""
FLAGS = ("-std=c++17", "-fmad=false", f"-I{ROOT / 'csrc'}", f"-I{GENERATED}")
BUDGETS = Path(__file__).with_name("cuda_budgets.json")
ARCHS = (75, 80, 86, 89, 90, 100)
EXACT = ("coef", "coef_descend", "coef_features", "noise", "symbols", "update", "update_mapped")
"""Sources whose bits are those of the CPU."""


def may_fuse(source: Path) -> bool:
    """Whether a source of ``SOURCES`` may ask for fused products."""
    return source.stem.removesuffix("_kernels") not in EXACT


FORBIDDEN = {
    "approximation": r"\.approx\b",
    "flush to zero": r"\.ftz\b",
    "contraction": r"\b(?:mul|add|sub|mad)\.f(?:32|64)\b",  # without .rn, ptxas may fuse them
    "local memory": r"\.local\b",
}
FUSED = r"\bfma\.rn\.f(?:32|64)\b"
"""Allowed where the source says fma(): float64 sums of squares, never in noise and update."""


@dataclass(frozen=True)
class Usage:
    """What one kernel needs per thread (registers, bytes of stack and spills) and per block."""

    registers: int
    stack: int
    spilled: int
    shared: int


def nvcc() -> str | None:
    """The compiler's path."""
    return shutil.which("nvcc")


def _run(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"{command[0]} failed:\n{result.stdout}{result.stderr}")
    return result.stdout + result.stderr


def ptx(source: Path, folder: Path, arch: int = 90, flags: tuple[str, ...] = FLAGS) -> Path:
    """The source's device code as PTX for a virtual architecture.

    Raises:
        RuntimeError: with what nvcc printed.
    """
    compiler = nvcc()
    assert compiler is not None
    out = folder / f"{source.stem}.{arch}.ptx"
    target = f"-arch=compute_{arch}"
    _run(compiler, "-ptx", target, "-Werror=all-warnings", *flags, str(source), "-o", str(out))
    return out


def findings(text: str, *, fused: bool) -> list[str]:
    """Forbidden instructions of a PTX text, each with its first line."""
    rules = FORBIDDEN if fused else FORBIDDEN | {"fused": FUSED}
    found = []
    for name, pattern in rules.items():
        match = re.search(rf"^.*{pattern}.*$", text, re.MULTILINE)
        if match is not None:
            found.append(f"{name}: {match.group().strip()}")
    return found


def usage(path: Path, arch: int = 90) -> dict[str, list[Usage]]:
    """What ptxas reports for every kernel of a PTX file, by the kernel's name without types.

    Raises:
        RuntimeError: with what ptxas printed.
    """
    compiler = nvcc()
    assert compiler is not None
    ptxas = shutil.which("ptxas", path=str(Path(compiler).resolve().parent))
    assert ptxas is not None
    log = _run(ptxas, "-v", f"-arch=sm_{arch}", str(path), "-o", str(path.with_suffix(".cubin")))
    kernels: dict[str, list[Usage]] = {}
    for entry in re.split(r"Compiling entry function ", log)[1:]:
        mangled = entry.split("'")[1]
        numbers = {
            key: sum(int(n) for n in re.findall(pattern, entry))
            for key, pattern in (
                ("registers", r"Used (\d+) registers"),
                ("stack", r"(\d+) bytes stack frame"),
                ("spilled", r"(\d+) bytes spill stores"),
                ("shared", r"(\d+) bytes smem"),
            )
        }
        kernels.setdefault(_base(mangled), []).append(Usage(**numbers))
    return kernels


def _base(mangled: str) -> str:
    """``_ZN6dpkern4cuda12draws_kernelINS_...`` -> ``draws_kernel``."""
    rest, name = mangled.removeprefix("_Z").removeprefix("N"), mangled
    while match := re.match(r"\d+", rest):
        size = int(match.group())
        name, rest = rest[match.end() :][:size], rest[match.end() + size :]
    return name


def budgets() -> dict[str, dict[str, int]]:
    """The most registers and shared bytes of every kernel."""
    found: dict[str, dict[str, int]] = json.loads(BUDGETS.read_text())
    return found


def excesses(kernels: dict[str, list[Usage]]) -> list[str]:
    """What exceeds its budget; stack and spills have none."""
    allowed, found = budgets(), []
    for name, versions in kernels.items():
        if name not in allowed:
            found.append(f"{name} has no budget")
            continue
        limit = {"stack": 0, "spilled": 0, **allowed[name]}
        for key, most in limit.items():
            worst = max(getattr(version, key) for version in versions)
            if worst > most:
                found.append(f"{name}: {key} {worst}, at most {most}")
    return found
