"""Per-sample gradients that exist anyway: norms, factors, sums (csrc/cpu/explicit.cpp)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import increment_version

from ....base.memory import memory_order
from .._extension import refuse_first
from .compile import Array, addresses, entries, kernel, like
from .parallel import in_parts, team_of
from .rows import add_row, clip_factor, power_sum, round_down

_GRAIN = 1 << 15  # entries worth a thread
_COLUMNS = 1 << 12  # of the sums that stay in the first cache

Tensors = Sequence[torch.Tensor]


@kernel
def _norms(rows: Array, columns: Array, like: Array, squares: Array, begin: int, end: int) -> None:
    for b in range(begin, end):
        total = 0.0
        for i in range(len(columns)):
            at = rows[i] + b * columns[i] * like.itemsize
            total += power_sum(entries(at, columns[i], like), 2)
        squares[b] = total


@kernel
def _factors(squares: Array, rule: Any, norms: Array, factors: Array) -> None:
    max_norm, scale, automatic = rule
    for b in range(len(norms)):
        square = 0.0
        for part in range(len(squares)):
            square += squares[part, b]
        norm = np.sqrt(square) * scale
        factor = clip_factor(norm, max_norm, automatic) if np.isfinite(norm) else 0.0
        norms[b] = norm
        factors[b] = round_down(factor * scale, factors.dtype.type)


@kernel
def _contract(items: Any, factors: Array, begin: int, end: int) -> None:
    """Sum columns ``begin .. end - 1`` of all sums end to end."""
    rows, columns, outs = items
    before = 0
    for i in range(len(columns)):
        first, last = max(begin - before, 0), min(end - before, columns[i])
        before += columns[i]
        for column in range(first, last, _COLUMNS):
            count = min(_COLUMNS, last - column)
            out = entries(outs[i] + column * factors.itemsize, count, factors)
            for b in range(len(factors)):
                if factors[b] == 0:
                    continue  # 0 * inf would not vanish
                at = rows[i] + (b * columns[i] + column) * factors.itemsize
                add_row(entries(at, count, factors), factors[b], out)


def _columns(grads: Tensors) -> Array:
    return np.array([part.stride(0) if part.numel() else 0 for part in grads], np.int64)


def _explicit_norm(grads: Tensors) -> torch.Tensor:
    batch = grads[0].shape[0]
    rows, columns, kind = addresses(grads), _columns(grads), like(grads[0].dtype)
    squares = np.empty(batch)
    team = team_of(batch, _GRAIN // max(1, int(columns.sum())))
    in_parts(batch, team, lambda _, *part: _norms(rows, columns, kind, squares, *part))
    return torch.from_numpy(squares)


def _clip_factors(
    squares: Tensors,
    max_grad_norm: float,
    *,
    dtype: torch.dtype,
    scale: float = 1.0,
    automatic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    norms = torch.empty(len(squares[0]), dtype=torch.float64, device="cpu")
    factors = torch.empty(len(norms), dtype=dtype, device="cpu")
    rule = float(max_grad_norm), float(scale), automatic
    _factors(torch.stack(list(squares)).detach().numpy(), rule, norms.numpy(), factors.numpy())
    return factors, norms


def _contracted(grads: Tensors, factors: torch.Tensor, outs: Tensors) -> None:
    # A gradient in another order of entries is summed in that order; the sum is put right at last.
    flat = [
        out if part.is_contiguous() else torch.zeros_like(out).view(-1)
        for part, out in zip(grads, outs, strict=True)
    ]
    items = addresses(grads), _columns(grads), addresses(flat)
    count = int(items[1].sum())
    team = team_of(count, max(64, _GRAIN // max(1, len(factors))))
    weights = factors.detach().numpy()
    in_parts(count, team, lambda _, *part: _contract(items, weights, *part))
    for part, out, total in zip(grads, outs, flat, strict=True):
        if total is out:
            increment_version(out)
            continue
        order = [i - 1 for i in memory_order(part)]
        with torch.no_grad():
            out.permute(order).add_(total.view([out.shape[i] for i in order]))


KERNELS: tuple[tuple[str, Any, Any], ...] = (
    ("ghost.explicit_norm", _explicit_norm, refuse_first),
    ("ghost.clip_factors", _clip_factors, refuse_first),
    ("ghost.contract", _contracted, refuse_first),
)
"""``(op, run, refuse)``."""
