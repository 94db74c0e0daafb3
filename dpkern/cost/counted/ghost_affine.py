"""Normalisation layers, counted. What is normalised and scaled is made twice, for the means and for
the input's gradient, as in the kernels; without a weight nothing is scaled."""

from __future__ import annotations

import torch

from ...ops.ghost.affine import Gradients
from ._layers import address, run
from ._tally import Kernel, Tally


def _layer_norm_backward(
    g: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
) -> tuple[Gradients, Tally]:
    dx = torch.empty_like(x, requires_grad=False)
    dweight, dbias = (torch.empty(len(g), g.shape[2], dtype=g.dtype) for _ in range(2))
    operands = g, x, mean, rstd, address(weight), dx, dweight, dbias
    return (dx, dweight, dbias), run("layer_norm_backward", g.dtype, True, *operands, *g.shape)


def _rms_norm_backward(
    g: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor | None
) -> tuple[tuple[torch.Tensor, torch.Tensor], Tally]:
    dx = torch.empty_like(x, requires_grad=False)
    dweight = torch.empty(len(g), g.shape[2], dtype=g.dtype)
    operands = g, x, 0, rstd, address(weight), dx, dweight, 0
    return (dx, dweight), run("layer_norm_backward", g.dtype, False, *operands, *g.shape)


def _group_norm_backward(
    g: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
) -> tuple[Gradients, Tally]:
    dx = torch.empty_like(x, requires_grad=False)
    dweight, dbias = (torch.empty(*g.shape[:2], dtype=g.dtype) for _ in range(2))
    groups = mean.shape[1]
    sizes = len(g), groups, g.shape[1] // groups, g.shape[2]
    operands = g, x, mean, rstd, address(weight), dx, dweight, dbias
    return (dx, dweight, dbias), run("group_norm_backward", g.dtype, *operands, *sizes)


KERNELS: dict[str, Kernel] = {
    "ghost.layer_norm_backward": _layer_norm_backward,
    "ghost.rms_norm_backward": _rms_norm_backward,
    "ghost.group_norm_backward": _group_norm_backward,
}
