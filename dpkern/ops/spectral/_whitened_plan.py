"""Prepare norms of whitened coordinates that are made of retained bins: matrix and rounding errors.

With the coordinates ``y = M F`` of the taps F of ``h * R``, the kernel's centre c, and
``Z = exp(2 pi i k.c / (P, Q)) conj(D^) X^``,

    y_r = sum_k Re(A(r, k) Z(k))
    A(r, k) = sum_u M(r, u) w_k Gamma_k / PQ exp(2 pi i k.(u - c) / (P, Q))

so that neither the filter nor the taps are needed. Only ``M^T M`` matters to the norm. Where it
does not mix taps that are even about the centre with odd ones, M is replaced by rows that are even,
whose A is real, and odd ones, whose A is imaginary: half the products. The proof of the errors is
in ``docs/spectral.md``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ._band import Array, Band
from ._lines import chained
from ._plan import plan_of, reaches
from ._sizes import Axes, axes
from ._spectra import Grid, half_gains, parseval, transform_error
from .bins import crop_matrix, kept_bins

CHUNK = 16
"""Bins that the kernel adds up by themselves, ``kChunk`` in ``csrc/cpu/spectral_whitened.cpp``."""
_SPARE = 12
"""Roundings of a coordinate besides those of its sums: two of a product, six of its turn to the
centre, one of a coefficient, one where real and imaginary parts meet, and two to spare."""
_MIXED = 2.0**-30
"""Largest cosine between even and odd parts that counts as none; the norm is raised by it."""
_STORED = 8
"""Roundings of a bin between the transform and where it is stored: the sum of its two parts, the
turn to the map's corner, the conversion, and some to spare."""


@dataclass(frozen=True)
class WhitenedPlan:
    """The tables that the kernel reads besides the operands.

    Attributes:
        even: ``[e, K]``, what Re Z adds to the first e coordinates.
        odd: ``[o, K]``, what Im Z adds to o coordinates from ``odd_from`` on.
        odd_from: e where the matrix has even and odd rows, else 0.
        turns: ``[K, 2]``, real and imaginary part of ``exp(2 pi i k.c / (P, Q))``.
        weights: ``[K]``, Parseval's: ``sum w |Z|^2`` is the squared norm of ``h * R`` if all gains
            are 1.
        stretch: the largest ``|| y || / || R ||``.
        product_error: of the coordinates, relative to the root of ``sum w |Z|^2``.
        x_error, g_error: of the bins, relative to the norm of their operand.
        share: ``sqrt(P' Q')`` of the grid of g.
    """

    even: Tensor
    odd: Tensor
    odd_from: int
    turns: Tensor
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


def halves(matrix: Array) -> tuple[Array, Array, float]:
    """Return even and odd rows with the norms of the matrix, and the cosine that they ignore.

    ``|| M F ||^2 <= (1 + cosine) (|| even F ||^2 + || odd F ||^2)``: M acts on F's even part as
    ``Q1 even`` and on its odd part as ``Q2 odd``, with orthonormal columns, and the cosine is
    ``|| Q1^T Q2 ||``.
    """
    taps = matrix.shape[1]
    centre = taps // 2
    unit = np.eye(taps)
    sums = (unit[: taps - centre] + unit[::-1][: taps - centre]) / math.sqrt(2)
    if taps % 2:
        sums[-1] /= math.sqrt(2)
    parts = [sums, (unit[:centre] - unit[::-1][:centre]) / math.sqrt(2)]
    factors = [np.linalg.svd(matrix @ part.T, full_matrices=False) for part in parts]
    rows, frames = [], []
    for part, (u, s, vt) in zip(parts, factors, strict=True):
        kept = s > 2.0**-45 * s.max(initial=0.0)
        rows.append(s[kept, None] * vt[kept] @ part)
        frames.append(u[:, kept])
    overlap = frames[0].T @ frames[1]
    cosine = float(np.linalg.norm(overlap, 2)) if overlap.size else 0.0
    return rows[0], rows[1], cosine


