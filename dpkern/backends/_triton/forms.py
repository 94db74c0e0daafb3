"""The forms in which kernels of linear layers and convolutions are compiled without a device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from . import direct, gram, weighted
from .launch import Aot
from .precision import SIXTEEN

_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int32: "*i32",
}
_TUPLES = {"sizes": 5, "a_strides": 3, "g_strides": 3, "geometry": 17}
_ALIGNED = (*(("sizes", i) for i in (1, 2)), *((f"{x}_strides", i) for x in "ag" for i in (0, 2)))
"""Of linear layers: features."""
_PARTS = dict.fromkeys(
    ("squares", "totals", "a_squares", "g_squares", "highs", "parts"), torch.float64
)


def _signature(
    kernel: Any, numbers: int, dense: bool = False, **pointers: torch.dtype
) -> dict[str, Any]:
    """Types of a kernel's arguments: known pointers, tuples, constants in capitals, and ints."""
    types: dict[str, Any] = {"numbers": ("fp32",) * numbers}
    types |= {name: ("i32",) * count for name, count in _TUPLES.items()}
    if dense:  # Triton knows ones
        types |= {f"{x}_strides": ("i32", "constexpr", "i32") for x in "ag"}
    every = {**_PARTS, "done": torch.int32, **pointers}
    types |= {name: _POINTERS[dtype] for name, dtype in every.items()}
    return {
        name: "constexpr" if name.isupper() else types.get(name, "i32") for name in kernel.arg_names
    }


def _tiled(kernel: Any, dense: bool, dtype: torch.dtype, like: Any, **more: Any) -> Aot:
    """A kernel over full tiles of products in ``dtype``, of operands ``like`` with many features (a
    multiple of 16) or channels."""
    sums = torch.float32 if like in SIXTEEN else like
    pointers = {"a": like, "g": like, "grads": sums, "factors": sums, "out": sums}
    constants: dict[Any, Any] = {**more}
    tile, most = direct.tile_of(dtype, dense, 1024, 1024), kernel is not weighted.positions_kernel
    settings = direct.constants(dense, dtype, tile, registers=dense or most)
    launched = {name: settings.pop(name) for name in ("warps", "stages", "fused")}
    launched["registers"] = settings.pop("maxnreg")
    signature = _signature(kernel, 0, dense, **pointers)
    if dense:
        constants |= {("a_strides", 1): 1, ("g_strides", 1): 1}
        launched["aligned"] = _ALIGNED
    return Aot(kernel, signature, {**settings, **constants}, **launched)


def tiled(dense: bool) -> Iterator[Aot]:
    """Norms, kept gradients and weighted sums; for 16-bit operands, bfloat16 stands for both."""
    for like in (torch.bfloat16, torch.float32, torch.float64):
        if like is not torch.float64:
            yield _tiled(direct.direct_kernel, dense, like, like, KEEP=False, SKIP=False)
        yield _tiled(direct.direct_kernel, dense, torch.float64, like, KEEP=False, SKIP=True)
        yield _tiled(direct.direct_kernel, dense, like, like, KEEP=True, SKIP=False)
        wide = torch.float32 if like in SIXTEEN else like
        yield _tiled(weighted.positions_kernel, dense, wide, like, WHOLE=False)
        if like in SIXTEEN:
            yield _tiled(weighted.samples_kernel, dense, like, like, WHOLE=True)


def small() -> Iterator[Aot]:
    """Those without tiles, and the Gram route."""
    constants: dict[str, Any] = {"SKIP": True, "BLOCK": direct.BLOCK}
    yield Aot(direct.bound_kernel, _signature(direct.bound_kernel, 10), constants, fused=True)
    for like in (torch.bfloat16, torch.float32):
        signature = _signature(gram.gram_kernel, 3, a=like, g=like)
        constants = {"SIDE": gram.MOST, "DEPTH": gram.DEPTH[like in SIXTEEN]}
        yield Aot(gram.gram_kernel, signature, constants, gram.WARPS, fused=True)
        signature = _signature(gram.rank_one_kernel, 0, a=like, g=like)
        yield Aot(gram.rank_one_kernel, signature, {"BLOCK": gram.BLOCK})
    signature = _signature(weighted.combine_kernel, 0, parts=torch.float32, out=torch.float32)
    yield Aot(weighted.combine_kernel, signature, {"BLOCK": weighted.BLOCK})
