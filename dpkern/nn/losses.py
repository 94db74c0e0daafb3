"""Losses with one number for each sample, divided by that sample's own counts.

A mean over the tokens of a batch divides every sample by a number that depends on the others. These
divide each sample by its own, so that one record changes its own term only.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..base import validate as check


def per_sample_mean(terms: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the mean of each sample's terms, over those that its mask selects.

        out_b = sum_t m_bt l_bt / max(1, sum_t m_bt)

    Args:
        terms: ``[B, ...]``, one term for each position, such as a loss with ``reduction="none"``.
        mask: numbers or booleans of the same shape. None selects all.

    Returns:
        ``[B]``; take its mean for the loss. A sample without selected terms has 0.

    Raises:
        InvalidInput: tensors of other shapes.

    Example:
        ``per_sample_mean(F.mse_loss(out, y, reduction="none"), mask).mean().backward()``
    """
    check.that(
        terms.dim() > 0, "terms", "one row for each sample", "a scalar", "Keep the batch first."
    )
    if mask is None:
        return terms.flatten(1).mean(1) if terms.dim() > 1 else terms
    check.that(
        mask.shape == terms.shape, "mask", f"shape {list(terms.shape)}", f"{list(mask.shape)}",
        "Expand the mask to the terms.",
    )  # fmt: skip
    weights = mask.to(terms.dtype)
    if terms.dim() == 1:
        return terms * (weights != 0)
    return (terms * weights).flatten(1).sum(1) / weights.flatten(1).sum(1).clamp(min=1)


def per_sample_cross_entropy(
    logits: Tensor, target: Tensor, *, ignore_index: int = -100, label_smoothing: float = 0.0
) -> Tensor:
    """Return each sample's mean cross entropy over its own targets.

    Args:
        logits: ``[B, T, V]`` or ``[B, V]``.
        target: ``[B, T]`` or ``[B]``, class numbers.
        ignore_index: targets that do not count.
        label_smoothing: a number as in ``torch.nn.functional.cross_entropy``.

    Returns:
        ``[B]``; take its mean for the loss.

    Raises:
        InvalidInput: shapes that do not belong together.
    """
    check.that(
        logits.shape[:-1] == target.shape, "target", f"shape {list(logits.shape[:-1])}",
        f"{list(target.shape)}", "Pass logits with the classes last.",
    )  # fmt: skip
    terms = F.cross_entropy(
        logits.flatten(0, -2), target.flatten(), reduction="none",
        ignore_index=ignore_index, label_smoothing=label_smoothing,
    )  # fmt: skip
    return per_sample_mean(terms.view(target.shape), target != ignore_index)
