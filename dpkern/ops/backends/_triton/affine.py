"""Normalisation layers: input gradient and per-sample gradients of scale and shift.

With ``xhat = (x - mean) rstd`` and ``h = g weight``, a row's input gradient is
``rstd (h - mean(h) - xhat mean(h xhat))``. Sums are made in float64, whatever the dtype.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .launch import INTERPRETED, launch

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

_BLOCK = 4096 if INTERPRETED else 512  # entries of a row at a time
_ROWS, _COLUMNS = 16, (1024 if INTERPRETED else 64)


@triton.jit
def _operands(g, x, weight, at, feature, mask, mean, rstd, WEIGHTED: tl.constexpr):
    """Load g, xhat and h of these entries; zeros outside."""
    grad = tl.load(g + at, mask=mask, other=0)
    xhat = tl.where(mask, (tl.load(x + at, mask=mask, other=0) - mean) * rstd, 0.0)
    h = grad * tl.load(weight + feature, mask=mask, other=0) if WEIGHTED else grad
    return grad, xhat, h


@triton.jit(do_not_specialize=["columns"])
def _row_kernel(
    g,
    x,
    mean,
    rstd,
    weight,
    dx,
    columns: tl.int64,
    CENTRED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the input gradient of one row."""
    T: tl.constexpr = g.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    at_mean = tl.load(mean + row) if CENTRED else 0.0
    at_rstd = tl.load(rstd + row)
    h_sum = tl.zeros((BLOCK,), tl.float64)
    hx_sum = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK).to(tl.int64)
        mask = column < columns
        _g, xhat, h = _operands(
            g, x, weight, row * columns + column, column, mask, at_mean, at_rstd, WEIGHTED
        )
        h_sum += h.to(tl.float64)
        hx_sum += (h * xhat).to(tl.float64)
    count = columns.to(tl.float64)
    h_mean = (tl.sum(h_sum) / count).to(T) if CENTRED else 0.0
    hx_mean = (tl.sum(hx_sum) / count).to(T)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK).to(tl.int64)
        mask = column < columns
        at = row * columns + column
        _g, xhat, h = _operands(g, x, weight, at, column, mask, at_mean, at_rstd, WEIGHTED)
        tl.store(dx + at, (h - h_mean - xhat * hx_mean) * at_rstd, mask=mask)


