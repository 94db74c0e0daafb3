"""Backward passes of normalisation layers with per-sample gradients, with torch alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ._formulation import Arguments, Formulation

Call = Callable[[], Any]

# normalisation layers


def _layer_norm(args: Arguments) -> Call:
    g, x, mean, rstd, weight = (args[n] for n in ("g", "x", "mean", "rstd", "weight"))

    def call() -> Any:
        xhat = (x - mean[..., None]) * rstd[..., None]
        h = g * weight
        centred = h - h.mean(2, keepdim=True) - xhat * (h * xhat).mean(2, keepdim=True)
        return rstd[..., None] * centred, (g * xhat).sum(1), g.sum(1)

    return call


def _layer_norm_native(args: Arguments) -> Call:
    g, x, mean, rstd, weight = (args[n] for n in ("g", "x", "mean", "rstd", "weight"))
    backward: Any = torch.ops.aten.native_layer_norm_backward

    def call() -> Any:
        means, inverses = mean[..., None], rstd[..., None]
        mask = [True, False, False]
        dx = backward(g, x, [x.shape[2]], means, inverses, weight, None, mask)[0]
        return dx, (g * (x - means) * inverses).sum(1), g.sum(1)

    return call


def _rms_norm(args: Arguments) -> Call:
    g, x, rstd, weight = (args[n] for n in ("g", "x", "rstd", "weight"))

    def call() -> Any:
        xhat = x * rstd[..., None]
        h = g * weight
        centred = h - xhat * (h * xhat).mean(2, keepdim=True)
        return rstd[..., None] * centred, (g * xhat).sum(1)

    return call


def _rms_norm_by_einsum(args: Arguments) -> Call:
    g, x, rstd, weight = (args[n] for n in ("g", "x", "rstd", "weight"))

    def call() -> Any:
        xhat = x * rstd[..., None]
        inner = torch.einsum("btd,btd,d->bt", g, xhat, weight) / x.shape[2]
        dx = torch.addcmul(g * weight, xhat, inner[..., None], value=-1).mul_(rstd[..., None])
        return dx, torch.einsum("btd,btd->bd", g, xhat)

    return call


def _group_norm(args: Arguments) -> Call:
    g, x, mean, rstd, weight = (args[n] for n in ("g", "x", "mean", "rstd", "weight"))
    shape = (*mean.shape, x.shape[1] // mean.shape[1], x.shape[2])

    def call() -> Any:
        xhat = (x.view(shape) - mean[..., None, None]) * rstd[..., None, None]
        y = g.view(shape)
        h = y * weight.view(1, shape[1], shape[2], 1)
        centred = h - h.mean((2, 3), keepdim=True) - xhat * (h * xhat).mean((2, 3), keepdim=True)
        dx = (rstd[..., None, None] * centred).view_as(x)
        return dx, (y * xhat).sum(3).flatten(1), y.sum(3).flatten(1)

    return call


def _group_norm_native(args: Arguments) -> Call:
    g, x, mean, rstd, weight = (args[n] for n in ("g", "x", "mean", "rstd", "weight"))
    backward: Any = torch.ops.aten.native_group_norm_backward
    batch, channels, places = x.shape
    each = channels // mean.shape[1]

    def call() -> Any:
        sizes = batch, channels, places, mean.shape[1], [True, False, False]
        dx = backward(g, x, mean, rstd, weight, *sizes)[0]
        total = g.sum(2)
        products = torch.einsum("bcs,bcs->bc", g, x)
        shift = mean.repeat_interleave(each, 1) * total
        return dx, (products - shift) * rstd.repeat_interleave(each, 1), total

    return call


def _weighs(args: Arguments) -> bool:
    return args["weight"] is not None


FORMULATIONS = {
    "ghost.layer_norm_backward": (
        Formulation("formula", _layer_norm, _weighs),
        Formulation("native backward", _layer_norm_native, _weighs),
    ),
    "ghost.rms_norm_backward": (
        Formulation("formula", _rms_norm, _weighs),
        Formulation("einsum", _rms_norm_by_einsum, _weighs),
    ),
    "ghost.group_norm_backward": (
        Formulation("formula", _group_norm, _weighs),
        Formulation("native backward", _group_norm_native, _weighs),
    ),
}
