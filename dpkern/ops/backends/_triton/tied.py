"""The inner product of the two gradients of a weight that embeds and projects.

A program holds 16 positions of the embedding and walks the projection's, 16 at a time: the table of
their inner products in float64, times the output gradients that the ids choose.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ...ghost._bounds import gamma
from .launch import launch
from .operands import NO_PADDING, product
from .rows import added

_META: dict[str, Any] = {"ROWS": 16, "DEPTH": 32}


@triton.jit
def _tile(of, rows, used, first, columns, DEPTH: tl.constexpr):
    """Load ``DEPTH`` columns of these rows in float64, zeros outside and where not used."""
    column = first + tl.arange(0, DEPTH)
    inside = used[:, None] & (column < columns)[None, :]
    return tl.load(of + rows[:, None] * columns + column[None, :], mask=inside, other=0).to(
        tl.float64
    )


@triton.jit(do_not_specialize=["count", "positions", "columns", "words", "blocks", "padding"])
def _cross_kernel(
    ids,
    e,
    a,
    g,
    products,
    absolutes,
    count: tl.int64,
    positions: tl.int64,
    columns: tl.int64,
    words: tl.int64,
    blocks: tl.int64,
    padding: tl.int64,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Sum ``g[t, id_s] <a_t, e_s>`` over one block of s and all t, and its absolute terms.

    The absolute terms are ``|g[t, id_s]| |a_t| |e_s|``.
    """
    program = tl.program_id(0).to(tl.int64)
    sample, block = program // blocks, program % blocks
    s = block * ROWS + tl.arange(0, ROWS)
    token = tl.load(ids + sample * count + s, mask=s < count, other=0)
    chosen = (s < count) & (token != padding)
    total = tl.zeros((ROWS,), tl.float64)
    absolute = tl.zeros((ROWS,), tl.float64)
    for first in range(0, positions, ROWS):
        t = first + tl.arange(0, ROWS)
        there = t < positions
        inner = tl.zeros((ROWS, ROWS), tl.float64)
        a_square = tl.zeros((ROWS,), tl.float64)
        e_square = tl.zeros((ROWS,), tl.float64)
        for depth in range(0, columns, DEPTH):
            x = _tile(a, sample * positions + t, there, depth, columns, DEPTH)
            y = _tile(e, sample * count + s, chosen, depth, columns, DEPTH)
            inner += product(x, tl.trans(y), tl.float64, "ieee")
            a_square += tl.sum(x * x, 1)
            e_square += tl.sum(y * y, 1)
        at = (sample * positions + t)[:, None] * words + token[None, :]
        picked = tl.load(g + at, mask=there[:, None] & chosen[None, :], other=0).to(tl.float64)
        sizes = tl.sqrt(a_square)[:, None] * tl.sqrt(e_square)[None, :]
        total += tl.sum(picked * inner, 0)
        absolute += tl.sum(tl.abs(picked) * sizes, 0)
    tl.store(products + program, tl.sum(total))
    tl.store(absolutes + program, tl.sum(absolute))


def _tied_cross(
    ids: torch.Tensor,
    e: torch.Tensor,
    a: torch.Tensor,
    g: torch.Tensor,
    *,
    padding_idx: int | None = None,
) -> torch.Tensor:
    (batch, count), positions, columns = ids.shape, a.shape[1], a.shape[2]
    blocks = -(-count // _META["ROWS"])
    parts = torch.zeros(2, batch, blocks, dtype=torch.float64, device=e.device)
    launch(
        _cross_kernel,
        batch * blocks,
        e,
        ids,
        e,
        a,
        g,
        parts[0],
        parts[1],
        count,
        positions,
        columns,
        g.shape[2],
        blocks,
        NO_PADDING if padding_idx is None else padding_idx,
        fused=True,
        **_META,
    )
    products, absolute = added(parts)
    upper: torch.Tensor = products + gamma(2 * (count + positions + columns) + 64) * absolute
    return upper


def _never(*_: Any, **__: Any) -> None:
    return None


KERNELS: tuple[tuple[str, Any, Any], ...] = (("ghost.tied_cross", _tied_cross, _never),)
"""``(op, run, refuse)``."""
