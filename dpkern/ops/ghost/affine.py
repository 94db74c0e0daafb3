"""Normalisation layers: input gradient and per-sample gradients of scale and shift in one pass.

``y = xhat weight + bias`` with ``xhat = (x - mean) rstd`` over the normalised entries. With
``h = g weight`` and means over these entries, ``dx = rstd (h - mean(h) - xhat mean(h xhat))``.
"""

from __future__ import annotations

from typing import Any

import torch

from ...base import validate as check
from ...base.dispatch import op
from ...base.errors import InvalidInput
from ._bounds import FLOATS

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _check_operands(
    g: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, features: int
) -> dict[str, Any]:
    """``g`` and ``x`` of one shape ``[*, *, *]``, ``weight`` over dimension ``features``."""
    check.tensor(g=g, shape=(None, None, None), dtypes=FLOATS, contiguous=True)
    kind: dict[str, Any] = {"dtypes": (g.dtype,), "device": g.device, "contiguous": True}
    check.tensor(x=x, shape=g.shape, **kind)
    if weight is not None:
        check.tensor(weight=weight, shape=(g.shape[features],), **kind)
    return kind


def _validate_layer_norm(
    g: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    backend: str | None = None,
) -> str:
    kind = _check_operands(g, x, weight, 2)
    check.tensor(mean=mean, shape=g.shape[:2], **kind)
    check.tensor(rstd=rstd, shape=g.shape[:2], **kind)
    return g.device.type


@op(validate=_validate_layer_norm)
@torch.no_grad()
def layer_norm_backward(
    g: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    backend: str | None = None,
) -> Gradients:
    """Backward of layer normalisation over the last dimension (Ba et al. 2016).

    Args:
        g: output gradients ``[B, T, D]``, float32 or float64.
        x: layer inputs ``[B, T, D]``, same dtype.
        mean, rstd: mean and ``1 / sqrt(var + eps)`` of each row, ``[B, T]``, same dtype.
        weight: scale ``[D]``, or None for ones.
        backend: who runs it.

    Returns:
        ``dx`` ``[B, T, D]``, per-sample ``dweight = sum_t g xhat`` and ``dbias = sum_t g``, both
        ``[B, D]``. T = 0 gives zeros.

    Raises:
        InvalidInput: wrong type, shape, dtype, device or layout.
    """
    xhat = (x - mean[..., None]) * rstd[..., None]
    h = g if weight is None else g * weight
    centred = h - h.mean(2, keepdim=True) - xhat * (h * xhat).mean(2, keepdim=True)
    return rstd[..., None] * centred, (g * xhat).sum(1), g.sum(1)


def _validate_rms_norm(
    g: torch.Tensor,
    x: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    backend: str | None = None,
) -> str:
    kind = _check_operands(g, x, weight, 2)
    check.tensor(rstd=rstd, shape=g.shape[:2], **kind)
    return g.device.type


@op(validate=_validate_rms_norm)
@torch.no_grad()
def rms_norm_backward(
    g: torch.Tensor,
    x: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Backward of root-mean-square normalisation over the last dimension (Zhang, Sennrich 2019).

    Args:
        g: output gradients ``[B, T, D]``, float32 or float64.
        x: layer inputs ``[B, T, D]``, same dtype.
        rstd: ``1 / sqrt(mean(x^2) + eps)`` of each row, ``[B, T]``, same dtype.
        weight: scale ``[D]``, or None for ones.
        backend: who runs it.

    Returns:
        ``dx = rstd (h - xhat mean(h xhat))`` ``[B, T, D]`` with ``xhat = x rstd``, and per-sample
        ``dweight = sum_t g xhat`` ``[B, D]``. T = 0 gives zeros.

    Raises:
        InvalidInput: wrong type, shape, dtype, device or layout.
    """
    xhat = x * rstd[..., None]
    h = g if weight is None else g * weight
    centred = h - xhat * (h * xhat).mean(2, keepdim=True)
    return rstd[..., None] * centred, (g * xhat).sum(1)


def _validate_group_norm(
    g: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    backend: str | None = None,
) -> str:
    kind = _check_operands(g, x, weight, 1)
    check.tensor(mean=mean, shape=(g.shape[0], None), **kind)
    check.tensor(rstd=rstd, shape=mean.shape, **kind)
    if not mean.shape[1] or g.shape[1] % mean.shape[1]:
        raise InvalidInput(
            "mean",
            expected=f"[B, groups] with groups that divide {g.shape[1]} channels",
            got=f"{mean.shape[1]} groups",
            remedy="Pass the statistics of the layer's forward.",
        )
    return g.device.type


@op(validate=_validate_group_norm)
@torch.no_grad()
def group_norm_backward(
    g: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    backend: str | None = None,
) -> Gradients:
    """Backward of group normalisation (Wu, He 2018); instance normalisation has C groups.

    Args:
        g: output gradients ``[B, C, S]`` over S places, float32 or float64.
        x: layer inputs ``[B, C, S]``, same dtype.
        mean, rstd: mean and ``1 / sqrt(var + eps)`` of each group of ``C / groups`` channels,
            ``[B, groups]``, same dtype.
        weight: scale ``[C]``, or None for ones.
        backend: who runs it.

    Returns:
        ``dx`` ``[B, C, S]``, per-sample ``dweight = sum_s g xhat`` and ``dbias = sum_s g``, both
        ``[B, C]``. S = 0 gives zeros.

    Raises:
        InvalidInput: wrong type, shape, dtype, device or layout; groups that do not divide C.
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


__all__ = ["Gradients", "group_norm_backward", "layer_norm_backward", "rms_norm_backward"]
