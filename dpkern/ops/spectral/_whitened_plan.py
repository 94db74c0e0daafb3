"""Prepare norms of whitened coordinates that are made of retained bins: matrix and rounding errors.

With the coordinates ``y = M F`` of the taps F of ``h * R``, and ``Z = conj(D^) X^``,

    y_r = sum_k Re(A(r, k) Z(k))
    A(r, k) = sum_u M(r, u) w_k Gamma_k / PQ exp(2 pi i k.u / (P, Q))

so that neither the filter nor the taps are needed. The proof of the errors is in
``docs/spectral.md``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ._band import Array, Band
from ._plan import plan_of, reaches
from ._spectra import Grid, half_gains, parseval, transform_error
from .bins import crop_matrix, kept_bins

CHUNK = 16
"""Bins that the kernel adds up by themselves, ``kChunk`` in ``csrc/cpu/spectral_whitened.cpp``."""
_SPARE = 6
"""Roundings of a coordinate besides those of its sums: two of a product, one of a coefficient, one
where real and imaginary parts meet, and two to spare."""
_STORED = 8
"""Roundings of a bin between the transform and where it is stored: the sum of its two parts, the
turn to the map's corner, the conversion, and some to spare."""


@dataclass(frozen=True)
class WhitenedPlan:
    """The tables that the kernel reads besides the operands.

    Attributes:
        matrix: ``[r, K, 2]``, what Re Z and Im Z add to each coordinate.
        weights: ``[K]``, Parseval's: ``sum w |Z|^2`` is the squared norm of ``h * R`` if all gains
            are 1.
        stretch: the largest ``|| y || / || R ||``.
        product_error: of the coordinates, relative to the root of ``sum w |Z|^2``.
        x_error, g_error: of the bins, relative to the norm of their operand.
        share: ``sqrt(P' Q')`` of the grid of g.
    """

    matrix: Tensor
    weights: Tensor
    stretch: float
    product_error: float
    x_error: float
    g_error: float
    share: float


@dataclass(frozen=True)
class Matrix:
    """A matrix by its values, to compare.

    Attributes:
        rows: how many it has.
        values: its bytes, float64.
    """

    rows: int
    values: bytes

    @classmethod
    def of(cls, matrix: Tensor) -> Matrix:
        """Return the values of a matrix on the CPU."""
        return cls(len(matrix), matrix.numpy().tobytes())

    @property
    def array(self) -> Array:
        """The matrix."""
        found: Array = np.frombuffer(self.values).reshape(self.rows, -1)
        return found


def coordinate_matrix(
    matrix: Array, band: Band, kernel: tuple[int, int], dilation: tuple[int, int]
) -> Array:
    """Return ``[r, K, 2]`` float64, from Re Z and Im Z at the retained bins to coordinates."""
    parts = [matrix @ turn.numpy() for turn in crop_matrix(band, kernel, dilation)]
    return np.stack(parts, 2)


@lru_cache(maxsize=256)
def whitened_plan(matrix: Matrix, grid: Grid, band: Band, dtype: torch.dtype) -> WhitenedPlan:
    """Return the plan of a layer on its grid.

    Args:
        matrix: M.
        grid: of the layer, without a band.
        band: the filter.
        dtype: of the operands and of the arithmetic.
    """
    geometry = grid.layer.geometry
    kernel, dilation = ((1, *pair)[-2:] for pair in (geometry.kernel, geometry.dilation))
    table = coordinate_matrix(matrix.array, band, kernel, dilation)
    weights = parseval(grid.size)[kept_bins(band)]
    # In units in which the retained bins of R have their norm.
    scaled = table / np.sqrt(weights.numpy())[None, :, None]
    stretch, sizes = (
        _norm(scaled.reshape(len(table), -1)),
        _norm(np.hypot(*scaled.transpose(2, 0, 1))),
    )
    unit = torch.finfo(dtype).eps / 2
    bins = table.shape[1]
    roundings = 2 * CHUNK + -(-bins // CHUNK) + _SPARE
    product = roundings * unit / (1 - roundings * unit) * math.sqrt(2) * sizes
    # The table itself, in float64: angles of so many turns, and sums over taps.
    turns = sum(t * (k - 1) for k, t in zip(kernel, dilation, strict=True))
    rounded = 2.0**-51 * (matrix.array.shape[1] + 12 + 4 * math.pi * turns)
    rows = float(np.linalg.norm(np.abs(matrix.array).sum(1)) * half_gains(band).max())
    product += rounded * rows * math.sqrt(float(weights.sum()))
    x_error, g_error = _bin_errors(grid, dtype)
    return WhitenedPlan(
        matrix=torch.from_numpy(table),
        weights=weights,
        stretch=stretch,
        product_error=product * (1 + 2.0**-30),
        x_error=x_error,
        g_error=g_error,
        share=math.sqrt(math.prod(grid.folded)),
    )


def _norm(matrix: Array) -> float:
    """Return the spectral norm of a matrix, from above."""
    return float(np.linalg.norm(matrix, 2)) * (1 + 2.0**-30)


def _bin_errors(grid: Grid, dtype: torch.dtype) -> tuple[float, float]:
    """Return the errors of the bins of x and of g, relative to the norms of the maps."""
    if reaches(grid):
        made = plan_of(grid)
        wide = made.wide or dtype is torch.float64
        x_error, g_error = made.tables.errors.view(2, 2)[int(wide)].tolist()
    else:
        x_error = g_error = transform_error(dtype, grid.size)
    stored = _STORED * torch.finfo(dtype).eps / 2
    return (1 + x_error) * (1 + stored) - 1, (1 + g_error) * (1 + stored) - 1


__all__ = ["Matrix", "WhitenedPlan", "coordinate_matrix", "whitened_plan"]
