"""The CUDA sources as they are compiled at run time: kernels, their names there, and options."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from pathlib import Path

LAWS = ("Gaussian", "Laplace")
FLOATS = ("float", "double")
INTEGERS = ("std::int32_t", "std::int64_t")
BOOLS = ("false", "true")
SYMBOLS = ("std::uint8_t", *INTEGERS)
GRADS = (("float", "float"), ("double", "double"), ("Bfloat16", "float"))
"""Types of gradients, each with that of its factors and float sums."""


def _all(name: str, *choices: Iterable[str]) -> list[str]:
    return [f"{name}<{', '.join(types)}>" for types in product(*choices)]


def _sums(value: str) -> tuple[str, ...]:
    return (value, *INTEGERS)


KERNELS: dict[str, list[str]] = {
    "noise": [
        "keystream_kernel",
        *_all("draws_kernel", LAWS),
        "rounding_kernel",
        *_all("add_noise_integer_kernel", INTEGERS, LAWS),
        *_all("add_noise_float_kernel", FLOATS, LAWS),
    ],
    "symbols": _all("symbols_kernel", SYMBOLS),
    "coef": [
        *_all("perturb_tile_kernel", FLOATS),
        *_all("perturb_flat_kernel", FLOATS, BOOLS),
        *_all("quadratic_tile_kernel", FLOATS),
        *_all("quadratic_flat_kernel", FLOATS, BOOLS),
    ],
    "coef_features": [
        *_all("features_tile_kernel", FLOATS),
        *_all("features_flat_kernel", FLOATS, BOOLS),
        *_all("features_sum_kernel", FLOATS),
    ],
    "update": [
        "advance_kernel",
        *(f"update_flat_kernel<{t}, {t}, false>" for t in FLOATS),
        *(f"update_flat_kernel<{t}, {s}, true>" for t in FLOATS for s in _sums(t)),
        *(f"update_tile_kernel<{t}, {s}, {law}>" for t in FLOATS for s in _sums(t) for law in LAWS),
    ],
    "clip": [
        *_all("power_kernel", (g for g, _ in GRADS)),
        *_all("factor_kernel", FLOATS),
        *_all("combine_kernel", FLOATS),
        *(f"sum_kernel<{g}, {s}, {v}>" for g, v in GRADS for s in _sums(v)),
        *(f"repair_kernel<{g}, {s}, {v}>" for g, v in GRADS for s in INTEGERS),
    ],
    "explicit": [
        *_all("power_kernel", FLOATS),
        "square_kernel",
        *_all("clip_factors_kernel", FLOATS),
        *(f"sum_kernel<{t}, {t}, {t}>" for t in FLOATS),
        *_all("combine_kernel", FLOATS),
    ],
}
"""The kernels of each source that are launched from here."""

_NAMESPACE = "dpkern::cuda::"
_QUALIFIED = {"Gaussian": "dpkern::Gaussian", "Laplace": "dpkern::Laplace"}


def expression(kernel: str) -> str:
    """The kernel's name for the run-time compiler, which knows no namespace."""
    name, _, types = kernel.partition("<")
    if not types:
        return _NAMESPACE + name
    each = types.removesuffix(">").split(", ")
    full = [_QUALIFIED.get(t, _NAMESPACE + t if t == "Bfloat16" else t) for t in each]
    return f"{_NAMESPACE}{name}<{', '.join(full)}>"


def sources() -> Path:
    """The folder ``csrc``: beside the package in a checkout, inside it where it is installed."""
    package = Path(__file__).resolve().parents[2]
    installed = package / "csrc"
    return installed if installed.is_dir() else package.parent / "csrc"


def options(folder: Path) -> tuple[str, ...]:
    """Of the compiler. Fused products would change the noise."""
    return ("--std=c++17", f"-I{folder}", "--fmad=false")
