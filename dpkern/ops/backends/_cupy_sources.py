"""The CUDA sources for compilation at run time: their place, names of kernels, options."""

from __future__ import annotations

from pathlib import Path

_NAMESPACE = "dpkern::cuda::"
_QUALIFIED = {
    **{law: f"dpkern::{law}" for law in ("Gaussian", "Laplace")},
    **{name: _NAMESPACE + name for name in ("Bfloat16", "Source")},
}


def expression(kernel: str) -> str:
    """Return the kernel's name for the run-time compiler, which knows no namespace."""
    name, _, types = kernel.partition("<")
    if not types:
        return _NAMESPACE + name
    each = types.removesuffix(">").split(", ")
    full = [_QUALIFIED.get(t, t) for t in each]
    return f"{_NAMESPACE}{name}<{', '.join(full)}>"


def sources() -> Path:
    """Return the folder ``csrc``: beside the package in a checkout, inside it where installed."""
    package = Path(__file__).resolve().parents[2]
    installed = package / "csrc"
    return installed if installed.is_dir() else package.parent / "csrc"


def options(folder: Path) -> tuple[str, ...]:
    """Return the options of the compiler. Fused products would change the noise."""
    return ("--std=c++17", f"-I{folder}", "--fmad=false")
