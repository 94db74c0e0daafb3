"""Norms, gradients and sums of convolutions with torch: unfold, windows, groups, autograd."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.grad import conv2d_weight as _untyped_conv2d_weight

from ._formulation import Arguments, Formulation
from .ghost import flat_squares

Call = Callable[[], Any]
conv2d_weight: Callable[..., torch.Tensor] = _untyped_conv2d_weight
BLOCK = 1 << 17
"""Numbers of windows that stay in a core's cache."""


def _geometry(args: Arguments) -> dict[str, Any]:
    names = ("stride", "padding", "dilation")
    return {name: args[name] for name in names}


def _kernel(args: Arguments) -> tuple[int, int]:
    size = args["kernel_size"]
    return (size, size) if isinstance(size, int) else tuple(size)


def _windows(args: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    columns = F.unfold(args["x"], _kernel(args), **_geometry(args))
    return columns, args["g"].flatten(2)


def _conv_gradients(args: Arguments) -> Call:
    shape = (args["g"].shape[1], args["x"].shape[1], *_kernel(args))

    def call() -> Any:
        columns, g = _windows(args)
        grads = torch.bmm(g, columns.mT)
        return grads.view(len(g), *shape), flat_squares(grads)

    return call


class _Windows:
    """Windows that one copy fills, for as many samples as stay in a core's cache."""

    def __init__(self, args: Arguments) -> None:
        x, g, kernel, padding = args["x"], args["g"], _kernel(args), args["padding"]
        stride, dilation = args["stride"], args["dilation"]
        padded = F.pad(x, (padding,) * 4)
        rows, columns = x.shape[2:]
        self.x = x
        self.inner = padded[..., padding : padding + rows, padding : padding + columns]
        shape = (*x.shape[:2], *kernel, *g.shape[2:])
        first, second, down, right = padded.stride()
        steps = (dilation * down, dilation * right, stride * down, stride * right)
        windows = padded.as_strided(shape, (first, second, *steps))
        self.each = max(1, min(len(x), BLOCK // math.prod(shape[1:])))
        self.columns = x.new_empty(self.each, *shape[1:])
        self.rows = self.columns.view(self.each, -1, math.prod(g.shape[2:])).mT
        self.parts = torch.split(windows, self.each)

    def pad(self) -> None:
        """Copy the input into what is padded."""
        self.inner.copy_(self.x)

    def fill(self, part: torch.Tensor) -> torch.Tensor:
        """Return the windows of some samples, ``[samples, positions, entries]``."""
        count = len(part)
        self.columns[:count].copy_(part)
        rows: torch.Tensor = self.rows[:count]
        return rows


def _conv_gradients_strided(args: Arguments) -> Call:
    """Return gradients, some samples after the others."""
    windows, g = _Windows(args), args["g"].flatten(2)
    shape = (len(g), g.shape[1], args["x"].shape[1], *_kernel(args))
    made = g.new_empty(*g.shape[:2], windows.rows.shape[2])
    parts = list(
        zip(windows.parts, g.split(windows.each), torch.split(made, windows.each), strict=True)
    )

    def call() -> Any:
        windows.pad()
        for part, grads, out in parts:
            torch.bmm(grads, windows.fill(part), out=out)
        return made.view(shape), flat_squares(made)

    return call


def _conv_whole_strided(args: Arguments) -> Call:
    """Return the sum of whole numbers, some samples after the others."""
    windows, g, factors = _Windows(args), args["g"], args["factors"][:, None, None, None]
    scaled, out = torch.empty_like(g), args["out"].view(g.shape[1], -1)
    made = g.new_empty(windows.each, *out.shape)
    whole = torch.empty(made.shape, dtype=torch.int32)
    parts = list(zip(windows.parts, torch.split(scaled.flatten(2), windows.each), strict=True))

    def call() -> None:
        windows.pad()
        torch.mul(g, factors, out=scaled)
        for part, grads in parts:
            count = len(part)
            torch.bmm(grads, windows.fill(part), out=made[:count])
            whole[:count].copy_(made[:count])
            out.add_(whole[0] if count == 1 else whole[:count].sum(0, dtype=torch.int32))

    return call


def _gradients_of_groups(args: Arguments) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return gradients as one convolution's, whose groups are the samples."""
    x, outputs = args["x"], args["g"].shape[1]
    shape = (outputs, x.shape[1], *_kernel(args))
    inputs, batch, how = x.reshape(1, -1, *x.shape[2:]), len(x), _geometry(args)

    def grads(g: torch.Tensor) -> torch.Tensor:
        rows = g.reshape(1, -1, *g.shape[2:])
        size = (batch * outputs, *shape[1:])
        return conv2d_weight(inputs, size, rows, **how, groups=batch).view(batch, *shape)

    return grads


def _conv_gradients_by_groups(args: Arguments) -> Call:
    grads, g = _gradients_of_groups(args), args["g"]

    def call() -> Any:
        made = grads(g)
        return made, flat_squares(made)

    return call


def _conv_whole_by_groups(args: Arguments) -> Call:
    grads, g, out = _gradients_of_groups(args), args["g"], args["out"]
    factors, scaled = args["factors"][:, None, None, None], torch.empty_like(g)
    whole = torch.empty(len(g), *out.shape, dtype=torch.int32)

    def call() -> None:
        whole.copy_(grads(torch.mul(g, factors, out=scaled)))
        out.add_(whole.sum(0, dtype=torch.int32))

    return call


def _only_squares(prepare: Callable[[Arguments], Call]) -> Callable[[Arguments], Call]:
    def prepared(args: Arguments) -> Call:
        call = prepare(args)
        return lambda: call()[1]

    return prepared


def _conv_gram(args: Arguments) -> Call:
    def call() -> Any:
        columns, g = _windows(args)
        return (torch.bmm(columns.mT, columns) * torch.bmm(g.mT, g)).sum((1, 2))

    return call


def _conv_sum_by_autograd(args: Arguments) -> Call:
    x, g, out, how = args["x"], args["g"], args["out"], _geometry(args)
    factors, scaled = args["factors"][:, None, None, None], torch.empty_like(g)

    def call() -> None:
        out.add_(conv2d_weight(x, out.shape, torch.mul(g, factors, out=scaled), **how))

    return call


def _conv_sum_of_inputs(args: Arguments) -> Call:
    """Return the same with weighted inputs, which are fewer in a first layer."""
    x, g, out, how = args["x"], args["g"], args["out"], _geometry(args)
    factors, scaled = args["factors"][:, None, None, None], torch.empty_like(x)

    def call() -> None:
        out.add_(conv2d_weight(torch.mul(x, factors, out=scaled), out.shape, g, **how))

    return call


def _conv_sum_by_windows(args: Arguments) -> Call:
    out, factors = args["out"], args["factors"][:, None, None]

    def call() -> None:
        columns, g = _windows(args)
        rows = (g * factors).transpose(0, 1).flatten(1)
        out.add_((rows @ columns.transpose(0, 1).flatten(1).t()).view_as(out))

    return call


def _conv_whole(args: Arguments) -> Call:
    out, factors = args["out"], args["factors"][:, None, None]

    def call() -> None:
        columns, g = _windows(args)
        grads = torch.bmm(g * factors, columns.mT).to(torch.int32)
        out.add_(grads.sum(0, dtype=torch.int32).view_as(out))

    return call


def _is_plain_plane(args: Arguments) -> bool:
    return bool(args["x"].dim() == 4 and args["groups"] == 1)


def _is_square(args: Arguments) -> bool:
    steps = (args[name] for name in ("stride", "padding", "dilation"))
    return _is_plain_plane(args) and all(isinstance(step, int) for step in steps)


FORMULATIONS = {
    "ghost.conv_norm": (
        Formulation("unfold, bmm", _only_squares(_conv_gradients), _is_plain_plane),
        Formulation("unfold, Gram", _conv_gram, _is_plain_plane),
        Formulation("grouped", _only_squares(_conv_gradients_by_groups), _is_plain_plane),
        Formulation("strided windows, bmm", _only_squares(_conv_gradients_strided), _is_square),
    ),
    "ghost.conv_gradient": (
        Formulation("unfold, bmm", _conv_gradients, _is_plain_plane),
        Formulation("grouped", _conv_gradients_by_groups, _is_plain_plane),
        Formulation("strided windows, bmm", _conv_gradients_strided, _is_square),
    ),
    "ghost.conv_sum": (
        Formulation("conv2d_weight", _conv_sum_by_autograd, _is_plain_plane),
        Formulation("conv2d_weight of weighted inputs", _conv_sum_of_inputs, _is_plain_plane),
        Formulation("unfold, mm", _conv_sum_by_windows, _is_plain_plane),
    ),
    "ghost.conv_integer_sum": (
        Formulation("unfold, int32", _conv_whole, _is_plain_plane),
        Formulation("grouped, int32", _conv_whole_by_groups, _is_plain_plane),
        Formulation("strided windows, int32", _conv_whole_strided, _is_square),
    ),
}
