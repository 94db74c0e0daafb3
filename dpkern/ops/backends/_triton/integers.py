"""Sums of whole numbers: each sample's gradient times its factor, cut off behind the point.

A program owns a tile of the output and a range of samples. A sample's tile is summed over all
positions as in the float tier, multiplied by the sample's factor, truncated, and added to the
tile's integers. So a term depends on its own sample alone, and integers add up in any order to the
same sum: programs add theirs to the output as they end. Not yet run on a GPU.

Of a sample of one position the factor meets g first, as ``ghost.linear_integer_sum`` says.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.graph import increment_version

from .direct import constants, tile_of, tiles
from .launch import launch
from .operands import MULTIPLE, NO_PADDING, Operands, inputs, outputs, product, tile_at
from .sum_errors import tied_sum_error
from .tuned import Tile

_PROGRAMS = 512  # that keep any device busy; a range of samples for each beyond the tiles
_ROWS = 64
"""Rows of a tile, at most: a thread holds its part of the sums over positions and of the integers,
and of 16-bit operands a chunk's product as well."""


@triton.jit
def terms_kernel(
    a, g, factors, out, sizes, a_strides, g_strides, geometry, batch, per_split,
    DENSE: tl.constexpr,
    LAST: tl.constexpr,
    SUMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Add ``trunc(c_b sum_t g outer a)`` of a range of samples to one tile."""
    positions = sizes[0]
    rows = sizes[1]
    columns = sizes[2]
    i, j, part = tile_at(rows, columns, ROWS, COLUMNS)
    split = part // sizes[3]
    group = (part % sizes[3]).to(tl.int64)
    a += group * sizes[4] * a_strides[1]
    g += group * rows * g_strides[1]
    total = tl.zeros([ROWS, COLUMNS], tl.int32)
    sums = tl.zeros([ROWS, COLUMNS], SUMS)
    chunks = tl.cdiv(positions, DEPTH)
    first = split * per_split
    count = tl.minimum(per_split, batch - first) * chunks
    # One loop over all samples' chunks, so that the next are on their way while one is multiplied.
    for step in range(count):
        sample = first + step // chunks
        t = step % chunks * DEPTH + tl.arange(0, DEPTH)
        factor = tl.load(factors + sample)
        live = t < tl.where(factor != 0.0, positions, 0)  # what is not read cannot be NaN
        x = a + tl.cast(sample, tl.int64) * a_strides[0]
        y = g + tl.cast(sample, tl.int64) * g_strides[0]
        left = outputs(y, i, t * g_strides[2], live, sizes[5], g_strides[1])
        right = inputs(x, j, t, t * 0, live, columns, a_strides, geometry, DENSE, LAST)
        sums += product(left, right, SUMS, "ieee")
        ended = step % chunks == chunks - 1
        total += tl.where(ended, (factor * sums).to(tl.int32), 0)
        sums = tl.where(ended, tl.zeros([ROWS, COLUMNS], SUMS), sums)
    _add(out, total, group * rows, i, j, rows, columns)


@triton.jit
def _add(out, total, before, i, j, rows, columns):
    """Add a tile of integers, whatever other programs add meanwhile."""
    entry = (before + i).to(tl.int64)[:, None] * columns + j[None, :]
    mask = (i < rows)[:, None] & (j < columns)[None, :]
    tl.atomic_add(out + entry, total, mask=mask, sem="relaxed")


@triton.jit
def single_kernel(
    a, g, factors, out, batch, rows, columns, per_split,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add ``trunc((c_b g_b) outer a_b)`` of a range of samples of one position to one tile."""
    i, j, split = tile_at(rows, columns, ROWS, COLUMNS)
    first = split * per_split
    total = tl.zeros([ROWS, COLUMNS], tl.int32)
    for sample in range(first, tl.minimum(first + per_split, batch)):
        factor = tl.load(factors + sample)
        place = tl.cast(sample, tl.int64)
        end = tl.where(factor != 0.0, rows, 0)  # what is not read cannot be NaN
        left = tl.load(g + place * rows + i, mask=i < end, other=0.0)
        end = tl.where(factor != 0.0, columns, 0)
        right = tl.load(a + place * columns + j, mask=j < end, other=0.0)
        scaled = factor * left.to(factor.dtype)
        total += (scaled[:, None] * right.to(factor.dtype)[None, :]).to(tl.int32)
    _add(out, total, 0, i, j, rows, columns)


@triton.jit
def tied_kernel(
    ids, a, g, e, factors, out, sizes, a_strides, g_strides, geometry,
    lookups, padding, batch, per_split,
    DENSE: tl.constexpr,
    LAST: tl.constexpr,
    SUMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Add the integers of both uses of a weight: rows that were looked up are added one by one.

    Chunks of ids none of which is a row of the tile are passed over.
    """
    positions = sizes[0]
    rows = sizes[1]
    columns = sizes[2]
    i, j, split = tile_at(rows, columns, ROWS, COLUMNS)
    begin = tl.min(i)
    total = tl.zeros([ROWS, COLUMNS], tl.int32)
    first = split * per_split
    for sample in range(first, tl.minimum(first + per_split, batch)):
        factor = tl.load(factors + sample)
        x = a + tl.cast(sample, tl.int64) * a_strides[0]
        y = g + tl.cast(sample, tl.int64) * g_strides[0]
        sums = tl.zeros([ROWS, COLUMNS], SUMS)
        end = tl.where(factor != 0.0, positions, 0)  # what is not read cannot be NaN
        for place in range(0, end, DEPTH):
            t = place + tl.arange(0, DEPTH)
            live = t < end
            left = outputs(y, i, t * g_strides[2], live, sizes[5], g_strides[1])
            right = inputs(x, j, t, t * 0, live, columns, a_strides, geometry, DENSE, LAST)
            sums += product(left, right, SUMS, "ieee")
        before = tl.cast(sample, tl.int64) * lookups
        end = tl.where(factor != 0.0, lookups, 0)
        for place in range(0, end, DEPTH):
            s = place + tl.arange(0, DEPTH)
            token = tl.load(ids + before + s, mask=s < end, other=-1)
            if tl.max(((token >= begin) & (token < begin + ROWS)).to(tl.int32)) != 0:
                for k in range(place, tl.minimum(place + DEPTH, end)):
                    word = tl.load(ids + before + k)
                    if (word >= begin) & (word < begin + ROWS):
                        inside = j < tl.where(word == padding, 0, columns)
                        row = tl.load(e + (before + k) * columns + j, mask=inside, other=0.0)
                        sums += tl.where((i == word)[:, None], row[None, :], 0.0)
        total += (factor * sums).to(tl.int32)
    _add(out, total, 0, i, j, rows, columns)


def shares(tile_count: int, batch: int) -> tuple[int, int]:
    """Return into how many parts samples are split, and how many one takes."""
    each = -(-batch // max(1, _PROGRAMS // tile_count))
    return -(-batch // each), each


def _tile(operands: Operands) -> Tile:
    shipped = tile_of(operands, operands.a.dtype)
    return shipped._replace(rows=min(shipped.rows, _ROWS))


def _launched(kernel: Any, operands: Operands, out: torch.Tensor, *given: Any) -> None:
    tile = _tile(operands)
    m, n = tiles(operands, tile)
    count = m * n * operands.groups
    splits, each = shares(count, operands.batch)
    launch(
        kernel,
        count * splits,
        out,
        *given,
        *(operands.batch, each),
        **constants(operands, operands.a.dtype, tile),
    )


def add_terms(operands: Operands, factors: torch.Tensor, out: torch.Tensor) -> None:
    """Add ``out += sum_b trunc(factors[b] grad_b)``; a matrix of the operands' columns."""
    if operands.empty:
        return
    given = operands.sizes, operands.a_strides, operands.g_strides, operands.geometry
    _launched(terms_kernel, operands, out, operands.a, operands.g, factors, out, *given)


def add_single(a: torch.Tensor, g: torch.Tensor, factors: torch.Tensor, out: torch.Tensor) -> None:
    """Add ``out += sum_b trunc((factors[b] g_b) outer a_b)`` of one position.

    A sample whose scaled g is not finite is left out.
    """
    batch, rows, columns = len(a), out.shape[0], out.shape[1]
    if not (batch and out.numel()):
        return
    scaled = g[:, 0].to(factors.dtype).abs().amax(1) * factors.abs()
    factors = torch.where(scaled <= torch.finfo(factors.dtype).max, factors, 0.0)
    tile = _tile(Operands.linear(a, g))
    count = triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns)
    splits, each = shares(count, batch)
    sizes = batch, rows, columns, each
    meta: dict[str, Any] = {"ROWS": tile.rows, "COLUMNS": tile.columns, "warps": tile.warps}
    launch(single_kernel, count * splits, out, a, g, factors, out, *sizes, **meta)


def tied_sum(
    ids: torch.Tensor,
    a: torch.Tensor,
    g: torch.Tensor,
    e: torch.Tensor,
    factors: torch.Tensor,
    out: torch.Tensor,
    *,
    padding_idx: int | None = None,
) -> None:
    operands = Operands.linear(a, g)
    if len(ids) and out.numel():
        _launched(
            tied_kernel,
            operands,
            out,
            *(ids, operands.a, operands.g, e, factors, out),
            *(operands.sizes, operands.a_strides, operands.g_strides, operands.geometry),
            ids.shape[1],
            NO_PADDING if padding_idx is None else padding_idx,
        )
    increment_version(out)


def refuse_long(a: torch.Tensor, g: torch.Tensor, positions: int) -> str | None:
    """Return why not, if indices inside a sample do not fit into 32 bits, however many there are.

    Rows of ``g`` may be filled up to a multiple of 16.
    """
    if max(a[:1].numel(), g[:1].numel() + MULTIPLE * positions) >= 2**31:
        return "has samples of up to 2^31 numbers"
    return None


def _refuse_tied(
    ids: torch.Tensor, a: torch.Tensor, g: torch.Tensor, e: torch.Tensor, *_: Any, **__: Any
) -> str | None:
    return refuse_long(a, g, a.shape[1]) or refuse_long(e, e, e.shape[1])


KERNELS: tuple[tuple[str, Any, Any], ...] = (
    ("ghost.tied_integer_sum", tied_sum, _refuse_tied),
    ("ghost.tied_sum_error", tied_sum_error, _refuse_tied),
)
"""``(op, run, refuse)``."""
