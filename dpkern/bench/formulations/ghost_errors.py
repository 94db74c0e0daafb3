"""Bounds of rounding errors from norms with torch alone.

The constants are those of the op: they depend on sizes, and are made before anything is timed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.grad import conv2d_input as _untyped_conv2d_input

from ...ops.ghost._bounds import sum_error
from ._formulation import Arguments, Formulation

Call = Callable[[], Any]
Absolute = Callable[[], torch.Tensor]
conv2d_input: Callable[..., torch.Tensor] = _untyped_conv2d_input


def _bounded(absolute: Absolute, dtype: torch.dtype, positions: int, entries: int) -> Call:
    """Return the bound of norms: a factor, a floor, and infinity where sums could overflow."""
    zero, one = sum_error(dtype, positions, entries, torch.tensor([0.0, 1.0], dtype=torch.double))
    floor, factor, most = float(zero), float(one - zero), torch.finfo(dtype).max / 4

    def call() -> Any:
        found = absolute()
        return torch.where(found < most, found * factor + floor, math.inf)

    return call


def _norms(rows: torch.Tensor, wide: bool) -> torch.Tensor:
    kind = torch.float64 if wide else None
    norms: torch.Tensor = torch.linalg.vector_norm(rows, dim=2, dtype=kind)
    return norms


def _linear(wide: bool) -> Callable[[Arguments], Call]:
    def prepare(args: Arguments) -> Call:
        a, g = args["a"], args["g"]

        def absolute() -> Any:
            return torch.linalg.vecdot(_norms(a, wide), _norms(g, wide))

        return _bounded(absolute, a.dtype, a.shape[1], a.shape[2] * g.shape[2])

    return prepare


def _tied(wide: bool) -> Callable[[Arguments], Call]:
    def prepare(args: Arguments) -> Call:
        e, a, g = args["e"], args["a"], args["g"]

        def absolute() -> Any:
            return torch.linalg.vecdot(_norms(a, wide), _norms(g, wide)) + _norms(e, wide).sum(1)

        return _bounded(absolute, a.dtype, a.shape[1], a.shape[2] * g.shape[2])

    return prepare


def _conv(wide: bool) -> Callable[[Arguments], Call]:
    """Return the bound by how many windows each input is in, which is counted once."""

    def prepare(args: Arguments) -> Call:
        x, g, kernel = args["x"], args["g"], args["kernel_size"]
        size = (kernel, kernel) if isinstance(kernel, int) else tuple(kernel)
        kind = torch.float64 if wide else x.dtype
        steps = {name: args[name] for name in ("stride", "padding", "dilation")}
        entries = x.shape[1] * g.shape[1] * math.prod(size)
        ones = torch.ones(1, 1, *g.shape[2:], dtype=torch.float64)
        plane = (1, 1, *x.shape[2:])
        counts = conv2d_input(plane, torch.ones(1, 1, *size, dtype=torch.float64), ones, **steps)
        weights = counts.to(kind).expand(1, *x.shape[1:]).flatten()
        rows, others = x.flatten(1), g.flatten(1)
        squares = torch.empty_like(rows, dtype=kind)

        def absolute() -> Any:
            torch.mul(rows, rows, out=squares)
            norms = torch.linalg.vector_norm(others, dim=1, dtype=kind)
            return torch.mv(squares, weights).sqrt_().mul_(norms)

        return _bounded(absolute, x.dtype, math.prod(g.shape[2:]), entries)

    return prepare


def _is_plain_plane(args: Arguments) -> bool:
    return bool(args["x"].dim() == 4 and args["groups"] == 1)


def _no_padding(args: Arguments) -> bool:
    return args["padding_idx"] is None


def _always(_: Arguments) -> bool:
    return True


FORMULATIONS = {
    f"ghost.{name}_sum_error": (
        Formulation("norms", prepare(False), fits),
        Formulation("norms in float64", prepare(True), fits),
    )
    for name, prepare, fits in (
        ("linear", _linear, _always),
        ("conv", _conv, _is_plain_plane),
        ("tied", _tied, _no_padding),
    )
}
