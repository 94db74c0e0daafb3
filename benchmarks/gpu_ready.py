"""Check that a GPU machine can show anything: its device, our compiled kernels, the backends.

    python -m benchmarks.gpu_ready check [cuda,triton,cupy]
    python -m benchmarks.gpu_ready unpack FOLDER

A machine may be bare: without compiled kernels tests would be skipped, and nothing would have been
shown. ``check`` fails with one typed line and code 3 (no device) or 4 (something is missing).
``unpack`` takes the compiled module out of a wheel of exactly these sources, for this Python; code
1 where there is none. Not yet run on a GPU.
"""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
import zipfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

NO_DEVICE, NOT_READY = 3, 4
ROOT = Path(__file__).resolve().parents[1]
OPTIONAL = ("dp_accounting", "hypothesis", "opacus", "scipy")
"""Packages without which some tests and rows cannot run."""


def missing(wanted: Sequence[str]) -> tuple[int, str]:
    """Return ``(0, "")``, or the exit code and a line that says what is missing."""
    import torch

    if not torch.cuda.is_available():
        return NO_DEVICE, (
            "BackendError: GPU: expected a CUDA device and a CUDA build of torch, got torch "
            f"{torch.__version__} without a device. Run benchmarks/gpu.sh on a machine with a GPU; "
            "nothing was measured."
        )
    from dpkern.base import dispatch

    reasons = []
    for name in wanted:
        available, reason = dispatch.availability(name)
        if not available:
            reasons.append(f"{name} {reason}")
    if reasons:
        return NOT_READY, (
            f"BackendError: backends: expected {', '.join(wanted)}, got {'; '.join(reasons)}. "
            "Build or install what is missing, or ask for fewer with --backends; "
            "nothing was measured."
        )
    return 0, ""


def unpack(folder: Path) -> str:
    """Put the compiled module of a wheel beside the package; "" or the reason why not."""
    ending = sysconfig.get_config_var("EXT_SUFFIX")
    reason = f"{folder} holds no wheel of dpkern"
    for wheel in sorted(folder.glob("dpkern-*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            names = set(archive.namelist())
            if f"dpkern/_C{ending}" not in names:
                reason = f"{wheel.name} is for another Python than {ending}"
            elif not _same_sources(archive, names):
                reason = f"{wheel.name} was built of other sources"
            else:
                archive.extract(f"dpkern/_C{ending}", ROOT)
                return ""
    return reason


def _same_sources(archive: zipfile.ZipFile, names: set[str]) -> bool:
    packed = {n: archive.read(n) for n in names if n.startswith("dpkern/csrc/")}
    kinds = {".h", ".cpp", ".cuh", ".cu"}
    files = (f for f in (ROOT / "csrc").rglob("*") if f.suffix in kinds)
    return packed == {f"dpkern/{f.relative_to(ROOT)}": f.read_bytes() for f in files}


def report(wanted: Sequence[str]) -> str:
    """Return what is there, for the log."""
    torch = import_module("torch")
    gone = [name for name in OPTIONAL if importlib.util.find_spec(name) is None]
    lines = [
        f"ready: {torch.cuda.get_device_name()}, torch {torch.__version__}, {', '.join(wanted)}"
    ]
    if gone:
        lines.append(f"not installed: {', '.join(gone)}; tests that need them will fail")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Check or unpack."""
    given = sys.argv[1:] if argv is None else argv
    verb, what = (*given, "", "")[:2]
    if verb == "unpack":
        reason = unpack(Path(what))
        print(reason or "the compiled module comes from a wheel of these sources")
        return int(bool(reason))
    wanted = [name for name in what.split(",") if name]
    code, line = missing(wanted)
    if code:
        print(line, file=sys.stderr)
    elif wanted:
        print(report(wanted))
    return code


if __name__ == "__main__":
    raise SystemExit(main())
