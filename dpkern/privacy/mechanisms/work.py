"""The vocabulary in which mechanisms and release maps count their operations.

A mechanism that computes with tensors (learns from outputs, maps to release coordinates) books the
same operations with the ``OpAccount`` that it is given, in elements. ``dpkern.cost`` makes one,
prices it, and compares it with a counted execution; nothing here depends on how.
"""

from __future__ import annotations

from typing import Any, Protocol, Self

import torch


class OpAccount(Protocol):
    """An account of operations under one phase of a step.

    ``line`` says what an operation is for; equal lines add up. Primitives are those of
    ``dpkern.base.counts``: ``ADD=1`` is one addition for each element.
    """

    def under(self, phase: str) -> Self:
        """Return the same account, under another phase, one of ``dpkern.base.phase``."""

    def each(self, line: str, n: int, *, reads: int = 1, extra: int = 0, **primitives: int) -> None:
        """Count a result of n elements from ``reads`` tensors of n and ``extra`` other elements."""

    def converted(self, line: str, n: int, old: torch.dtype, new: torch.dtype) -> None:
        """Count n elements in another number format; nothing where it is the same."""

    def filled(self, line: str, n: int) -> None:
        """Count n elements of one value."""

    def gathered(self, line: str, n: int, places: int | None = None) -> None:
        """Count n elements from so many places. None stands for n places."""

    def scattered(self, line: str, places: int, values: int) -> None:
        """Count ``values`` elements to so many places."""

    def folded(self, line: str, n: int, results: int, *primitives: str) -> None:
        """Count n elements folded to so many results."""

    def read_out(self, line: str) -> None:
        """Count one number handed to the host."""

    def summed(self, line: str, n: int) -> None:
        """Count the sum of n elements, handed to the host."""

    def largest(self, line: str, n: int, k: int) -> None:
        """Count finding the k largest magnitudes of n, in order; the selection is modelled."""

    def chosen(self, line: str, n: int, k: int) -> None:
        """Count the same of values that are magnitudes already: the selection alone."""

    def multiplied(self, line: str, rows: int, inner: int, columns: int) -> None:
        """Count a product of matrices, modelled."""

    def counts(self, line: str, **primitives: int) -> None:
        """Count so many primitives, loads and stores included."""

    def op(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Count a call of one of dpkern's ops; tensors need only a shape and a dtype."""
