"""Round the operands of linear layers to integers, whose gradient is exact (``docs/exact.md``).

Every step has the bits of ``csrc/cpu/operand_rounding.h``: norms that one backend takes bound the
integers that another one adds up.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_LEAST, _MOST = 2.0**-200, 2.0**200
"""Squared norms of rows outside of these count as zero and as lost."""
_INPUT_NORM, _OUTPUT_NORM = 2.0**15, 2.0**14
"""Norms that rounded rows stay below."""
_SLACK = 1 - 2.0**-8
"""The share of them that sums of squares in float32 leave."""


def rounded_operands(a: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the integers of each sample's operands, and what a product of theirs counts for.

    Args:
        a: layer inputs ``[B, T, d]``, float32 or float64.
        g: output gradients ``[B, T, p]``.

    Returns:
        alpha ``[B, T, d]`` and gamma ``[B, T, p]``, float64; and units ``[B]``: the gradient is
        near ``unit sum_t gamma_t outer alpha_t``. A unit is infinite for a lost sample.
    """
    kind, positions = a.dtype, max(1, a.shape[1])
    a_square, g_square = _squares(a), _squares(g)
    lost = ~((a_square <= _MOST) & (g_square <= _MOST)).all(1)
    there = (a_square >= _LEAST) & (g_square >= _LEAST) & ~lost[:, None]
    # The power of 2 next below |a_t| moves over to g_t.
    power = torch.floor((torch.frexp(a_square).exponent - 1) / 2).where(there, 0).int()
    a_norm = torch.ldexp(a_square.sqrt(), -power).where(there, 0.0)
    g_norm = torch.ldexp(g_square.sqrt(), power).where(there, 0.0)
    a_most = torch.ldexp(_largest(a.double()), -power).where(there, 0.0)
    g_most = torch.ldexp(_largest(g.double()), power).where(there, 0.0)
    room = (2.0**31 - 1) / positions
    tall_room = _OUTPUT_NORM * _SLACK - 0.5 * math.sqrt(g.shape[2])
    wide_room = _INPUT_NORM * _SLACK - 0.5 * math.sqrt(a.shape[2])
    largest = _largest(g_most)
    most = 2 * math.sqrt(room) - 1
    g_scale = torch.minimum(_over(tall_room, _largest(g_norm)), _over(most, largest))
    left = _over(room, g_scale * largest * (1 + 2.0**-20) + 0.5) - 1
    a_scale = torch.minimum(_over(wide_room, _largest(a_norm)), left / _largest(a_most))
    there &= g_norm * g_scale[:, None] >= 0.25  # below, no entry reaches one half
    gamma = _rounded(g, torch.ldexp(g_scale[:, None].expand(power.shape), power).to(kind), there)
    alpha = _rounded(a, torch.ldexp(a_scale[:, None].expand(power.shape), -power).to(kind), there)
    unit = _over(1.0, g_scale * a_scale).where(there.any(1), 0.0)
    return alpha, gamma, unit.where(~lost, math.inf)


def _squares(x: Tensor) -> Tensor:
    """Return sums of squares ``[B, T]`` in float64, within 2^-9, added up in the kernel's order."""
    first, second, third, fourth = torch.split(_lanes(x.square(), 32, 8), 8, 2)
    total = _one_by_one(((first + second) + (third + fourth)).double())
    if x.dtype is torch.float64:
        return total
    wide = x.double().square()
    whole = wide.shape[2] // 16 * 16
    exact = _one_by_one(wide[..., whole:])
    for lane in _lanes(wide[..., :whole], 16, 16).unbind(-1):
        exact = exact + lane
    hidden = ~((total > 2.0**-80) & (total < 2.0**120)) | (x.shape[2] > 1 << 19)
    return torch.where(hidden, exact, total)


def _lanes(squares: Tensor, lanes: int, rest: int) -> Tensor:
    """Return sums ``[B, T, lanes]`` of every so many squares; of the last in steps of ``rest``."""
    sums = squares.new_zeros(*squares.shape[:2], lanes)
    whole = squares.shape[2] // lanes * lanes
    for part in squares[..., :whole].reshape(*sums.shape[:2], whole // lanes, lanes).unbind(2):
        sums = sums + part
    for part in torch.split(squares[..., whole:], rest, 2):
        sums[..., : part.shape[2]] += part
    return sums


def _one_by_one(x: Tensor) -> Tensor:
    """Return the sum of the last dimension, from its first number to the last."""
    total = x.new_zeros(x.shape[:-1])
    for each in x.unbind(-1):
        total = total + each
    return total


def _over(number: float, x: Tensor) -> Tensor:
    """Return the quotient; torch divides a number by a tensor in two roundings."""
    return torch.full_like(x, number) / x


def _largest(x: Tensor) -> Tensor:
    """Return the largest absolute value of the last dimension, 0 if it is empty."""
    return x.abs().amax(-1) if x.shape[-1] else x.new_zeros(x.shape[:-1])


def _rounded(x: Tensor, scales: Tensor, there: Tensor) -> Tensor:
    return (scales[..., None] * x).round().double().where(there[..., None], 0.0)
