"""Ghost ops of convolutions: per-sample gradients of the weight, their squares and weighted sums.

For one sample with input ``x [ci, *S]``, zero-padded, and output gradient ``g [co, *O]``

    grad[o, c, k] = sum_t g[o, t] x[c, stride t + dilation k - padding]

over the output positions t, where c runs over the input channels of o's group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ...base import validate as check
from ...base.dispatch import op
from ...base.errors import InvalidInput
from ...base.signature import Double, Int32, Operand, Sum, written
from ._bounds import integers, of_sums, sum_error
from ._conv_geometry import Geometry, Size, check_geometry

ConvRoute = Literal["auto", "direct", "gram"]
ROUTES = get_args(ConvRoute)
_CHUNK = 1 << 22
_UNIT = 2.0**-53


def _check_norm(
    x: Tensor,
    g: Tensor,
    kernel_size: Size,
    stride: Size,
    padding: Size,
    dilation: Size,
    groups: int,
    route: str,
) -> Geometry:
    geometry = check_geometry(x, g, kernel_size, stride, padding, dilation, groups)
    if route == "gram" and geometry.groups > 1:
        raise InvalidInput(
            "route",
            expected="'direct' or 'auto' where there are several groups",
            got=route,
            remedy="Use route='auto'.",
        )
    return geometry


def _check_sum(
    x: Tensor,
    g: Tensor,
    factors: Tensor,
    out: Tensor,
    kernel_size: Size,
    stride: Size,
    padding: Size,
    dilation: Size,
    groups: int,
) -> Geometry:
    geometry = check_geometry(x, g, kernel_size, stride, padding, dilation, groups)
    check.tensor(out=out, shape=geometry.weight_shape)
    return geometry


def gram_multiplications(geometry: Geometry) -> int:
    """Return the multiplications of the Gram route.

    These are half of two symmetric matrices over positions, and their product, in which the places
    between the outputs of a row are multiplied too.
    """
    inputs, outputs = geometry.reached_positions, geometry.positions
    grams = geometry.in_channels * inputs**2 + geometry.out_channels * outputs**2
    product = sum(geometry.kernel) * geometry.stride[-1] * outputs**2
    return geometry.batch * (grams + product) // 2


def norm_route(geometry: Geometry, route: str = "auto") -> str:
    """Return which way a norm goes.

    For ``auto`` this is the one that the CPU's kernels take, by the time of a multiplication of the
    direct route; docs/ghost_conv.md has the figures.
    """
    if geometry.groups > 1 or len(geometry.input) == 3:
        return "direct"
    if route != "auto":
        return route
    inputs, outputs = geometry.reached_positions, geometry.positions
    matrices = inputs**2 + outputs**2
    operands = geometry.reached + geometry.out_channels * outputs
    moved = geometry.batch * (48 * matrices + 32 * operands)
    gram = 2 * gram_multiplications(geometry) + moved
    return "gram" if gram < geometry.multiplications else "direct"


@op(check=_check_norm, plan=Geometry)
@torch.no_grad()
def conv_norm(
    x: Operand[Tensor, "B ci *S"],
    g: Operand[Tensor, "B co *O"],
    *,
    kernel_size: Size,
    stride: Size = 1,
    padding: Size = 0,
    dilation: Size = 1,
    groups: int = 1,
    route: ConvRoute = "auto",
) -> Double[Tensor, "squares: B"]:
    """Return the squared norm of each sample's weight gradient, from above: ``|| grad_b ||^2``.

    Nothing of the size of the per-sample gradients is kept.

    Args:
        x: inputs ``[B, ci, *S]``, 1 to 3 spatial dimensions, float32, float64, bfloat16 or float16,
            contiguous.
        g: output gradients ``[B, co, *O]`` of the same dtype, contiguous.
        kernel_size, stride, padding, dilation: an int, or one per spatial dimension.
        groups: a divisor of ci and co.
        route: ``direct`` (the gradient tile by tile, squared and dropped), ``gram`` (Gram matrices
            of x and g over positions, for many channels and few positions; one group) or ``auto``,
            the cheaper one. Only the CPU kernels know the Gram route, the others always go the
            direct way.

    Returns:
        float64 ``[B]``: at least the square of the exact gradient of these inputs, and above it by
        at most 1e-4 (float32), 1e-10 (float64) or 5e-3 (16-bit operands) of it, unless the sums
        over positions cancel to nearly nothing, below what float64 resolves.

    Raises:
        InvalidInput: wrong type, shape, dtype, device, layout, size or route.

    =========================== ===========================================
    edge case                   result
    =========================== ===========================================
    empty batch                 ``[0]``
    NaN or inf in a sample      NaN or infinite for this sample
    kernel larger than input    InvalidInput
    =========================== ===========================================
    """
    geometry = Geometry.of(x, g, kernel_size, stride, padding, dilation, groups)
    squares = torch.zeros(geometry.batch, dtype=torch.float64, device=x.device)
    for part in _chunks(geometry):
        xs, gs = x[part].double(), g[part].double()
        # |computed - exact| of an entry <= gamma_T sum_t |g| |x|; Cauchy-Schwarz for all entries.
        plain = geometry.taps * xs.flatten(1).pow(2).sum(1) * gs.flatten(1).pow(2).sum(1)
        error = (geometry.positions + 2) * _UNIT * plain.sqrt()
        norms = _upper_squares(_gradients(xs, gs, geometry)).sqrt() + error
        squares[part] = norms * norms * (1 + 8 * _UNIT)
    return squares


def tf32_convolutions() -> bool:
    """Return whether torch may round the operands of float32 convolutions on a device to TF32.

    It does so unless it is told not to. Kernels may do so for gradients that they store, whose
    norms are those of what was stored; norms alone and sums never do.
    """
    convolutions: Any = torch.backends.cudnn
    return bool(convolutions.conv.fp32_precision == "tf32")


@op(check=check_geometry, plan=Geometry)
@torch.no_grad()
def conv_gradient(
    x: Operand[Tensor, "B ci *S"],
    g: Operand[Tensor, "B co *O"],
    *,
    kernel_size: Size,
    stride: Size = 1,
    padding: Size = 0,
    dilation: Size = 1,
    groups: int = 1,
) -> tuple[Sum[Tensor, "grads: B co c *K"], Double[Tensor, "squares: B"]]:
    """Materialize per-sample gradients of the weight, and return their squared norms as well.

    Args: as ``conv_norm``.

    Returns:
        ``grads [B, co, ci / groups, *kernel]`` of the inputs' dtype (16-bit: float32), dense, the
        samples outermost, the other dimensions in any order in memory; and float64 ``[B]``, the
        sums of squares of exactly these numbers, from above by at most 1e-4 (float64: 1e-10) of it.
        On a device float32 operands are rounded to TF32 where torch may do so in convolutions.

    Raises:
        InvalidInput: wrong type, shape, dtype, device, layout or size.

    =========================== ===========================================
    edge case                   result
    =========================== ===========================================
    empty batch                 empty results
    NaN or inf in a sample      NaN or infinite square, of this sample only
    =========================== ===========================================
    """
    geometry = Geometry.of(x, g, kernel_size, stride, padding, dilation, groups)
    kind = of_sums(x.dtype)
    grads = x.new_empty(geometry.batch, *geometry.weight_shape, dtype=kind)
    squares = torch.zeros(geometry.batch, dtype=torch.float64, device=x.device)
    for part in _chunks(geometry):
        grads[part] = _gradients(x[part].to(kind), g[part].to(kind), geometry)
        squares[part] = _upper_squares(grads[part].double())
    return grads, squares


@op(check=_check_sum, plan=Geometry)
@torch.no_grad()
def conv_sum(
    x: Operand[Tensor, "B ci *S"],
    g: Operand[Tensor, "B co *O"],
    factors: Sum[Tensor, "B"],
    out: Sum[Tensor, "co c *K", written],
    *,
    kernel_size: Size,
    stride: Size = 1,
    padding: Size = 0,
    dilation: Size = 1,
    groups: int = 1,
) -> None:
    """Add the weighted sum of the per-sample gradients: ``out += sum_b factors_b grad_b``.

    Args:
        x, g, kernel_size, stride, padding, dilation, groups: as ``conv_norm``.
        factors: ``[B]``, dtype of x (16-bit: float32). Factor 0 contributes nothing, whatever the
            sample holds.
        out: ``[co, ci / groups, *kernel]``, dtype of the factors, contiguous, added to.

    Raises:
        InvalidInput: wrong type, shape, dtype, device, layout or size.
    """
    geometry = Geometry.of(x, g, kernel_size, stride, padding, dilation, groups)
    used = factors != 0
    if not bool(used.all()):
        x, g, factors = x[used], g[used], factors[used]
    if not len(x):
        return
    # TF32, which torch allows for convolutions, would lift samples above their clipping bound.
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        _, weight, _ = torch.ops.aten.convolution_backward(
            g * factors.view(-1, *(1,) * (g.dim() - 1)),
            x.to(out.dtype),
            out,  # only its shape is read
            None,
            geometry.stride,
            geometry.padding,
            geometry.dilation,
            False,
            [0] * len(geometry.input),
            geometry.groups,
            [False, True, False],
        )
    out.add_(weight)


@op(check=_check_sum, plan=Geometry)
@torch.no_grad()
def conv_integer_sum(
    x: Operand[Tensor, "B ci *S"],
    g: Operand[Tensor, "B co *O"],
    factors: Sum[Tensor, "B"],
    out: Int32[Tensor, "co c *K", written],
    *,
    kernel_size: Size,
    stride: Size = 1,
    padding: Size = 0,
    dilation: Size = 1,
    groups: int = 1,
) -> None:
    """Sum of whole numbers, in place: ``out += sum_b trunc(factors_b grad_b)``.

    Each term depends on its own sample alone. What is truncated is ``factors_b`` times a sum over
    positions that differs from the exact one by at most ``conv_sum_error`` in norm
    (``docs/exact.md``).

    Args:
        x, g, kernel_size, stride, padding, dilation, groups: as ``conv_norm``.
        factors: ``[B]``, dtype of x (16-bit: float32). Factor 0 contributes nothing, whatever the
            sample holds.
        out: int32 ``[co, ci / groups, *kernel]``, contiguous, added to. Entries of a term, and
            their sum, must stay below 2^31.

    Raises:
        InvalidInput: wrong type, shape, dtype, device, layout or size.
    """
    used, kind = factors != 0, of_sums(x.dtype)
    x, g, factors = x[used].to(kind), g[used].to(kind), factors[used]
    geometry = Geometry.of(x, g, kernel_size, stride, padding, dilation, groups)
    for part in _chunks(geometry) if len(x) else ():
        grads = _gradients(x[part].double(), g[part].double(), geometry).to(x.dtype)
        weights = factors[part].view(-1, *(1,) * (grads.dim() - 1))
        out.add_(integers(weights * grads).sum(0, dtype=torch.int32))


@op(check=check_geometry, plan=Geometry)
@torch.no_grad()
def conv_sum_error(
    x: Operand[Tensor, "B ci *S"],
    g: Operand[Tensor, "B co *O"],
    *,
    kernel_size: Size,
    stride: Size = 1,
    padding: Size = 0,
    dilation: Size = 1,
    groups: int = 1,
) -> Double[Tensor, "errors: B"]:
    """Bound ``|| what conv_integer_sum truncates / factor - grad_b ||``.

    ``gamma sqrt(sum_c touched |x|^2 sum_o |g|^2)`` with ``gamma = n u / (1 - n u)`` for as many
    roundings as positions and 4 more, where an input counts as often as the kernel touches it; and
    what underflow can hide.

    Args: as ``conv_norm``.

    Returns:
        float64 ``[B]``; infinite for a sample with NaN or inf, or whose sums could overflow.

    Raises:
        InvalidInput: wrong type, shape, dtype, device, layout or size.
    """
    geometry = Geometry.of(x, g, kernel_size, stride, padding, dilation, groups)
    kernel = x.new_ones(groups, 1, *geometry.kernel, dtype=torch.float64)
    steps = geometry.stride, geometry.padding, geometry.dilation
    convolve = (torch.conv1d, torch.conv2d, torch.conv3d)[len(geometry.input) - 1]
    inputs, gradients = (_by_group(t.double().square(), groups).sum(2) for t in (x, g))
    windows = convolve(inputs, kernel, None, *steps, groups)
    products = windows.flatten(2).sum(2) * gradients.flatten(2).sum(2)
    entries = math.prod(geometry.weight_shape)
    return sum_error(of_sums(x.dtype), geometry.positions, entries, products.sum(1).sqrt())


def _by_group(channels: Tensor, groups: int) -> Tensor:
    """Reshape ``[B, C, *S]`` to ``[B, groups, C / groups, *S]``."""
    return channels.reshape(len(channels), groups, channels.shape[1] // groups, *channels.shape[2:])


def _chunks(geometry: Geometry) -> Iterator[slice]:
    """Yield slices of samples whose unfolded windows stay small."""
    sample = geometry.in_channels * geometry.taps * geometry.positions
    size = max(1, _CHUNK // max(1, sample))
    for begin in range(0, geometry.batch, size):
        yield slice(begin, begin + size)


def _gradients(x: Tensor, g: Tensor, geometry: Geometry) -> Tensor:
    """Return ``[b, co, ci / groups, *kernel]``: output gradients times windows, group by group."""
    sides = [side for p in reversed(geometry.padding) for side in (p, p)]
    x = torch.nn.functional.pad(x, sides)
    batch, groups = len(x), geometry.groups
    per_group = geometry.in_channels // groups
    steps = x.stride()[2:]
    windows = x.as_strided(
        (batch, groups, per_group, *geometry.kernel, *geometry.output),
        (
            x.stride(0),
            per_group * x.stride(1),
            x.stride(1),
            *(a * b for a, b in zip(steps, geometry.dilation, strict=True)),
            *(a * b for a, b in zip(steps, geometry.stride, strict=True)),
        ),
    ).reshape(batch, groups, per_group * geometry.taps, geometry.positions)
    rows = g.reshape(batch, groups, geometry.out_channels // groups, geometry.positions)
    return (rows @ windows.mT).view(batch, *geometry.weight_shape)


def _upper_squares(grads: Tensor) -> Tensor:
    """Return ``[b]``, sums of squares of float64 entries, made larger than their rounding."""
    rows = grads.flatten(2).pow(2).sum(2)
    return rows.sum(1) * (1 + (grads[0, 0].numel() + grads.shape[1] + 4) * _UNIT)


__all__ = [
    "ROUTES",
    "Geometry",
    "conv_gradient",
    "conv_integer_sum",
    "conv_norm",
    "conv_sum",
    "conv_sum_error",
    "gram_multiplications",
    "norm_route",
    "tf32_convolutions",
]
