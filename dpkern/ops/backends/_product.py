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

from ...base.dispatch import Kernel
from ...base.schema import Bound
from ._extension import compiled as extension
from ._extension import isa

_chosen: bool | None = None
"""What ``use_own`` asks for."""


@cache
def _library_is_narrow() -> bool:
    mkl: bool = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    return mkl and not extension().is_intel()


def own() -> bool:
    """Whether products run in the compiled kernel."""
    if _chosen is not None:
        return _chosen
    return isa().startswith("avx512") and _library_is_narrow()


@contextmanager
def use_own(wanted: bool) -> Iterator[None]:
    """Products in the compiled kernel, or in torch's library, whichever is faster."""
    global _chosen
    before, _chosen = _chosen, wanted
    try:
        yield
    finally:
        _chosen = before


def matmul(compiled: Kernel) -> Kernel:
    """The compiled kernel of ``product.matmul``, or torch's library where that is faster."""

    def run(bound: Bound) -> Any:
        x, w, bias = bound.args
        if own() and x.shape[1]:
            return compiled.run(bound)
        with torch.no_grad():
            return x @ w if bias is None else torch.addmm(bias, x, w)

    return Kernel(run, compiled.refuse)
