"""Rows of a matrix ``[B, columns]``: their powers, their sums, and their weighted sum.

A power is made in pieces of ``CHUNK`` columns, added in order: it depends on neither the other rows
nor their number, as sums of torch do on a device. A weighted sum takes the rows in order, some at
a time.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .launch import INTERPRETED, launch

CHUNK = 8192
_BLOCK = CHUNK if INTERPRETED else 1024
_ROWS, _COLUMNS = 8, (4096 if INTERPRETED else 128)


@triton.jit(do_not_specialize=["rows", "columns"])
def _power_kernel(
    matrix,
    partial,
    rows: tl.int64,
    columns: tl.int64,
    P: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute ``partial[chunk, row] = sum |x|^P`` over the chunk, in float64."""
    program = tl.program_id(0).to(tl.int64)
    chunk, row = program // rows, program % rows
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, CHUNK, BLOCK):
        column = chunk * CHUNK + start + tl.arange(0, BLOCK)
        x = tl.load(matrix + row * columns + column, mask=column < columns, other=0)
        x = x.to(tl.float64)
        total += x * x if P == 2 else tl.abs(x)
    tl.store(partial + program, tl.sum(total))


@triton.jit(do_not_specialize=["rows", "chunks"])
def _combine_kernel(partial, power, rows: tl.int64, chunks: tl.int64, BLOCK: tl.constexpr):
    """Add ``power[row] = sum of partial[chunk, row]``, in the order of the chunks."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float64)
    for chunk in range(chunks):
        total += tl.load(partial + chunk * rows + row, mask=row < rows, other=0)
    tl.store(power + row, total, mask=row < rows)


@triton.jit(do_not_specialize=["terms"])
def _added_kernel(parts, out, terms: tl.int64, BLOCK: tl.constexpr):
    """Add one row's terms, float64."""
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float64)
    for begin in range(0, terms, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        total += tl.load(parts + row * terms + place, mask=place < terms, other=0)
    tl.store(out + row, tl.sum(total))


@triton.jit(do_not_specialize=["rows", "columns", "sign"])
def _sum_kernel(
    matrix,
    factors,
    out,
    power,
    rows: tl.int64,
    columns: tl.int64,
    sign: tl.int32,
    P: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Add ``out += sign sum_b factors[b] matrix[b]``.

    Integer sums take ``trunc`` of every product and add its P-th power to ``power[b]`` if P is not
    0.
    """
    INTEGERS: tl.constexpr = out.dtype.element_ty.is_int()
    VALUE: tl.constexpr = factors.dtype.element_ty
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    total = tl.zeros((ROWS, COLUMNS), out.dtype.element_ty)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS).to(tl.int64)
        factor = tl.load(factors + row, mask=row < rows, other=0)
        # A row of factor 0 is not read: 0 * inf would not vanish.
        used = (factor != 0)[:, None] & inside[None, :]
        x = tl.load(matrix + row[:, None] * columns + column[None, :], mask=used, other=0)
        term = factor[:, None] * x.to(VALUE)
        if INTEGERS:
            q = term.to(tl.int32)
            total += q.to(out.dtype.element_ty)
            if P != 0:
                wide = q.to(tl.int64)
                amount = tl.sum(wide * wide if P == 2 else tl.abs(wide), axis=1)
                tl.atomic_add(power + row, amount, mask=factor != 0)
        else:
            total += term
    before = tl.load(out + column, mask=inside, other=0)
    tl.store(out + column, before + sign * tl.sum(total, axis=0), mask=inside)


def power_sums(matrix: torch.Tensor, rows: int, columns: int, p: int, power: torch.Tensor) -> None:
    """Compute ``power[row] = sum |x|^p``, float64."""
    chunks = -(-columns // CHUNK)
    partial = torch.empty(chunks, rows, dtype=torch.float64, device=matrix.device)
    meta: dict[str, Any] = {"P": p, "CHUNK": CHUNK, "BLOCK": _BLOCK}
    launch(_power_kernel, chunks * rows, matrix, matrix, partial, rows, columns, **meta)
    combine(partial, power)


def combine(partial: torch.Tensor, power: torch.Tensor) -> torch.Tensor:
    """Return ``power[row] = sum of partial[chunk, row]``, added in the order of the chunks."""
    (chunks, rows), block = partial.shape, 128
    launch(_combine_kernel, -(-rows // block), partial, partial, power, rows, chunks, BLOCK=block)
    return power


def added(parts: torch.Tensor) -> torch.Tensor:
    """Return float64 parts added over the last dimension."""
    terms = parts.shape[-1]
    if terms == 1:
        return parts[..., 0]
    out = parts.new_empty(parts.shape[:-1])
    block = min(1024, max(16, int(triton.next_power_of_2(terms))))
    launch(_added_kernel, out.numel(), parts, parts, out, terms, BLOCK=block)
    return out


def add_rows(
    matrix: torch.Tensor,
    factors: torch.Tensor,
    columns: int,
    out: torch.Tensor,
    *,
    sign: int = 1,
    p: int = 0,
    power: torch.Tensor | None = None,
) -> None:
    """Add ``out += sign sum_b factors[b] matrix[b]``; see the kernel."""
    launch(
        _sum_kernel,
        -(-columns // _COLUMNS) if len(factors) else 0,
        matrix,
        matrix,
        factors,
        out,
        factors if power is None else power,
        len(factors),
        columns,
        sign,
        P=0 if power is None else p,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
    )
