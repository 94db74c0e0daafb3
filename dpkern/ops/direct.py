"""Compiled CPU kernels without the dispatcher, for callers that have checked their operands once.

A kernel takes addresses of tensors and codes of options in the order of its op's signature, then
addresses of results, then sizes, and at last the number of threads
(``ops.backends._native.caller`` makes the same calls).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..base import dispatch
from .backends._direct import connect
from .backends._extension import compiled, threads
from .backends._product import own as own_products
from .backends._structs import BYTES


def kernel(name: str, dtype: torch.dtype) -> Callable[..., Any]:
    """The compiled kernel of this function for float32 or float64 operands."""
    found: Callable[..., Any] = getattr(compiled(), f"{name}_{str(dtype).removeprefix('torch.')}")
    return found


def replayed_step(dtype: torch.dtype) -> Any:
    """A new list of the calls of a step (``csrc/bindings/replay.cpp``) in float32 or float64."""
    return kernel("ReplayedStep", dtype)()


def unchanged_tensors(tensors: list[torch.Tensor]) -> Any | None:
    """What tells whether these are where they are now (``csrc/bindings/unchanged.cpp``).

    None where C++ cannot see torch's tensors.
    """
    extension = compiled()
    return extension.UnchangedTensors(tensors) if connect(extension) else None


def few_positions() -> int:
    """Up to how many positions a replayed step sums the gradients of a bias by itself."""
    most: int = compiled().most_positions
    return most


def why_not() -> str | None:
    """Why calls of ops are to go through the dispatcher now, or None."""
    if dispatch.observed():
        return "calls of ops are counted or timed"
    wanted = dispatch.wanted_backend()
    if wanted not in (None, "cpu"):
        return f"ops run on the backend {wanted}"
    available, reason = dispatch.availability("cpu")
    return None if available else f"the compiled backend {reason}"


__all__ = [
    "BYTES",
    "few_positions",
    "kernel",
    "own_products",
    "replayed_step",
    "threads",
    "unchanged_tensors",
    "why_not",
]
