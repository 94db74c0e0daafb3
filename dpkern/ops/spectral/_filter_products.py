"""Filter maps by three small matrix products, for bands whose gains are even in either frequency.

Rows are transformed at the kept frequencies ``kx`` alone; along columns the filter is then a real
Toeplitz matrix for each of them; and rows are transformed back:

    Y = 1/Q sum_kx w(kx) (T_kx X c_kx) c_kx^T + (T_kx X s_kx) s_kx^T,
    T_kx[i, j] = 1/P sum_ky Gamma(ky, kx) cos(2 pi ky (i - j) / P)

with cosines ``c`` and sines ``s`` of ``2 pi kx n / Q``.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ._band import Array, Band, half_weights
from ._lines import circle
from ._sizes import Axes

Tables = tuple[Tensor, Tensor, Tensor]
LONGEST = 144
"""Positions on an axis up to which products are not slower than a fast transform."""


def is_even(band: Band) -> bool:
    """Whether gains at ``(ky, kx)`` and ``(-ky, kx)`` are equal, on a plane of moderate size."""
    return band.kind != "authors_slice" and max(band.size) <= LONGEST and len(band.size) < 3


def _plane(band: Band) -> Array:
    return band.gains if band.gains.ndim == 2 else band.gains[None]


@lru_cache(maxsize=256)
def tables(band: Band, before: Axes, used: Axes, given: Axes, dtype: torch.dtype) -> Tables:
    """Return ``[2 kx, columns]``, ``[2 kx, rows, rows used]`` and ``[2 kx, columns used]``.

    Args:
        band: the filter.
        before: rows and columns of padding in front.
        used: rows and columns of the padded map that are wanted.
        given: rows and columns of the map without padding.
        dtype: of the maps.
    """
    gains = _plane(band)
    p, q = gains.shape
    half = gains[:, : q // 2 + 1]
    kept = np.flatnonzero(half.any(0))
    count = [min(n, max(0, u - b)) for n, u, b in zip(given, used, before, strict=True)]
    inputs = np.outer(kept, np.arange(count[1]) + before[1]) % q
    outputs = np.outer(kept, np.arange(used[1])) % q
    weights = half_weights(q)[kept, None] / q
    lags = (np.arange(used[0])[None] - np.arange(count[0])[:, None] - before[0]) % p
    response = circle(p)[0][np.outer(np.arange(p), np.arange(p)) % p].T @ half[:, kept] / p
    down = np.moveaxis(response[lags], -1, 0)
    made = (
        np.concatenate([table[inputs] for table in circle(q)]),
        np.concatenate([down, down]),
        np.concatenate([weights * table[outputs] for table in circle(q)]),
    )
    across, along, back = (torch.from_numpy(np.ascontiguousarray(t)).to(dtype) for t in made)
    return across, along, back


def filter_products(band: Band, before: Axes, used: Axes, given: Axes) -> int:
    """Return the products that ``multiplied`` takes for each map, with the sizes of ``tables``."""
    across, along, back = tables(band, before, used, given, torch.float32)
    rows, columns = along.shape[1], across.shape[1]
    return len(across) * (rows * columns + rows * used[0] + used[0] * back.shape[1])


def multiplied(x: Tensor, before: Axes, used: Axes, band: Band) -> Tensor:
    """Filter ``[B, C, height, width]`` on the CPU; return ``[B, C, *used]``."""
    given = x.shape[2], x.shape[3]
    across, along, back = tables(band, before, used, given, x.dtype)
    rows, columns = along.shape[1], across.shape[1]
    maps = x.shape[0] * x.shape[1]
    part = x[:, :, :rows, :columns].reshape(maps * rows, columns)
    lines = (across @ part.T).view(len(across), maps, rows)
    turned = torch.bmm(lines, along).view(len(across), maps * used[0])
    return (turned.T @ back).view(*x.shape[:2], *used)


__all__ = ["LONGEST", "filter_products", "is_even", "multiplied", "tables"]
