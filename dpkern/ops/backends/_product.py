"""Matrix products on the CPU: the compiled kernel, or torch's library where that is faster.

The library (MKL) keeps its AVX-512 products to Intel's processors. On others with these
instructions the kernel is about twice as fast. Processors with AMX multiply float32 numbers by
tiles of bfloat16 numbers (csrc/cpu/product_bfloat.cpp), in 0.6 to 0.8 of the library's time.
Everywhere else the library is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from ...base.dtypes import FLOATS
from ...base.kernel import Kernel
from ...base.schema import BoundCall
from ._extension import ISAS
from ._extension import compiled as extension

Dtypes = frozenset[torch.dtype]

_chosen: bool | None = None
"""The choice of ``use_own``."""


@cache
def _faster(isa: int) -> Dtypes:
    """Return of which dtypes the compiled kernel's products are faster with these instructions."""
    if ISAS[isa] == "amx" and extension().is_intel():
        return frozenset((torch.float32,))
    mkl: bool = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    wide = ISAS[isa].startswith("avx512") or ISAS[isa] == "amx"
    return frozenset(FLOATS if wide and mkl and not extension().is_intel() else ())


@cache
def _isa() -> Callable[[], int]:
    found: Callable[[], int] = extension().isa
    return found


def own() -> Dtypes:
    """Return of which dtypes products run in the compiled kernel."""
    if _chosen is None:
        return _faster(_isa()())
    return frozenset(FLOATS if _chosen else ())


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
        if x.dtype in own():
            return compiled.run(bound)
        with torch.no_grad():
            return x @ w if bias is None else torch.addmm(bias, x, w)

    def direct(*args: Any, **kwargs: Any) -> Any:
        if compiled.direct is not None and args and getattr(args[0], "dtype", None) in own():
            return compiled.direct(*args, **kwargs)
        return NotImplemented

    return Kernel(run, compiled.refuse, direct)
