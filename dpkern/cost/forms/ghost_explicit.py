"""Closed forms of norms, factors and weighted sums of materialized per-sample gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...base.counts import WALK, Counts, Item, Itemised
from . import clip
from ._form import Form
from ._layers import WIDE, moved

Tensors = Sequence[torch.Tensor]


def _columns(grads: Tensors) -> list[int]:
    return [part.shape[1:].numel() for part in grads]


def explicit_norm(grads: Tensors, **_: Any) -> Itemised:
    """Count ``ghost.explicit_norm``."""
    batch, columns = len(grads[0]), _columns(grads)
    entries = sum(columns)
    powers = sum((clip.power_sum(n, 2) for n in columns), Counts(ADD=clip.sum_of(len(grads))))
    widened = Counts(CVT=clip.WIDENED[grads[0].dtype] * entries)
    return Itemised(
        (
            moved([(batch * entries, grads[0].dtype)], [(batch, WIDE)]),
            Item(name="squares", counts=batch * (powers + widened), evidence=WALK),
        )
    )


def clip_factors(
    squares: Tensors,
    max_grad_norm: float,
    *,
    dtype: torch.dtype,
    automatic: bool = False,
    clipped: int | None = None,
    nonfinite: int = 0,
    **_: Any,
) -> Itemised:
    """Count ``ghost.clip_factors``.

    Args:
        squares, max_grad_norm, dtype, automatic: the op's arguments.
        clipped: samples beyond the bound. None means all that are finite.
        nonfinite: samples whose norm is not finite.
    """
    batch, parts = len(squares[0]), len(squares)
    finite = batch - nonfinite
    norm = Counts(ADD=clip.sum_of(parts), SQRT=1, MUL=1, CMP=1)
    factors = finite * clip.factor(automatic)
    if not automatic:
        factors += Counts(DIV=finite if clipped is None else clipped)
    return Itemised(
        (
            moved([(batch * parts, WIDE)], [(batch, WIDE), (batch, dtype)]),
            Item(name="norms", counts=batch * norm),
            clip.rounded("factors", factors + Counts(MUL=batch), batch, dtype),
        )
    )


def contract(
    grads: Tensors, factors: torch.Tensor, outs: Tensors, *, dropped: int = 0, **_: Any
) -> Itemised:
    """Count ``ghost.contract``; gradients of the ``dropped`` samples of factor 0 are not read."""
    batch, entries = len(factors), sum(_columns(grads))
    used = batch - dropped
    parts = sum(1 for n in _columns(grads) if n)
    touched = entries if used else 0
    read = used * entries + touched + (batch if parts else 0)
    return Itemised(
        (
            moved([(read, factors.dtype)], [(touched, factors.dtype)]),
            Item(name="tests", counts=Counts(CMP=batch * parts)),
            Item(name="sums", counts=used * entries * Counts(MUL=1, ADD=1), evidence=WALK),
        )
    )


FORMS: dict[str, Form] = {
    "ghost.explicit_norm": explicit_norm,
    "ghost.clip_factors": clip_factors,
    "ghost.contract": contract,
}
