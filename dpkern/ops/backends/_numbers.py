"""Numbers that kernels take ready-made, rounded once and here, the same for every backend."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from ...base.laws import SCALE_CELLS, SCALE_UNITS

_FLOATS: dict[torch.dtype, Any] = {torch.float32: np.float32, torch.float64: np.float64}


@lru_cache(maxsize=4096)
def per_unit(scale: float, dtype: torch.dtype) -> float:
    """Return ``1 / u`` with ``u = scale / 2^20``, rounded down to ``dtype`` (C++: ``Lattice``)."""
    exact = SCALE_UNITS / scale
    number = _FLOATS[dtype]
    rounded = number(exact)
    below = rounded if float(rounded) <= exact else np.nextafter(rounded, number(0))
    return float(below)


def cell(scale: float, dtype: torch.dtype) -> float:
    """Return ``g = scale / 64``, rounded to ``dtype``."""
    return float(_FLOATS[dtype](scale / SCALE_CELLS))


@lru_cache(maxsize=4096)
def step(scale: float, gradient_scale: float, dtype: torch.dtype) -> float:
    """Return the factor of a released whole number in the update.

    This is ``scale / 64 * gradient_scale`` in float64, rounded to ``dtype``.
    """
    return rounded(scale / SCALE_CELLS * gradient_scale, dtype)


def rounded(x: float, dtype: torch.dtype) -> float:
    """Return the nearest number of ``dtype``."""
    with np.errstate(over="ignore"):
        return float(_FLOATS[dtype](x))


def bits(x: float) -> int:
    """Return the 64 bits of a float64, for languages that pass every float in single precision."""
    return int(np.float64(x).view(np.int64))
