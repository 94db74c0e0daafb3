"""Embedding tables, counted. Which rows meet is a matter of addresses: bringing equal ids together
is free, a test for the padding is a comparison."""

from __future__ import annotations

import torch

from ._layers import run
from ._tally import Kernel, Tally


def _embedding_norm(
    ids: torch.Tensor, g: torch.Tensor, *, padding_idx: int | None = None
) -> tuple[torch.Tensor, Tally]:
    squares = torch.empty(len(ids), dtype=torch.float64)
    return squares, run("embedding_norm", g.dtype, ids, g, *g.shape, padding_idx, squares)


def _embedding_sum(
    ids: torch.Tensor,
    g: torch.Tensor,
    factors: torch.Tensor,
    out: torch.Tensor,
    *,
    padding_idx: int | None = None,
) -> tuple[None, Tally]:
    sizes = *g.shape, padding_idx
    return None, run("embedding_sum", g.dtype, ids, g, *sizes, factors, len(out), out)


def _tied_cross(
    ids: torch.Tensor,
    e: torch.Tensor,
    a: torch.Tensor,
    g: torch.Tensor,
    *,
    padding_idx: int | None = None,
) -> tuple[torch.Tensor, Tally]:
    products = torch.empty(len(ids), dtype=torch.float64)
    sizes = *e.shape, padding_idx
    return products, run(
        "tied_cross", e.dtype, ids, e, *sizes, a, g, a.shape[1], g.shape[2], products
    )


KERNELS: dict[str, Kernel] = {
    "ghost.embedding_norm": _embedding_norm,
    "ghost.embedding_sum": _embedding_sum,
    "ghost.tied_cross": _tied_cross,
}
