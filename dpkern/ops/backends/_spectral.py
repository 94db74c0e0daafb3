"""Spectral ops on the CPU: torch's transforms, a few samples at a time, and the compiled kernels
that take their spectra while they are in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..ghost import explicit
from ..spectral import bins
from ..spectral._band import Band
from ..spectral._sizes import Layer
from ..spectral._spectra import Grid, parseval, transform_error
from ..spectral.filter import filtered
from . import _ghost_dense
from . import cpu as _cpu  # used when called: cpu imports this module to register it
from ._spectra import chunks, constant, room

_CHUNK = 1 << 20
"""Bytes of a chunk's spectra, which stay in the second cache."""


def _refuse(x: torch.Tensor, *_: Any, **__: Any) -> str | None:
    return _cpu._on_cpu(x) or _ghost_dense.not_wide(x)


def _powers(spectra: torch.Tensor, groups: int, out: torch.Tensor) -> None:
    batch, channels, points = spectra.shape
    kind = spectra.real.dtype
    sizes = batch, groups, channels // groups, points
    _ghost_dense._call("spectral_powers", kind, spectra, *sizes, out)


def _squares(grid: Grid, powers: list[torch.Tensor], eta: float) -> torch.Tensor:
    x_powers, g_powers = powers
    batch, groups = x_powers.shape[:2]
    squares = torch.empty(batch, dtype=torch.float64)
    index = grid.index
    _cpu._C.spectral_squares(
        x_powers.data_ptr(),
        g_powers.data_ptr(),
        batch,
        groups,
        x_powers.shape[2],
        g_powers.shape[2],
        0 if index is None else index.data_ptr(),
        grid.factors.data_ptr(),
        parseval(grid.size).data_ptr(),
        parseval(grid.folded).data_ptr(),
        eta,
        (grid.folded[0] * grid.folded[1]) ** 0.5,
        squares.data_ptr(),
        _cpu._threads(),
    )
    return squares


def _gather(spectra: torch.Tensor, at: torch.Tensor, part: slice, out: torch.Tensor) -> None:
    """Bins ``at`` of a chunk's samples, into ``[K, B, 2, channels]``."""
    kept, batch, _, channels = out.shape
    sizes = len(spectra), channels, spectra.shape[2], at, kept, batch, part.start
    _ghost_dense._call("spectral_gather", out.dtype, spectra, *sizes, out)


@torch.no_grad()
def _conv_norm(
    x: torch.Tensor,
    g: torch.Tensor,
    *,
    kernel_size: Any,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    size: Sequence[int],
    band: Band | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    layer = Layer.of(x, g, kernel_size, stride, padding, dilation, groups, size)
    grid = Grid.of(layer, band)
    powers = room(x, groups, grid)
    for part, spectra in chunks(x, grid, "x", _CHUNK):
        _powers(spectra, groups, powers[0][part])
    if layer.extent == (1, 1):
        powers[1].copy_(constant(g, groups))
    else:
        for part, spectra in chunks(g, grid, "g", _CHUNK):
            _powers(spectra, groups, powers[1][part])
    return _squares(grid, powers, transform_error(x.dtype, grid.size))


@torch.no_grad()
def _conv_bins(
    x: torch.Tensor,
    g: torch.Tensor,
    *,
    kernel_size: Any,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    band: Band,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    layer = Layer.of(x, g, kernel_size, stride, padding, dilation, groups, band.size)
    grid = Grid(layer, layer.size, None)
    powers = room(x, groups, grid)
    kept = bins.kept_bins(band)
    found = [t.new_empty(len(kept), len(t), 2, t.shape[1]) for t in (x, g)]
    for part, spectra in chunks(x, grid, "x", _CHUNK):
        _powers(spectra, groups, powers[0][part])
        _gather(spectra, kept, part, found[0])
    if layer.extent == (1, 1):
        powers[1].copy_(constant(g, groups))
        found[1][:, :, 0] = g.flatten(1)
        found[1][:, :, 1] = 0
    else:
        at = bins.gradient_bins(band, grid.size, grid.folded)
        for part, spectra in chunks(g, grid, "g", _CHUNK):
            _powers(spectra, groups, powers[1][part])
            _gather(spectra, at, part, found[1])
    squares = _squares(grid, powers, transform_error(x.dtype, grid.size))
    return found[0], bins.unfold(found[1], grid, band), squares


def _whitened_norm(
    grads: torch.Tensor, matrix: torch.Tensor, *, backend: str | None = None
) -> torch.Tensor:
    batch, taps = len(grads), matrix.shape[1]
    squares = torch.empty(batch, dtype=torch.float64)
    order = explicit.memory_order(grads)
    shape = [grads.shape[i] for i in order]
    first = min(place for place, i in enumerate(order) if i > 2)
    outer, inner = (
        int(torch.Size(s).numel()) for s in (shape[:first], shape[first + _axes(grads) :])
    )
    sizes = batch, outer, taps, inner, matrix, len(matrix)
    _ghost_dense._call("whitened_norm", grads.dtype, grads, *sizes, squares)
    return squares


def _axes(grads: torch.Tensor) -> int:
    return grads.dim() - 3


def _refuse_whitened(grads: torch.Tensor, *_: Any, **__: Any) -> str | None:
    order = explicit.memory_order(grads)
    taps = [place for place, i in enumerate(order) if i > 2]
    if [order[place] for place in taps] != list(range(3, grads.dim())) or taps != list(
        range(taps[0], taps[0] + len(taps))
    ):
        return "reads taps that stand together in memory, in order"
    return _cpu._on_cpu(grads)


KERNELS: tuple[tuple[str, Any, Any], ...] = (
    ("spectral.conv_norm", _conv_norm, _refuse),
    ("spectral.conv_bins", _conv_bins, _refuse),
    ("spectral.bins_sum", bins.bins_sum.reference, _refuse),
    ("spectral.filtered", filtered.reference, _refuse),
    ("spectral.whitened_norm", _whitened_norm, _refuse_whitened),
)
"""``(op, run, refuse)``."""
