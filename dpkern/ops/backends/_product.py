"""Matrix products on the CPU: the compiled kernel, or torch's library where that is faster.

The library (MKL) keeps its AVX-512 products to Intel's processors. On others with these
instructions the kernel is about twice as fast; everywhere else the library is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from ...base.kernel import Kernel
from ...base.schema import BoundCall
from ._extension import ISAS
from ._extension import compiled as extension

_chosen: bool | None = None
"""The choice of ``use_own``."""


@cache
def _is_faster(isa: int) -> bool:
    """Whether the compiled kernel is faster than the library with these instructions."""
    mkl: bool = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    return ISAS[isa].startswith("avx512") and mkl and not extension().is_intel()


def own() -> bool:
    """Whether products run in the compiled kernel."""
    return _is_faster(extension().isa()) if _chosen is None else _chosen


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
        if own():
            return compiled.run(bound)
        with torch.no_grad():
            return x @ w if bias is None else torch.addmm(bias, x, w)

    def direct(*args: Any, **kwargs: Any) -> Any:
        if own() and compiled.direct is not None:
            return compiled.direct(*args, **kwargs)
        return NotImplemented

    return Kernel(run, compiled.refuse, direct)
