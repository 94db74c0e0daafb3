"""Give compiled CPU kernels without the dispatcher to callers that check their operands once.

A kernel takes addresses of tensors and codes of options in the order of its op's signature, then
addresses of results, then sizes, and at last the number of threads
(``ops.backends._native.caller`` makes the same calls).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ..base import dispatch
from .backends._direct import connect
from .backends._extension import compiled, isa, load_extension, threads
from .backends._product import is_own as is_own_product
from .backends._product import own as own_products
from .backends._structs import BYTES, drawn_noise

runs_compiled = dispatch.runs_compiled
"""Whether nothing keeps calls of ops from the compiled kernels: the quick form of ``why_not``."""


def kernel(name: str, dtype: torch.dtype) -> Callable[..., Any]:
    """Return the compiled kernel ``name`` for operands of this dtype, float32 or float64."""
    found: Callable[..., Any] = getattr(compiled(), f"{name}_{str(dtype).removeprefix('torch.')}")
    return found


_FEWEST_POSITIONS, _NARROWEST, _WIDEST = 32, 64, 4096


def rounds_operands(positions: int, inputs: int, outputs: int) -> bool:
    """Whether integer sums of linear gradients are fastest with ``rounding="operands"``.

    Pairs of 16-bit integers multiply twice as fast as floats, but have to be made first. Tiles of
    bfloat16 numbers (AMX) are faster still. Entries of wide rows would be rounded to zero that are
    many and small, such as probabilities of rare tokens.
    """
    narrow, wide = min(inputs, outputs), max(inputs, outputs)
    if not (positions >= _FEWEST_POSITIONS and narrow >= _NARROWEST and wide <= _WIDEST):
        return False
    return dispatch.availability("cpu")[0] and isa() != "amx"


def look(name: str) -> Callable[..., Any] | None:
    """Return the compiled module's quick look of this name, which needs no kernels, or None."""
    found: Callable[..., Any] | None = getattr(load_extension(), name, None)
    return found


def replayed_step(dtype: torch.dtype, *, exact: bool) -> Any:
    """Return a new list of the calls of a step (``csrc/bindings/replay.cpp``), for one dtype.

    Its sums are int32 if ``exact``, else of the dtype.
    """
    return kernel("ReplayedStep", dtype)(exact)


def unchanged_tensors(tensors: list[torch.Tensor]) -> Any | None:
    """Return an object that tells whether tensors stay as they are (``bindings/unchanged.cpp``).

    None where C++ cannot see torch's tensors.
    """
    extension = compiled()
    if not connect(extension):
        return None
    return extension.UnchangedTensors(tensors, torch._C.DisableTorchFunctionSubclass)


def replayed_use(described: dict[str, Any]) -> Any | None:
    """Return a use of a replayed step as C++ takes it (``bindings/uses.cpp``).

    None where C++ cannot see torch's tensors.
    """
    extension = compiled()
    return extension.ReplayedUse(described) if connect(extension) else None


def sum_positions(g: torch.Tensor) -> torch.Tensor | None:
    """Return ``g [B, T, p]`` summed over T as replayed steps do, or None where torch has to."""
    if not _takes(g):
        return None
    g = g.contiguous()
    out = torch.empty((g.shape[0], g.shape[2]), dtype=g.dtype)
    kernel("sum_positions", g.dtype)(g.data_ptr(), out.data_ptr(), *g.shape, threads())
    return out


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor contiguous, without a graph if it is not so already.

    One whose channels are last in memory (``torch.channels_last``) is transposed by a kernel,
    several times as fast as torch copies it.
    """
    if tensor.is_contiguous():
        return tensor
    tensor = tensor.detach()
    rows, columns = math.prod(tensor.shape[2:]), tensor.shape[1] if tensor.dim() > 2 else 0
    if not columns or not tensor.movedim(1, -1).is_contiguous() or not _takes(tensor):
        return tensor.contiguous()
    out = torch.empty(tensor.shape, dtype=tensor.dtype)
    sizes = tensor.shape[0], rows, columns
    kernel("transpose_each", tensor.dtype)(tensor.data_ptr(), out.data_ptr(), *sizes, threads())
    return out


def _takes(tensor: torch.Tensor) -> bool:
    """Whether compiled kernels take this tensor, and nothing keeps it from them."""
    own = type(tensor) is torch.Tensor and tensor.device.type == "cpu"
    if not own or tensor.dtype not in (torch.float32, torch.float64) or tensor.is_neg():
        return False
    return dispatch.wanted_backend() in (None, "cpu") and dispatch.availability("cpu")[0]


def why_not() -> str | None:
    """Return the reason why calls of ops must go through the dispatcher now, or None."""
    if runs_compiled():
        return None
    if dispatch.observed():
        return "calls of ops are counted or timed"
    wanted = dispatch.wanted_backend()
    if wanted not in (None, "cpu"):
        return f"ops run on the backend {wanted}"
    available, reason = dispatch.availability("cpu")
    return None if available else f"the compiled backend {reason}"


__all__ = [
    "BYTES",
    "contiguous",
    "drawn_noise",
    "is_own_product",
    "kernel",
    "look",
    "own_products",
    "replayed_step",
    "replayed_use",
    "runs_compiled",
    "sum_positions",
    "threads",
    "unchanged_tensors",
    "why_not",
]
