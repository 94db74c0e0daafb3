"""Closed forms of convolutions, by the route that the CPU's kernels take.

O output positions, K taps, E = co ci K / groups entries of a gradient. The direct norm takes
2 E (O + 1) floating operations per sample and the norms of the operands for its rounding bound.
The Gram route (one group) takes two symmetric matrices over the positions of x and g, sums of the
first along the kernel's rows and of the second's products along its columns. Zeros of the padding
are multiplied; inputs that no output sees are not read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ...base.counts import Counts, Itemised
from ...ops import _values
from ...ops.ghost import conv
from ...ops.ghost._bounds import of_sums
from ...ops.ghost._conv_geometry import Geometry
from ._form import Form
from ._layers import WIDE, Numbers, dots, itemised, summed, widened


def geometry_of(x: torch.Tensor, g: torch.Tensor, arguments: dict[str, Any]) -> Geometry:
    """Return the sizes of a call."""
    given = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1, **arguments}
    names = "kernel_size", "stride", "padding", "dilation", "groups"
    return Geometry.of(x, g, *(given[name] for name in names))


def conv_norm(
    x: torch.Tensor, g: torch.Tensor, *, route: str = "auto", **arguments: Any
) -> Itemised:
    """Count ``ghost.conv_norm``, without what kernels repeat where a Gram bound is too loose."""
    geometry = geometry_of(x, g, arguments)
    batch, positions = geometry.batch, geometry.positions
    operands = geometry.reached + geometry.out_channels * positions
    wide = widened(x.dtype, batch * operands)
    read = [(batch * operands, x.dtype)]
    if conv.norm_route(geometry, route) == "gram":
        return _gram(geometry, read, wide)
    entries = math.prod(geometry.weight_shape)
    bound = dots(operands) + Counts(SQRT=2, MUL=4, ADD=1)
    return itemised(
        read,
        [(batch, WIDE)],
        walked=("gradients", "squares"),
        widened=wide,
        gradients=batch * dots(entries * positions),
        squares=batch * dots(entries),
        rounding_bound=batch * bound,
    )


def _gram(geometry: Geometry, read: Sequence[Numbers], wide: Counts) -> Itemised:
    batch, inputs, outputs = geometry.batch, geometry.reached_positions, geometry.positions
    width, height = geometry.output[-1], (1, *geometry.reached_sizes)[-2]
    kernel_height, kernel_width = (1, *geometry.kernel)[-2:]
    x_pairs, g_pairs = (n * (n + 1) // 2 for n in (inputs, outputs))
    grams = geometry.in_channels * x_pairs + geometry.out_channels * g_pairs
    along = height * (height + 1) // 2 * width**2 * kernel_width
    return itemised(
        read,
        [(batch, WIDE)],
        widened=wide,
        Gram_matrices=batch * dots(grams),
        sums_along_rows=Counts(ADD=batch * along),
        products_along_columns=batch * (dots(g_pairs * kernel_height) + Counts(MUL=1, ADD=1)),
        rounding_bound=batch * Counts(MUL=4, ADD=inputs + outputs + 1),
    )


def conv_gradient(x: torch.Tensor, g: torch.Tensor, **arguments: Any) -> Itemised:
    """Count ``ghost.conv_gradient``."""
    geometry = geometry_of(x, g, arguments)
    batch, positions = geometry.batch, geometry.positions
    operands = batch * (geometry.reached + geometry.out_channels * positions)
    entries = batch * math.prod(geometry.weight_shape)
    return itemised(
        [(operands, x.dtype)],
        [(entries, of_sums(x.dtype)), (batch, WIDE)],
        walked=("gradients", "squares"),
        widened=summed(x.dtype, operands),
        gradients=dots(entries * positions),
        squares=widened(x.dtype, entries) + dots(entries) + Counts(MUL=batch),
    )


def conv_sum(
    x: torch.Tensor,
    g: torch.Tensor,
    factors: torch.Tensor,
    out: torch.Tensor,
    *,
    used: int | None = None,
    **arguments: Any,
) -> Itemised:
    """Count ``ghost.conv_sum``; ``used`` counts nonzero factors; None reads the factors."""
    geometry = geometry_of(x, g, arguments)
    used = _values.count_used_samples(factors) if used is None else used
    gradient = geometry.out_channels * geometry.positions
    operands, entries = used * (geometry.reached + gradient), out.numel() if used else 0
    return itemised(
        [(operands, x.dtype), (geometry.batch + entries, out.dtype)],
        [(entries, out.dtype)],
        walked=("scaling", "sums"),
        tests=Counts(CMP=geometry.batch),
        widened=summed(x.dtype, operands),
        scaling=Counts(MUL=used * gradient),
        sums=dots(used * entries * geometry.positions) + Counts(ADD=entries),
    )


FORMS: dict[str, Form] = {
    "ghost.conv_norm": conv_norm,
    "ghost.conv_gradient": conv_gradient,
    "ghost.conv_sum": conv_sum,
}
