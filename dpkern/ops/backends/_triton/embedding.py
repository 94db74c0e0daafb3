"""Embedding tables: equal ids are brought together by a stable sort, then walked in order.

Norms and integer sums: a program walks the runs of equal ids that begin in its ``CHUNK`` sorted
positions of a sample, to their ends. Sums: a program walks ``CHUNK`` sorted positions of the whole
batch. Runs of equal ids inside a chunk are added to the table, pieces of runs that a chunk's edge
cuts are put aside and added by a second kernel in order: no two programs write the same row.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ...ghost._bounds import gamma
from .launch import INTERPRETED, launch
from .operands import NO_PADDING
from .rows import added

_CHUNK = 64
_COLUMNS = 1024 if INTERPRETED else 128


@triton.jit(do_not_specialize=["positions", "columns", "blocks", "padding"])
def _norm_kernel(
    ids,
    order,
    g,
    squares,
    absolutes,
    positions: tl.int64,
    columns: tl.int64,
    blocks: tl.int64,
    padding: tl.int64,
    CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sum squares of the sums of equal ids, and of the sums of absolute values.

    A program takes one sample's chunk of positions and block of columns, ``ids`` sorted.
    """
    program = tl.program_id(0).to(tl.int64)
    chunk, block = program // blocks, program % blocks
    chunks = tl.cdiv(positions, CHUNK)
    sample = chunk // chunks
    first = chunk % chunks * CHUNK
    end = tl.minimum(first + CHUNK, positions)
    ids += sample * positions
    order += sample * positions
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    square = tl.zeros((COLUMNS,), tl.float64)
    absolute = tl.zeros((COLUMNS,), tl.float64)
    sums = tl.zeros((COLUMNS,), tl.float64)
    sizes = tl.zeros((COLUMNS,), tl.float64)
    t = first
    previous = tl.load(ids + first)
    # The run that began before this chunk is another program's.
    known = False
    if first > 0:
        known = tl.load(ids + first - 1) == previous
    while known:
        t += 1
        known = (t < end) & (tl.load(ids + tl.minimum(t, end - 1)) == previous)
    going = t < end
    while going:
        token = tl.load(ids + t)
        if token != previous:
            square += sums * sums
            absolute += sizes * sizes
            sums = tl.zeros((COLUMNS,), tl.float64)
            sizes = tl.zeros((COLUMNS,), tl.float64)
        row = sample * positions + tl.load(order + t)
        limit = tl.where(token == padding, 0, columns)
        x = tl.load(g + row * columns + column, mask=column < limit, other=0).to(tl.float64)
        sums += x
        sizes += tl.abs(x)
        previous = token
        t += 1
        # A run that begins here is walked to its end, in later chunks too.
        same = tl.load(ids + tl.minimum(t, positions - 1)) == token
        going = (t < positions) & ((t < end) | same)
    tl.store(squares + program, tl.sum(square + sums * sums))
    tl.store(absolutes + program, tl.sum(absolute + sizes * sizes))


