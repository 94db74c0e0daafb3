"""The polynomial loss with the hidden layer in its coefficients (``ops/coef/features.py``).

As in ``coef``, coefficients are made, released by the kernel of tensors and then evaluated, a few
runs of records at a time: here they do pass through memory.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.graph import increment_version

from ... import coef
from ...coef import features
from .coef import LANES, never, release_rows
from .launch import INTERPRETED, launch

_ENTRIES_AT_ONCE = 1 << (22 if INTERPRETED else 26)
_ROWS = 8  # of a program, each in LANES partial sums
_COLUMNS = 128  # of a program
_MOST = 1024


@triton.jit(do_not_specialize=["rows", "classes", "width"])
def rows_kernel(
    first,
    second,
    weights,
    linear,
    rows: tl.int64,
    classes: tl.int64,
    width: tl.int64,
    ROWS: tl.constexpr,
):
    """Compute ``linear = a1 + a2 W``: a row of a2 for each record, class and feature."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    lane = tl.arange(0, LANES)[None, :]
    sums = tl.zeros([ROWS, LANES], tl.float64)
    label = row // width % classes
    for start in range(0, width, LANES):
        column = start + lane
        inside = (row < rows) & (column < width)
        a2 = tl.load(second + row * width + column, mask=inside, other=0).to(tl.float64)
        w = tl.load(weights + label * width + column, mask=inside, other=0)
        sums += tl.where(inside, a2 * w, 0.0)
    half8 = tl.sum(tl.reshape(sums, [ROWS, 2, 8]), axis=1)
    half4 = tl.sum(tl.reshape(half8, [ROWS, 2, 4]), axis=1)
    half2 = tl.sum(tl.reshape(half4, [ROWS, 2, 2]), axis=1)
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    a1 = tl.load(first + at, mask=at < rows, other=0).to(tl.float64)
    tl.store(linear + at, a1 + tl.sum(half2, axis=1), mask=at < rows)


@triton.jit(do_not_specialize=["count", "classes", "width"])
def columns_kernel(
    second,
    weights,
    columns,
    count: tl.int64,
    classes: tl.int64,
    width: tl.int64,
    COLUMNS: tl.constexpr,
):
    """Compute ``columns = a2^T W`` from the top, one for each record, class and feature."""
    index = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = index < count
    pair, column = index // width, index % width
    total = tl.zeros([COLUMNS], tl.float64)
    for e in range(width):
        a2 = tl.load(second + (pair * width + e) * width + column, mask=inside, other=0)
        w = tl.load(weights + pair % classes * width + e, mask=inside, other=0)
        total += a2.to(tl.float64) * w
    tl.store(columns + index, total, mask=inside)


def _expanded(
    hidden: torch.Tensor,
    targets: torch.Tensor,
    weights: torch.Tensor,
    *,
    noise: coef.Noise | None = None,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    made = out or coef.empty_results(hidden, weights)
    loss, dweights, dhidden = (t.detach() for t in made)
    hidden, targets, wide = hidden.detach(), targets.detach(), weights.detach().double()
    total = torch.zeros_like(wide)
    for part in features.parts(hidden, weights, _ENTRIES_AT_ONCE):
        factor = 0.5 - targets[part]
        a1, a2 = features.coefficients(hidden[part], factor)
        if noise is not None:
            each, behind = features.noise_of(noise, part, len(hidden), weights)
            release_rows(a1.view(len(a1), -1), each, each.position)
            release_rows(a2.view(len(a2), -1), each, behind)
        sums = _sums(a1, a2, wide)
        loss[part], dhidden[part] = features.combined(hidden[part], factor, wide, *sums, total)
    dweights.copy_(total)
    increment_version(made)
    return made


def _sums(
    a1: torch.Tensor, a2: torch.Tensor, wide: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``a1 + a2 W`` and ``a2^T W``, float64."""
    linear, columns = (torch.empty_like(a1, dtype=torch.float64) for _ in range(2))
    sizes = a1.numel(), *wide.shape
    most = min(_MOST, triton.next_power_of_2(a1.numel() or 1))
    rows, each = (most, most) if INTERPRETED else (_ROWS, _COLUMNS)
    launch(rows_kernel, -(-a1.numel() // rows), a1, a1, a2, wide, linear, *sizes, ROWS=rows)
    launch(columns_kernel, -(-a1.numel() // each), a1, a2, wide, columns, *sizes, COLUMNS=each)
    return linear, columns


KERNELS: tuple[tuple[str, Any, Any], ...] = (("coef.expanded", _expanded, never),)
"""``(op, run, refuse)``."""
