"""Keep norms, factors and explicit gradients of a program at fixed addresses.

There is room for the largest batch so far, so that smaller batches (Poisson draws) move nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNED = 16
"""The alignment in numbers: a cache line of float32."""


class Memory:
    """Memory for the values of every sample between the backward pass and the close.

    Args:
        squares: number of squared norms of each sample.
        groups: number of clip groups, each with norms and factors of its own.
        shapes: shapes of the explicit gradients of one sample, in their order.
        dtype: dtype of these gradients and of the clip factors.
    """

    def __init__(
        self, squares: int, groups: int, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype
    ) -> None:
        self._squares, self._groups = squares, groups
        self._shapes = list(shapes)
        self._sizes = [math.prod(shape) for shape in shapes]
        self._dtype = dtype
        self.room = 0
        """The number of samples that there is room for."""

    def make_room(self, batch: int) -> bool:
        """Make room for so many samples; return whether everything had to move."""
        if batch <= self.room:
            return False
        self.room = batch
        self._starts = [0]
        for size in self._sizes:
            self._starts.append(self._starts[-1] + -(-batch * size // _ALIGNED) * _ALIGNED)
        self._all_squares = torch.empty((self._squares, batch), dtype=torch.float64)
        self._rows = torch.empty(self._starts[-1], dtype=self._dtype)
        self._factors = torch.empty((self._groups, batch), dtype=self._dtype)
        self._norms = torch.empty((self._groups, batch), dtype=torch.float64)
        return True

    def square_address(self, number: int) -> int:
        """Return the address of the squared norms of this number."""
        return self._all_squares.data_ptr() + 8 * self.room * number

    def squares(self, number: int, batch: int) -> Tensor:
        """Return the squared norms of this number, float64 ``[batch]``."""
        return self._all_squares[number, :batch]

    def rows_address(self, number: int) -> int:
        """Return the address of the explicit gradients of this number."""
        return self._rows.data_ptr() + self._dtype.itemsize * self._starts[number]

    def rows(self, number: int, batch: int) -> Tensor:
        """Return the explicit gradients of this number, ``[batch, *shape]``."""
        start = self._starts[number]
        flat = self._rows[start : start + batch * self._sizes[number]]
        return flat.view(batch, *self._shapes[number])

    def factors(self, batch: int) -> Tensor:
        """Return the clip factors, ``[groups, batch]``."""
        return self._factors[:, :batch]

    def norms(self, batch: int) -> Tensor:
        """Return the norms of the samples, float64 ``[groups, batch]``."""
        return self._norms[:, :batch]
