"""Load the compiled counted kernels and unpack what they return."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from ...base.counts import PRIMITIVES, Counts
from ...base.errors import BackendError
from ._tally import CountedRun


@cache
def kernels() -> Any:
    """Return the module ``dpkern._C.counted``.

    Raises:
        BackendError: the kernels are not compiled.
    """
    try:
        from dpkern import _C  # type: ignore[attr-defined, unused-ignore]
    except ImportError as error:
        raise BackendError(
            "counted execution",
            expected="the compiled kernels",
            got=str(error),
            remedy="Build with a C++17 compiler and cmake, or use the closed forms.",
        ) from error
    return _C.counted


def tallied(packed: tuple[Any, ...]) -> tuple[Any, CountedRun]:
    """Split a counted kernel's return value into its result and the tally."""
    result, exact, chance, flops, read, written = packed
    tally = CountedRun(
        counts=_counts(exact),
        random=_counts(chance),
        flops=flops,
        bytes_read=read,
        bytes_written=written,
    )
    return result, tally


def _counts(numbers: Sequence[int]) -> Counts:
    return Counts(dict(zip(PRIMITIVES, numbers, strict=True)))


@contextmanager
def open_cipher() -> Iterator[None]:
    """Count the generator's inner operations too, besides its words."""
    kernels().open_cipher(True)
    try:
        yield
    finally:
        kernels().open_cipher(False)


def addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the data pointers of these tensors."""
    return [tensor.data_ptr() for tensor in tensors]


def sizes(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the number of elements of each tensor."""
    return [tensor.numel() for tensor in tensors]
