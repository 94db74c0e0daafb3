"""Filtered activations: with them a filtered kernel gradient is an ordinary one.

    (h * R)(u) = sum_a D(a) (h * Xp)(u + a)

so the *padded* input is filtered circularly on the mechanism's grid, its first rows and columns are
kept, and the layer's own weight gradient is taken with padding 0. Filtering the unpadded input and
padding afterwards is another, wrong map: rows of the padding are not zero after the filter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ...base.dispatch import op
from ...base.errors import InvalidInput
from ...base.signature import Operand, Sum
from .._products import exact
from ..ghost._bounds import of_sums
from ._band import Band
from ._sizes import Axes, axes, corner, planes
from ._spectra import half_gains, on, transformed

_CHUNK = 1 << 19
"""Numbers of a chunk's maps: its spectra stay in the cache."""
_DEVICE_CHUNK = 1 << 23
"""The same on a device: its spectra stay small beside the activations."""


def _check(x: Tensor, padding: Sequence[int], rows: Sequence[int], band: Band) -> None:
    if x.dim() not in (3, 4, 5):
        raise InvalidInput(
            "x",
            expected="shape [B, channels, *positions] with one to three spatial dimensions",
            got=str(list(x.shape)),
            remedy="Give the batch and channel dimensions first.",
        )
    _check_sizes("padding", padding, x.dim() - 2, 0)
    _check_sizes("rows", rows, x.dim() - 2, 1)
    grid, used = axes(band.size) if isinstance(band, Band) else (), axes(rows)
    if len(grid) != len(used) or any(n > size for n, size in zip(used, grid, strict=True)):
        raise InvalidInput(
            "band",
            expected=f"a Band on a grid of at least {used}",
            got=band,
            remedy="Make the band on the grid of this layer.",
        )


def _check_sizes(name: str, sizes: object, spatial: int, least: int) -> None:
    right = isinstance(sizes, (list, tuple)) and len(sizes) == spatial
    if not right or not all(type(n) is int and n >= least for n in sizes):  # type: ignore[attr-defined]
        raise InvalidInput(
            name,
            expected=f"ints >= {least}, one per spatial dimension",
            got=sizes,
            remedy="Pass those of the layer.",
        )


def read_places(x: Tensor, padding: Sequence[int], rows: Sequence[int]) -> Axes:
    """Return rows and columns of x that the filter takes: those up to the last that is used."""
    each = zip(axes(x.shape[2:]), axes(padding, 0), axes(rows), strict=True)
    return tuple(min(n, max(0, u - p)) for n, p, u in each)


@op(check=_check)
@torch.no_grad()
def filtered(
    x: Operand[Tensor, "B C *S"],
    *,
    padding: Sequence[int],
    rows: Sequence[int],
    band: Band,
) -> Sum[Tensor, "filtered: B C *R"]:
    """Filter the zero-padded input by the band; return its first rows and columns.

    Args:
        x: ``[B, C, *S]``, one to three spatial dimensions, float32, float64 or 16 bits, contiguous.
        padding: of the layer, one per spatial dimension.
        rows: rows and columns of the padded input that outputs use, ``s (Ho - 1) + t (d - 1) + 1``
            per spatial dimension; others are dropped before the filter.
        band: the filter on its grid, which holds these rows.

    Returns:
        ``[B, C, *rows]`` of the dtype of x (16 bits: float32), for ``ghost.conv_*`` with
        ``padding=0``. NaN and inf stay in their sample.

    Raises:
        InvalidInput: wrong type, shape, layout or sizes.
    """
    used, before = axes(rows), axes(padding, 0)
    maps = planes(x).to(of_sums(x.dtype))
    run = _separable if band.kind == "rectangle" else _transformed
    out = maps.new_empty(*maps.shape[:2], *used)
    chunk = _CHUNK if x.is_cpu else _DEVICE_CHUNK
    samples = max(1, chunk // max(1, maps.shape[1] * math.prod(used)))
    for begin in range(0, len(maps), samples):
        out[begin : begin + samples] = run(maps[begin : begin + samples], before, used, band)
    result: Tensor = out.view(*x.shape[:2], *rows)
    return result


def _transformed(x: Tensor, before: Axes, used: Axes, band: Band) -> Tensor:
    gains = on(x.device, half_gains, band).to(x.dtype)
    size = axes(band.size)
    maps = x.new_zeros(*x.shape[:2], *size)
    part = x[corner([max(0, n - p) for n, p in zip(used, before, strict=True)])]
    maps[corner(part.shape[2:], before)] = part
    spectra = transformed(maps).mul_(gains)
    out: Tensor = torch.fft.irfftn(spectra, s=size, dim=tuple(range(2, maps.dim())))
    return out[corner(used)]


def _separable(x: Tensor, before: Axes, used: Axes, band: Band) -> Tensor:
    """Filter by a rectangle, a product of filters: ``T_y X T_x^T``, no transform."""
    kind, given = exact(x.dtype, x.device), tuple(x.shape[2:])
    *deep, down, across = (
        on(x.device, _side, band, before, used, given, axis).to(kind) for axis in range(len(used))
    )
    taken = corner([side.shape[1] for side in (*deep, down, across)])
    found = down @ (x[taken].to(kind) @ across.T)
    for side in deep:
        found = (side @ found.flatten(3)).view(*x.shape[:2], *used)
    return found.to(x.dtype)


def _side(band: Band, before: Axes, used: Axes, given: Axes, axis: int) -> Tensor:
    return toeplitz(band, before, used, given)[axis]


@lru_cache(maxsize=256)
def toeplitz(band: Band, before: Axes, used: Axes, given: Axes) -> tuple[Tensor, ...]:
    """Return ``T[i, j] = h(i - j - padding)`` per axis, from given positions to the used rows."""
    gains = torch.tensor(band.gains, device="cpu")
    gains = gains[None] if gains.dim() == 1 else gains
    made = []
    for axis in range(gains.dim()):
        line = gains.movedim(axis, 0).flatten(1)[:, 0]
        response = torch.fft.ifft(line).real
        count = min(given[axis], max(0, used[axis] - before[axis]))
        lag = torch.arange(used[axis], device="cpu")[:, None]
        lag = lag - torch.arange(count, device="cpu")[None] - before[axis]
        made.append(response[lag % len(line)])
    return tuple(made)


__all__ = ["filtered", "read_places", "toeplitz"]