@triton.jit(do_not_specialize=["positions", "columns", "blocks", "padding"])
def _integer_kernel(
    ids,
    order,
    g,
    factors,
    out,
    positions: tl.int64,
    columns: tl.int64,
    blocks: tl.int64,
    padding: tl.int64,
    CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Add the integer parts of a sample's rows times its factor: sums of equal ids in float64.

    A program takes one sample's chunk of positions and block of columns, ``ids`` sorted. A row that
    stands alone is multiplied in its own dtype.
    """
    program = tl.program_id(0).to(tl.int64)
    chunk, block = program // blocks, program % blocks
    chunks = tl.cdiv(positions, CHUNK)
    sample = chunk // chunks
    first = chunk % chunks * CHUNK
    end = tl.minimum(first + CHUNK, positions)
    ids += sample * positions
    order += sample * positions
    factor = tl.load(factors + sample)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    t = first
    if first > 0:
        before = tl.load(ids + first - 1)
        # The run that began before this chunk is another program's.
        known = tl.load(ids + first) == before
        while known:
            t += 1
            known = (t < end) & (tl.load(ids + tl.minimum(t, end - 1)) == before)
    # A sample of factor 0 is not read: 0 * inf would not vanish.
    going = (t < end) & (factor != 0)
    while going:
        token = tl.load(ids + t)
        inside = column < tl.where(token == padding, 0, columns)
        sums = tl.zeros((COLUMNS,), tl.float64)
        begin = t
        same = True
        while same:
            row = sample * positions + tl.load(order + t)
            x = tl.load(g + row * columns + column, mask=inside, other=0)
            sums += x.to(tl.float64)
            t += 1
            # A run that begins here is walked to its end, in later chunks too.
            same = (t < positions) & (tl.load(ids + tl.minimum(t, positions - 1)) == token)
        single = factor * sums.to(factors.dtype.element_ty)
        several = factor.to(tl.float64) * sums
        term = tl.where(t == begin + 1, single.to(tl.float64), several).to(tl.int32)
        tl.atomic_add(out + token * columns + column, term, mask=inside, sem="relaxed")
        going = t < end


@triton.jit(do_not_specialize=["count", "positions", "columns", "blocks", "padding"])
def _sum_kernel(
    ids,
    order,
    g,
    factors,
    out,
    heads,
    tails,
    count: tl.int64,
    positions: tl.int64,
    columns: tl.int64,
    blocks: tl.int64,
    padding: tl.int64,
    CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sum one chunk of sorted positions.

    Whole runs go to ``out``, a piece that began before the chunk to ``heads``, one that begins here
    and goes on behind it to ``tails``.
    """
    program = tl.program_id(0).to(tl.int64)
    chunk, block = program // blocks, program % blocks
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    first = chunk * CHUNK
    end = tl.minimum(first + CHUNK, count)
    previous = tl.load(ids + first)
    cut = False  # whether the run at hand began before the chunk
    if first > 0:
        cut = tl.load(ids + first - 1) == previous
    sums = tl.zeros((COLUMNS,), g.dtype.element_ty)
    for i in range(first, end):
        token = tl.load(ids + i)
        if token != previous:
            if cut:
                tl.store(heads + chunk * columns + column, sums, mask=inside)
            else:
                at = previous * columns + column
                tl.store(out + at, tl.load(out + at, mask=inside) + sums, mask=inside)
            sums = tl.zeros((COLUMNS,), g.dtype.element_ty)
            cut = False
        row = tl.load(order + i)
        factor = tl.load(factors + row // positions)
        # A sample of factor 0 is not read: 0 * inf would not vanish.
        limit = tl.where(token == padding, 0, tl.where(factor == 0, 0, columns))
        sums += factor * tl.load(g + row * columns + column, mask=column < limit, other=0)
        previous = token
    goes_on = False
    if end < count:
        goes_on = tl.load(ids + end) == previous
    if cut:
        tl.store(heads + chunk * columns + column, sums, mask=inside)
    elif goes_on:
        tl.store(tails + chunk * columns + column, sums, mask=inside)
    else:
        at = previous * columns + column
        tl.store(out + at, tl.load(out + at, mask=inside) + sums, mask=inside)


@triton.jit(do_not_specialize=["count", "columns", "blocks"])
def _join_kernel(
    ids,
    out,
    heads,
    tails,
    count: tl.int64,
    columns: tl.int64,
    blocks: tl.int64,
    CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Join the run that begins in this chunk and goes on behind it, if any: its pieces in order."""
    program = tl.program_id(0).to(tl.int64)
    chunk, block = program // blocks, program % blocks
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    end = (chunk + 1) * CHUNK
    if end < count:
        token = tl.load(ids + end - 1)
        goes_on = tl.load(ids + end) == token
        began_before = False
        if chunk > 0:
            began_before = tl.load(ids + end - CHUNK - 1) == token
        if goes_on and not began_before:
            sums = tl.load(tails + chunk * columns + column, mask=inside)
            piece = chunk + 1
            while goes_on:
                sums += tl.load(heads + piece * columns + column, mask=inside)
                piece += 1
                after = tl.minimum(piece * CHUNK, count - 1)
                goes_on = (piece * CHUNK < count) & (tl.load(ids + after) == token)
            at = token * columns + column
            tl.store(out + at, tl.load(out + at, mask=inside) + sums, mask=inside)


def _embedding_norm(
    ids: torch.Tensor,
    g: torch.Tensor,
    *,
    padding_idx: int | None = None,
) -> torch.Tensor:
    (batch, positions), columns = ids.shape, g.shape[2]
    order = torch.sort(ids, dim=1, stable=True)
    blocks = -(-columns // _COLUMNS)
    each = -(-positions // _CHUNK) * blocks
    parts = torch.zeros(2, batch, each, dtype=torch.float64, device=g.device)
    launch(
        _norm_kernel,
        batch * each,
        g,
        order.values,
        order.indices,
        g,
        parts[0],
        parts[1],
        positions,
        columns,
        blocks,
        NO_PADDING if padding_idx is None else padding_idx,
        CHUNK=_CHUNK,
        COLUMNS=_COLUMNS,
    )
    # Of each entry, the sum of at most T numbers is off by gamma(T) of the sum of their sizes; and
    # so is the norm of all entries, by Minkowski. The rest is the rounding of these lines.
    square, absolute = added(parts) * (1 + gamma(positions + columns + 8))
    upper = square.sqrt() + gamma(positions + 4) * absolute.sqrt()
    squares: torch.Tensor = upper.square() * (1 + gamma(8))
    return squares


def _embedding_sum(
    ids: torch.Tensor,
    g: torch.Tensor,
    factors: torch.Tensor,
    out: torch.Tensor,
    *,
    padding_idx: int | None = None,
) -> None:
    count, columns = ids.numel(), g.shape[2]
    order = torch.sort(ids.view(-1), stable=True)
    chunks, blocks = -(-count // _CHUNK), -(-columns // _COLUMNS)
    heads, tails = g.new_empty(2, chunks, columns)
    meta: dict[str, Any] = {"CHUNK": _CHUNK, "COLUMNS": _COLUMNS}
    launch(
        _sum_kernel,
        chunks * blocks,
        g,
        order.values,
        order.indices,
        g,
        factors,
        out,
        heads,
        tails,
        count,
        ids.shape[1],
        columns,
        blocks,
        NO_PADDING if padding_idx is None else padding_idx,
        **meta,
    )
    if chunks > 1:
        given = (order.values, out, heads, tails, count, columns, blocks)
        launch(_join_kernel, chunks * blocks, g, *given, **meta)
    torch.autograd.graph.increment_version(out)


def _embedding_integer_sum(
    ids: torch.Tensor,
    g: torch.Tensor,
    factors: torch.Tensor,
    out: torch.Tensor,
    *,
    padding_idx: int | None = None,
) -> None:
    (batch, positions), columns = ids.shape, g.shape[2]
    order = torch.sort(ids, dim=1, stable=True)
    blocks = -(-columns // _COLUMNS)
    launch(
        _integer_kernel,
        batch * -(-positions // _CHUNK) * blocks,
        g,
        order.values,
        order.indices,
        g,
        factors,
        out,
        positions,
        columns,
        blocks,
        NO_PADDING if padding_idx is None else padding_idx,
        CHUNK=_CHUNK,
        COLUMNS=_COLUMNS,
    )
    torch.autograd.graph.increment_version(out)


def _never(*_: Any, **__: Any) -> None:
    return None


KERNELS: tuple[tuple[str, Any, Any], ...] = (
    ("ghost.embedding_integer_sum", _embedding_integer_sum, _never),
    ("ghost.embedding_norm", _embedding_norm, _never),
    ("ghost.embedding_sum", _embedding_sum, _never),
)
"""``(op, run, refuse)``."""