def _tables(
    matrix: Array, band: Band, kernel: Axes, dilation: Axes
) -> tuple[Array, Array, int, Array, float]:
    """Return the matrix of Re Z, that of Im Z, where its rows begin, the turns, and the cosine."""
    cosines, sines = (turn.numpy() for turn in crop_matrix(band, kernel, dilation))
    even, odd, cosine = halves(matrix)
    if cosine > _MIXED:
        still = np.stack([np.ones(cosines.shape[1]), np.zeros(cosines.shape[1])], 1)
        return matrix @ cosines, matrix @ sines, 0, still, 0.0
    kept = (index.numpy() for index in half_gains(band).nonzero(as_tuple=True))
    centre = [t * (k - 1) / 2 for k, t in zip(kernel, dilation, strict=True)]
    each = zip(kept, centre, axes(band.size), strict=True)
    angle = 2 * np.pi * np.sum([k * c / n for k, c, n in each], 0)
    c, s = np.cos(angle), np.sin(angle)
    # (a - i b) exp(-i angle), of which even rows keep the real part and odd ones the imaginary one.
    real, imaginary = cosines * c - sines * s, sines * c + cosines * s
    return even @ real, odd @ imaginary, len(even), np.stack([c, s], 1), cosine


@lru_cache(maxsize=256)
def whitened_plan(
    matrix: Matrix,
    grid: Grid,
    band: Band,
    dtype: torch.dtype,
    transforms: tuple[float, float] | None = None,
) -> WhitenedPlan:
    """Return the plan of a layer on its grid.

    Args:
        matrix: M.
        grid: of the layer, without a band.
        band: the filter.
        dtype: of the operands and of the arithmetic.
        transforms: errors of the transforms of x and of g. None takes those of the CPU's kernels.
    """
    geometry = grid.layer.geometry
    kernel, dilation = (axes(sizes) for sizes in (geometry.kernel, geometry.dilation))
    even, odd, odd_from, turns, cosine = _tables(matrix.array, band, kernel, dilation)
    weights = parseval(grid.size)[kept_bins(band)]
    rows = max(len(even), odd_from + len(odd))
    table = np.zeros((rows, len(weights), 2))
    table[: len(even), :, 0], table[odd_from : odd_from + len(odd), :, 1] = even, odd
    # In units in which the retained bins of R have their norm.
    scaled = table / np.sqrt(weights.numpy())[None, :, None]
    stretch = _norm(scaled.reshape(len(table), -1))
    sizes = _norm(np.hypot(scaled[:, :, 0], scaled[:, :, 1]))
    unit = torch.finfo(dtype).eps / 2
    roundings = CHUNK + 2 * -(-len(weights) // CHUNK) + _SPARE
    product = roundings * unit / (1 - roundings * unit) * math.sqrt(2) * sizes
    # The tables themselves, in float64: angles of so many turns, and sums over taps.
    taps, largest = matrix.array.shape[1], float(half_gains(band).max())
    most = sum(t * (k - 1) for k, t in zip(kernel, dilation, strict=True))
    rounded = 2.0**-49 * (taps + 12 + 4 * math.pi * most)
    lengths = float(np.linalg.norm(np.abs(matrix.array).sum(1)))
    product += rounded * lengths * largest * math.sqrt(taps * float(weights.sum()))
    # Rows that are left out, and products of even and odd coordinates.
    product += 2.0**-44 * _norm(matrix.array) * largest + cosine * stretch
    stored = _STORED * torch.finfo(dtype).eps / 2
    x_error, g_error = (
        chained(error, stored) for error in transforms or _transform_errors(grid, dtype)
    )
    return WhitenedPlan(
        even=torch.from_numpy(np.ascontiguousarray(even)),
        odd=torch.from_numpy(np.ascontiguousarray(odd)),
        odd_from=odd_from,
        turns=torch.from_numpy(turns),
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


def _transform_errors(grid: Grid, dtype: torch.dtype) -> tuple[float, float]:
    """Return the errors of the CPU's transforms of x and of g, relative to their norms."""
    if not reaches(grid):
        error = transform_error(dtype, grid.size)
        return error, error
    made = plan_of(grid)
    wide = made.wide or dtype is torch.float64
    x_error, g_error = made.tables.errors.view(2, 2)[int(wide)].tolist()
    return x_error, g_error


__all__ = ["Matrix", "WhitenedPlan", "halves", "whitened_plan"]
