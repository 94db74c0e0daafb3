"""Closed forms of the backward of normalisation layers.

Per entry ``xhat = (x - mean) rstd`` and ``h = g weight`` are made twice, for the two means and for
``dx = rstd (h - mean(h) - xhat mean(h xhat))``; without a weight ``h`` is ``g``.
"""

from __future__ import annotations

from typing import Any

import torch

from ...base.counts import Counts, Itemised
from ._form import Form
from ._layers import dots, itemised


def _row_norm(g: torch.Tensor, weight: torch.Tensor | None, centred: bool) -> Itemised:
    batch, rows, columns = g.shape
    lines, statistics = batch * rows, 1 + centred
    normal = Counts(MUL=1, SUB=1 if centred else 0)
    scaled = Counts(MUL=0 if weight is None else 1)
    sums = dots(2) + Counts(ADD=2 if centred else 0)
    made = Counts(SUB=statistics, MUL=2)
    weights = columns if weight is not None and lines else 0
    return itemised(
        [(2 * g.numel() + statistics * lines + weights, g.dtype)],
        [(g.numel() + statistics * batch * columns, g.dtype)],
        walked=("sums", "means", "input_gradient"),
        normalised_and_scaled=2 * g.numel() * (normal + scaled),
        sums=g.numel() * sums,
        means=Counts(DIV=statistics * lines),
        input_gradient=g.numel() * made,
    )


def layer_norm_backward(
    g: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    **_: Any,
) -> Itemised:
    """Count ``ghost.layer_norm_backward``."""
    return _row_norm(g, weight, centred=True)


def rms_norm_backward(
    g: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor | None, **_: Any
) -> Itemised:
    """Count ``ghost.rms_norm_backward``."""
    return _row_norm(g, weight, centred=False)


def group_norm_backward(
    g: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    **_: Any,
) -> Itemised:
    """Count ``ghost.group_norm_backward``: a channel's sums are scaled, not its entries."""
    batch, channels = g.shape[:2]
    maps, scaled = batch * channels, Counts(MUL=0 if weight is None else 1)
    weights = channels if weight is not None and batch else 0
    return itemised(
        [(2 * g.numel() + 2 * mean.numel() + weights, g.dtype)],
        [(g.numel() + 2 * maps, g.dtype)],
        normalised=2 * g.numel() * Counts(SUB=1, MUL=1),
        sums=g.numel() * Counts(MUL=1, ADD=2) + 2 * maps * (scaled + Counts(ADD=1)),
        means=Counts(DIV=2 * mean.numel()),
        input_gradient=g.numel() * (scaled + Counts(SUB=2, MUL=2)),
    )


FORMS: dict[str, Form] = {
    "ghost.layer_norm_backward": layer_norm_backward,
    "ghost.rms_norm_backward": rms_norm_backward,
    "ghost.group_norm_backward": group_norm_backward,
}
