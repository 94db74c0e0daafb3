"""Matrix products on the CPU: the compiled kernel, or torch's library where that is faster.

The library (MKL) keeps its best products to Intel's processors. On others the kernel is about twice
as fast with AVX-512, and as fast with AVX2, where matrices of weights of moderate size take it:
rows' bits do not depend on other rows then. Processors with AMX multiply float32 numbers by tiles
of bfloat16 numbers (csrc/cpu/product_bfloat.cpp), in 0.6 to 0.8 of the library's time. Everywhere
else the library is faster, but for small products, which take less time than its call.
The size of the matrix of weights decides, so that rows get the same bits in every number of rows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from ...base.dtypes import FLOATS
from ...base.kernel import Kernel
from ...base.schema import BoundCall
from ._extension import ISAS
from ._extension import compiled as extension

Largest = Mapping[torch.dtype, int]
"""The most weights of a matrix whose products run in the compiled kernel, by dtype."""

_ALL: Largest = dict.fromkeys(FLOATS, sys.maxsize)
_MODERATE: Largest = dict.fromkeys(FLOATS, 1 << 16)
_SMALL: Largest = dict.fromkeys(FLOATS, 1 << 10)
_NONE: Largest = {}

_chosen: bool | None = None
"""The choice of ``use_own``."""


@cache
def _faster(isa: int) -> Largest:
    """Return up to which size the compiled kernel's products are faster with these instructions."""
    if ISAS[isa] == "baseline":
        return _NONE
    if extension().is_intel():
        return {**_SMALL, torch.float32: sys.maxsize} if ISAS[isa] == "amx" else _SMALL
    if not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        return _SMALL
    return _MODERATE if ISAS[isa] == "avx2" else _ALL


@cache
def _isa() -> Callable[[], int]:
    found: Callable[[], int] = extension().isa
    return found


def own() -> Largest:
    """Return the most weights of matrices whose products run in the compiled kernel."""
    if _chosen is None:
        return _faster(_isa()())
    return _ALL if _chosen else _NONE


def is_own(dtype: torch.dtype, weights: int) -> bool:
    """Whether products with a matrix of so many weights run in the compiled kernel."""
    return weights <= own().get(dtype, -1)


@contextmanager
def use_own(wanted: bool) -> Iterator[None]:
    """Run products in the compiled kernel, or in torch's library, whichever is faster."""
    global _chosen
    before, _chosen = _chosen, wanted
    try:
        yield
    finally:
        _chosen = before


def matmul(compiled: Kernel) -> Kernel:
    """Run the compiled kernel of ``product.matmul``, or torch's library where that is faster."""

    def run(bound: BoundCall) -> Any:
        x, w, bias = bound.args
        if is_own(x.dtype, w.numel()):
            return compiled.run(bound)
        with torch.no_grad():
            return x @ w if bias is None else torch.addmm(bias, x, w)

    def direct(*args: Any, **kwargs: Any) -> Any:
        usual = len(args) > 1 and all(isinstance(each, torch.Tensor) for each in args[:2])
        if usual and compiled.direct is not None and is_own(args[0].dtype, args[1].numel()):
            return compiled.direct(*args, **kwargs)
        return NotImplemented

    return Kernel(run, compiled.refuse, direct)