@triton.jit(do_not_specialize=["rows", "columns", "blocks"])
def _column_kernel(
    g,
    x,
    mean,
    rstd,
    dweight,
    dbias,
    rows: tl.int64,
    columns: tl.int64,
    blocks: tl.int64,
    CENTRED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write ``dweight`` and ``dbias`` of one sample and block of columns: sums over its rows."""
    program = tl.program_id(0).to(tl.int64)
    sample, block = program // blocks, program % blocks
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    weights = tl.zeros((ROWS, COLUMNS), tl.float64)
    biases = tl.zeros((ROWS, COLUMNS), tl.float64)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS).to(tl.int64)
        place = sample * rows + row
        at_mean = tl.load(mean + place, mask=row < rows, other=0)[:, None] if CENTRED else 0.0
        at_rstd = tl.load(rstd + place, mask=row < rows, other=0)[:, None]
        at = place[:, None] * columns + column[None, :]
        mask = (row < rows)[:, None] & inside[None, :]
        grad, xhat, _h = _operands(g, x, g, at, at, mask, at_mean, at_rstd, False)
        weights += (grad * xhat).to(tl.float64)
        if CENTRED:
            biases += grad.to(tl.float64)
    T: tl.constexpr = g.dtype.element_ty
    tl.store(dweight + sample * columns + column, tl.sum(weights, axis=0).to(T), mask=inside)
    if CENTRED:
        tl.store(dbias + sample * columns + column, tl.sum(biases, axis=0).to(T), mask=inside)


@triton.jit(do_not_specialize=["groups", "channels", "places"])
def _group_kernel(
    g,
    x,
    mean,
    rstd,
    weight,
    dx,
    dweight,
    dbias,
    groups: tl.int64,
    channels: tl.int64,
    places: tl.int64,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum the channels of one group of one sample, and write its input gradient."""
    T: tl.constexpr = g.dtype.element_ty
    group = tl.program_id(0).to(tl.int64)  # of all samples
    at_mean, at_rstd = tl.load(mean + group), tl.load(rstd + group)
    h_sum = tl.zeros((1,), tl.float64)
    hx_sum = tl.zeros((1,), tl.float64)
    for c in range(channels):
        channel = group * channels + c
        g_sum = tl.zeros((BLOCK,), tl.float64)
        gx_sum = tl.zeros((BLOCK,), tl.float64)
        for start in range(0, places, BLOCK):
            place = start + tl.arange(0, BLOCK).to(tl.int64)
            mask = place < places
            at = channel * places + place
            grad, xhat, _h = _operands(g, x, g, at, at, mask, at_mean, at_rstd, False)
            g_sum += grad.to(tl.float64)
            gx_sum += (grad * xhat).to(tl.float64)
        g_total, gx_total = tl.sum(g_sum), tl.sum(gx_sum)
        tl.store(dbias + channel, g_total.to(T))
        tl.store(dweight + channel, gx_total.to(T))
        scale = tl.load(weight + (group % groups) * channels + c) if WEIGHTED else 1.0
        h_sum += g_total * scale
        hx_sum += gx_total * scale
    count = tl.maximum(channels * places, 1).to(tl.float64)
    h_mean, hx_mean = (h_sum / count).to(T), (hx_sum / count).to(T)
    for c in range(channels):
        channel = group * channels + c
        scale = tl.load(weight + (group % groups) * channels + c) if WEIGHTED else 1.0
        for start in range(0, places, BLOCK):
            place = start + tl.arange(0, BLOCK).to(tl.int64)
            mask = place < places
            at = channel * places + place
            grad, xhat, _h = _operands(g, x, g, at, at, mask, at_mean, at_rstd, False)
            tl.store(dx + at, (grad * scale - h_mean - xhat * hx_mean) * at_rstd, mask=mask)


def _by_rows(
    g: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
) -> Gradients:
    """Run layers over the last dimension; without a mean, ``dbias`` is not written."""
    batch, rows, columns = g.shape
    dx = torch.empty_like(g)
    dweight = g.new_empty(batch, columns)
    dbias = g.new_empty(batch, columns) if mean is not None else dweight
    means = rstd if mean is None else mean  # absent: never read
    weights = g if weight is None else weight
    centred = mean is not None
    given = (g, x, means, rstd)
    launch(
        _row_kernel,
        batch * rows if columns else 0,
        g,
        *given,
        weights,
        dx,
        columns,
        CENTRED=centred,
        WEIGHTED=weight is not None,
        BLOCK=_BLOCK,
    )
    blocks = -(-columns // _COLUMNS)
    launch(
        _column_kernel,
        batch * blocks,
        g,
        *given,
        dweight,
        dbias,
        rows,
        columns,
        blocks,
        CENTRED=centred,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
    )
    return dx, dweight, dbias


def _layer_norm_backward(
    g: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
) -> Gradients:
    return _by_rows(g, x, mean, rstd, weight)


def _rms_norm_backward(
    g: torch.Tensor,
    x: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _by_rows(g, x, None, rstd, weight)[:2]


def _group_norm_backward(
    g: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
) -> Gradients:
    batch, groups = mean.shape
    channels, places = g.shape[1] // groups, g.shape[2]
    dx = torch.empty_like(g)
    dweight, dbias = g.new_empty(2, batch, g.shape[1])
    launch(
        _group_kernel,
        batch * groups,
        g,
        g,
        x,
        mean,
        rstd,
        g if weight is None else weight,
        dx,
        dweight,
        dbias,
        groups,
        channels,
        places,
        WEIGHTED=weight is not None,
        BLOCK=_BLOCK,
    )
    return dx, dweight, dbias


def _never(*_: Any, **__: Any) -> None:
    return None


KERNELS: tuple[tuple[str, Any, Any], ...] = (
    ("ghost.layer_norm_backward", _layer_norm_backward, _never),
    ("ghost.rms_norm_backward", _rms_norm_backward, _never),
    ("ghost.group_norm_backward", _group_norm_backward, _never),
)
"""``(op, run, refuse)``."""
