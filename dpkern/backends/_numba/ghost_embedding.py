"""Embedding tables: norms and weighted sums of their gradients (csrc/cpu/ghost_embedding.cpp)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.autograd.graph import increment_version

from .. import _ghost_dense
from .compile import Array, inlined, kernel
from .parallel import in_parts, team_of
from .rows import power_sum

_GRAIN = 1 << 14  # entries worth a thread
_COLUMNS = 32  # of the table, at least, that a thread owns
_NO_PADDING = np.iinfo(np.int64).min


@inlined
def gamma(n: float) -> float:
    """n roundings of float64, to first order and a little more."""
    return 1.01 * n * 2.0**-53


@kernel
def _norms(
    ids: Array, order: Array, g: Array, padding: int, squares: Array, begin: int, end: int
) -> None:
    """Samples ``begin .. end - 1``; ``order`` puts equal ids of a sample together."""
    positions, columns = g.shape[1], g.shape[2]
    sums = np.empty(columns, np.float64)
    for b in range(begin, end):
        total = 0.0
        at = 0
        while at < positions:
            chosen = ids[b, order[b, at]]
            until = at + 1
            while until < positions and ids[b, order[b, until]] == chosen:
                until += 1
            if chosen == padding:
                at = until
                continue
            upper = 0.0
            if until == at + 1:
                upper = power_sum(g[b, order[b, at]], 2)
            else:
                sums[:] = 0.0
                absolute = 0.0
                for k in range(at, until):
                    row = g[b, order[b, k]]
                    for i in range(columns):
                        sums[i] += np.float64(row[i])
                    absolute += np.sqrt(power_sum(row, 2))
                terms = until - at + 64 + columns
                norm = np.sqrt(power_sum(sums, 2)) + gamma(2 * terms) * absolute
                upper = norm * norm
            # The squares are summed in any order: as many roundings as there are columns.
            total += upper * (1 + gamma(columns + 64))
            at = until
        squares[b] = total * (1 + gamma(positions + 4))


@kernel
def _sums(
    ids: Array, g: Array, factors: Array, padding: int, out: Array, begin: int, end: int
) -> None:
    """Columns ``begin .. end - 1`` of the table: no two threads write the same entry, and the order
    of the additions is that of the positions."""
    for b in range(len(factors)):
        factor = factors[b]
        if factor == 0:
            continue  # 0 * inf would not vanish
        for t in range(ids.shape[1]):
            if ids[b, t] == padding:
                continue
            row, to = g[b, t, begin:end], out[ids[b, t], begin:end]
            for i in range(len(row)):
                to[i] += factor * row[i]


def _padding(padding_idx: int | None) -> int:
    return int(_NO_PADDING) if padding_idx is None else padding_idx


def _embedding_norm(
    ids: torch.Tensor,
    g: torch.Tensor,
    *,
    padding_idx: int | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    batch = ids.shape[0]
    squares = np.empty(batch)
    order = ids.argsort(dim=1, stable=True)
    operands = ids.numpy(), order.numpy(), g.detach().numpy(), _padding(padding_idx)
    team = team_of(batch, _GRAIN // max(1, g.shape[1] * g.shape[2]))
    in_parts(batch, team, lambda _, *part: _norms(*operands, squares, *part))
    return torch.from_numpy(squares)


def _embedding_sum(
    ids: torch.Tensor,
    g: torch.Tensor,
    factors: torch.Tensor,
    out: torch.Tensor,
    *,
    padding_idx: int | None = None,
    backend: str | None = None,
) -> None:
    operands = ids.numpy(), g.detach().numpy(), factors.detach().numpy()
    target, columns = out.detach().numpy(), g.shape[2]
    team = team_of(columns, max(_COLUMNS, _GRAIN // max(1, ids.numel())))
    in_parts(columns, team, lambda _, *part: _sums(*operands, _padding(padding_idx), target, *part))
    increment_version(out)


KERNELS: tuple[tuple[str, Any, Any], ...] = (
    ("ghost.embedding_norm", _embedding_norm, _ghost_dense._refuse),
    ("ghost.embedding_sum", _embedding_sum, _ghost_dense._refuse),
)
"""``(op, run, refuse)``."""
