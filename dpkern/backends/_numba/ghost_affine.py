"""Normalisation layers: input gradient and per-sample gradients of scale and shift in one pass
(csrc/cpu/ghost_affine.cpp)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ...ops.ghost import affine
from .. import _ghost_dense
from .compile import Array, kernel, summing
from .parallel import in_parts, team_of

_GRAIN = 1 << 14  # entries worth a thread


@summing
def _row_means(h: Array, xhat: Array) -> tuple[float, float]:
    """Means of h and h xhat over a row, summed in float64."""
    h_total, hx_total = 0.0, 0.0
    for i in range(len(h)):
        h_total += np.float64(h[i])
        hx_total += np.float64(h[i] * xhat[i])
    return h_total / len(h), hx_total / len(h)


@kernel
def _layer_norm(
    g: Array, x: Array, statistics: Any, weight: Array, outs: Any, begin: int, end: int
) -> None:
    """Samples ``begin .. end - 1``; ``dbias`` has no columns where the mean is not subtracted."""
    mean, rstd = statistics
    dx, dweight, dbias = outs
    rows, columns = g.shape[1], g.shape[2]
    centred = dbias.shape[1] == columns
    number = g.dtype.type
    h, xhat = np.empty(columns, g.dtype), np.empty(columns, g.dtype)
    for b in range(begin, end):
        for t in range(rows):
            g_row, x_row, dx_row = g[b, t], x[b, t], dx[b, t]
            shift, scale = mean[b, t] if centred else number(0), rstd[b, t]
            for i in range(columns):
                xhat[i] = (x_row[i] - shift) * scale
                h[i] = g_row[i] * weight[i]
                dweight[b, i] += g_row[i] * xhat[i]
                if centred:
                    dbias[b, i] += g_row[i]
            h_mean, hx_mean = _row_means(h, xhat)
            low, high = number(h_mean if centred else 0.0), number(hx_mean)
            for i in range(columns):
                dx_row[i] = (h[i] - low - xhat[i] * high) * scale


@summing
def _channel_sums(g: Array, x: Array, mean: float, rstd: float) -> tuple[float, float]:
    """Sums of a channel over its places, in float64: g and g xhat."""
    g_total, gx_total = 0.0, 0.0
    for i in range(len(g)):
        g_total += np.float64(g[i])
        gx_total += np.float64(g[i] * ((x[i] - mean) * rstd))
    return g_total, gx_total


@kernel
def _group_norm(
    g: Array, x: Array, statistics: Any, weight: Array, outs: Any, begin: int, end: int
) -> None:
    """Groups ``begin .. end - 1`` of all samples: ``g`` is ``[groups, channels, places]``."""
    mean, rstd = statistics
    dx, dweight, dbias = outs
    channels, places = g.shape[1], g.shape[2]
    number = g.dtype.type
    for index in range(begin, end):
        shift, scale = mean[index], rstd[index]
        weights = weight[index % len(weight)]
        h_total, hx_total = 0.0, 0.0
        for c in range(channels):
            g_sum, gx_sum = _channel_sums(g[index, c], x[index, c], shift, scale)
            dbias[index, c] = g_sum
            dweight[index, c] = gx_sum
            h_total += g_sum * np.float64(weights[c])
            hx_total += gx_sum * np.float64(weights[c])
        count = max(1, channels * places)
        h_mean, hx_mean = number(h_total / count), number(hx_total / count)
        for c in range(channels):
            g_row, x_row, dx_row = g[index, c], x[index, c], dx[index, c]
            for i in range(places):
                xhat = (x_row[i] - shift) * scale
                dx_row[i] = (g_row[i] * weights[c] - h_mean - xhat * hx_mean) * scale


def _arrays(*tensors: torch.Tensor) -> tuple[Array, ...]:
    return tuple(tensor.detach().numpy() for tensor in tensors)


def _weight(weight: torch.Tensor | None, g: torch.Tensor, count: int) -> torch.Tensor:
    return g.new_ones(count) if weight is None else weight


def _layer_norm_backward(
    g: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    backend: str | None = None,
) -> affine.Gradients:
    batch, rows, columns = g.shape
    dx = torch.empty_like(x, requires_grad=False)
    dweight = g.new_zeros(batch, columns)
    dbias = g.new_zeros(batch, 0 if mean is None else columns)
    statistics = _arrays(rstd if mean is None else mean, rstd)
    scale = _weight(weight, g, columns)
    operands = *_arrays(g, x), statistics, *_arrays(scale), _arrays(dx, dweight, dbias)
    team = team_of(batch, _GRAIN // max(1, rows * columns))
    in_parts(batch, team, lambda _, *part: _layer_norm(*operands, *part))
    return dx, dweight, dbias


def _rms_norm_backward(
    g: torch.Tensor,
    x: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _layer_norm_backward(g, x, None, rstd, weight)[:2]


def _group_norm_backward(
    g: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    backend: str | None = None,
) -> affine.Gradients:
    batch, groups = mean.shape
    shape = batch * groups, g.shape[1] // groups, g.shape[2]
    dx = torch.empty_like(x, requires_grad=False)
    dweight, dbias = g.new_empty(2, *g.shape[:2]).unbind()
    operands = (
        *_arrays(g.view(shape), x.view(shape)),
        _arrays(mean.view(-1), rstd.view(-1)),
        *_arrays(_weight(weight, g, g.shape[1]).view(groups, -1)),
        _arrays(dx.view(shape), dweight.view(shape[:2]), dbias.view(shape[:2])),
    )
    team = team_of(shape[0], _GRAIN // max(1, shape[1] * shape[2]))
    in_parts(shape[0], team, lambda _, *part: _group_norm(*operands, *part))
    return dx, dweight, dbias


KERNELS: tuple[tuple[str, Any, Any], ...] = (
    ("ghost.layer_norm_backward", _layer_norm_backward, _ghost_dense._refuse),
    ("ghost.rms_norm_backward", _rms_norm_backward, _ghost_dense._refuse),
    ("ghost.group_norm_backward", _group_norm_backward, _ghost_dense._refuse),
)
"""``(op, run, refuse)``."""
