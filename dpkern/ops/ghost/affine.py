"""Normalisation layers: input gradient and per-sample gradients of scale and shift in one pass.

``y = xhat weight + bias`` with ``xhat = (x - mean) rstd`` over the normalised entries. With
``h = g weight`` and means over these entries, ``dx = rstd (h - mean(h) - xhat mean(h xhat))``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...base.dispatch import op
from ...base.errors import InvalidInput
from ...base.signature import Float


@op()
@torch.no_grad()
def layer_norm_backward(
    g: Float[Tensor, "B T D"],
    x: Float[Tensor, "B T D"],
    mean: Float[Tensor, "B T"],
    rstd: Float[Tensor, "B T"],
    weight: Float[Tensor, "D"] | None,
) -> tuple[Float[Tensor, "dx: B T D"], Float[Tensor, "dweight: B D"], Float[Tensor, "dbias: B D"]]:
    """Run the backward pass of layer normalisation over the last dimension.

    Args:
        g: output gradients ``[B, T, D]``, float32 or float64.
        x: layer inputs ``[B, T, D]``, same dtype.
        mean, rstd: mean and ``1 / sqrt(var + eps)`` of each row, ``[B, T]``, same dtype.
        weight: scale ``[D]``, or None for ones.

    Returns:
        ``dx`` ``[B, T, D]``, per-sample ``dweight = sum_t g xhat`` and ``dbias = sum_t g``, both
        ``[B, D]``. T = 0 gives zeros.

    Raises:
        InvalidInput: wrong type, shape, dtype, device or layout.

    Reference: Ba et al. 2016.
    """
    xhat = (x - mean[..., None]) * rstd[..., None]
    h = g if weight is None else g * weight
    centred = h - h.mean(2, keepdim=True) - xhat * (h * xhat).mean(2, keepdim=True)
    return rstd[..., None] * centred, (g * xhat).sum(1), g.sum(1)


@op()
@torch.no_grad()
def rms_norm_backward(
    g: Float[Tensor, "B T D"],
    x: Float[Tensor, "B T D"],
    rstd: Float[Tensor, "B T"],
    weight: Float[Tensor, "D"] | None,
) -> tuple[Float[Tensor, "dx: B T D"], Float[Tensor, "dweight: B D"]]:
    """Run the backward pass of root-mean-square normalisation over the last dimension.

    Args:
        g: output gradients ``[B, T, D]``, float32 or float64.
        x: layer inputs ``[B, T, D]``, same dtype.
        rstd: ``1 / sqrt(mean(x^2) + eps)`` of each row, ``[B, T]``, same dtype.
        weight: scale ``[D]``, or None for ones.

    Returns:
        ``dx = rstd (h - xhat mean(h xhat))`` ``[B, T, D]`` with ``xhat = x rstd``, and per-sample
        ``dweight = sum_t g xhat`` ``[B, D]``. T = 0 gives zeros.

    Raises:
        InvalidInput: wrong type, shape, dtype, device or layout.

    Reference: Zhang and Sennrich 2019.
    """
    xhat = x * rstd[..., None]
    h = g if weight is None else g * weight
    centred = h - xhat * (h * xhat).mean(2, keepdim=True)
    return rstd[..., None] * centred, (g * xhat).sum(1)


def _check_groups(g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None) -> None:
    if not mean.shape[1] or g.shape[1] % mean.shape[1]:
        raise InvalidInput(
            "mean",
            expected=f"[B, groups] with groups that divide {g.shape[1]} channels",
            got=f"{mean.shape[1]} groups",
            remedy="Pass the statistics of the layer's forward.",
        )


@op(check=_check_groups)
@torch.no_grad()
def group_norm_backward(
    g: Float[Tensor, "B C S"],
    x: Float[Tensor, "B C S"],
    mean: Float[Tensor, "B groups"],
    rstd: Float[Tensor, "B groups"],
    weight: Float[Tensor, "C"] | None,
) -> tuple[Float[Tensor, "dx: B C S"], Float[Tensor, "dweight: B C"], Float[Tensor, "dbias: B C"]]:
    """Run the backward pass of group normalisation; instance normalisation has C groups.

    Args:
        g: output gradients ``[B, C, S]`` over S places, float32 or float64.
        x: layer inputs ``[B, C, S]``, same dtype.
        mean, rstd: mean and ``1 / sqrt(var + eps)`` of each group of ``C / groups`` channels,
            ``[B, groups]``, same dtype.
        weight: scale ``[C]``, or None for ones.

    Returns:
        ``dx`` ``[B, C, S]``, per-sample ``dweight = sum_s g xhat`` and ``dbias = sum_s g``, both
        ``[B, C]``. S = 0 gives zeros.

    Raises:
        InvalidInput: wrong type, shape, dtype, device or layout; groups that do not divide C.

    Reference: Wu and He 2018.
    """
    batch, groups = mean.shape
    channels = g.shape[1] // groups
    grouped = (batch, groups, channels, g.shape[2])
    xhat = (x.view(grouped) - mean[..., None, None]) * rstd[..., None, None]
    y = g.view(grouped)
    h = y if weight is None else y * weight.view(1, groups, channels, 1)
    centred = h - h.mean((2, 3), keepdim=True) - xhat * (h * xhat).mean((2, 3), keepdim=True)
    dx = (rstd[..., None, None] * centred).view_as(x)
    return dx, (y * xhat).sum(3).flatten(1), y.sum(3).flatten(1)


__all__ = ["group_norm_backward", "layer_norm_backward", "rms_norm_backward"]
