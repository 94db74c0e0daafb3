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


def _layer_norm_by_products(args: Arguments) -> Call:
    """Return the native gradient of the input, and sums over positions as products."""
    g, x, mean, rstd, weight = (args[n] for n in ("g", "x", "mean", "rstd", "weight"))
    backward: Any = torch.ops.aten.native_layer_norm_backward
    ones, products = torch.ones_like(rstd)[:, None], torch.empty_like(g)

    def call() -> Any:
        means, inverses = mean[..., None], rstd[..., None]
        mask = [True, False, False]
        dx = backward(g, x, [x.shape[2]], means, inverses, weight, None, mask)[0]
        scaled = torch.bmm(rstd[:, None], torch.mul(g, x, out=products))
        return dx, (scaled - torch.bmm((rstd * mean)[:, None], g))[:, 0], torch.bmm(ones, g)[:, 0]

    return call


def _layer_norm_by_sample(args: Arguments) -> Call:
    """Return the whole native backward pass of each sample."""
    g, x, mean, rstd, weight = (args[n] for n in ("g", "x", "mean", "rstd", "weight"))
    backward: Any = torch.ops.aten.native_layer_norm_backward
    parts = list(zip(g, x, mean[..., None], rstd[..., None], strict=True))

    def call() -> Any:
        mask, size = [True, True, True], [x.shape[2]]
        each = (backward(*some[:2], size, *some[2:], weight, weight, mask) for some in parts)
        return tuple(torch.stack(found) for found in zip(*each, strict=True))

    return call


def _rms_norm_by_products(args: Arguments) -> Call:
    """Return the same in two passes over ``g`` and one product for each sum."""
    g, x, rstd, weight = (args[n] for n in ("g", "x", "rstd", "weight"))
    products = torch.empty_like(g)

    def call() -> Any:
        torch.mul(g, x, out=products)
        inner = (products @ weight) * rstd.pow(3) / x.shape[2]
        dx = (g * weight).mul_(rstd[..., None]).addcmul_(x, inner[..., None], value=-1)
        return dx, torch.bmm(rstd[:, None], products)[:, 0]

    return call


def _rms_norm_by_sample(args: Arguments) -> Call:
    """Return the same, sample by sample, in buffers that stay in a core's cache."""
    g, x, rstd, weight = (args[n] for n in ("g", "x", "rstd", "weight"))
    products = torch.empty_like(g[0])
    made, sums = torch.empty_like(g), g.new_empty(len(g), g.shape[2])

    def call() -> Any:
        cubes = rstd.pow(3) / x.shape[2]
        each = zip(g, x, rstd, cubes, made, sums, strict=True)
        for grads, inputs, inverses, cube, dx, total in each:
            torch.mul(grads, inputs, out=products)
            torch.mul(grads, weight, out=dx).mul_(inverses[:, None])
            inner = torch.mv(products, weight).mul_(cube)
            dx.addcmul_(inputs, inner[:, None], value=-1)
            torch.mv(products.t(), inverses, out=total)
        return made, sums

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


def _group_norm_by_dots(args: Arguments) -> Call:
    g, x, mean, rstd, weight = (args[n] for n in ("g", "x", "mean", "rstd", "weight"))
    backward: Any = torch.ops.aten.native_group_norm_backward
    batch, channels, places = x.shape
    each = channels // mean.shape[1]

    def call() -> Any:
        sizes = batch, channels, places, mean.shape[1], [True, False, False]
        dx = backward(g, x, mean, rstd, weight, *sizes)[0]
        total, products = g.sum(2), torch.linalg.vecdot(g, x)
        shift = mean.repeat_interleave(each, 1) * total
        return dx, (products - shift) * rstd.repeat_interleave(each, 1), total

    return call


def _group_norm_by_sample(args: Arguments) -> Call:
    """Return the whole native backward pass of each sample."""
    g, x, mean, rstd, weight = (args[n] for n in ("g", "x", "mean", "rstd", "weight"))
    backward: Any = torch.ops.aten.native_group_norm_backward
    parts = list(zip(*(t.split(1) for t in (g, x, mean, rstd)), strict=True))

    def call() -> Any:
        sizes = 1, *x.shape[1:], mean.shape[1], [True, True, True]
        found = zip(*(backward(*some, weight, *sizes) for some in parts), strict=True)
        dx, products, total = found
        return torch.cat(dx), torch.stack(products), torch.stack(total)

    return call


def _weighs(args: Arguments) -> bool:
    return args["weight"] is not None


FORMULATIONS = {
    "ghost.layer_norm_backward": (
        Formulation("native backward, bmm", _layer_norm_by_products, _weighs),
        Formulation("native backward, sample by sample", _layer_norm_by_sample, _weighs),
        Formulation("formula", _layer_norm, _weighs, compiles=True),
        Formulation("native backward", _layer_norm_native, _weighs),
    ),
    "ghost.rms_norm_backward": (
        Formulation("bmm", _rms_norm_by_products, _weighs),
        Formulation("products, sample by sample", _rms_norm_by_sample, _weighs),
        Formulation("formula", _rms_norm, _weighs, compiles=True),
        Formulation("einsum", _rms_norm_by_einsum, _weighs),
    ),
    "ghost.group_norm_backward": (
        Formulation("native backward, vecdot", _group_norm_by_dots, _weighs),
        Formulation("native backward, sample by sample", _group_norm_by_sample, _weighs),
        Formulation("formula", _group_norm, _weighs, compiles=True),
        Formulation("native backward", _group_norm_native, _weighs),
    ),
}
