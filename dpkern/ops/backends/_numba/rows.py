"""Process one row of a sample's gradient: its power, and its share of the sums.

The C++ kernels are csrc/cpu/rows.h and csrc/core/clip_factor.h.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from ... import clip
from .compile import Array, Number, inlined, inner, summing

SHRINK = 1 - 2.0**-16
"""The shrink factor of a sample whose integers exceed their bound."""
SLACK, GAMMA = clip.SLACK, clip.GAMMA


@intrinsic
def _float_of(context: Any, bits: Any) -> Any:
    """Return the float32 with these 32 bits."""
    del context

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> ir.Value:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), generate


def value_of(x: Number) -> Number:
    """Return a gradient's entry as a float; bfloat16 is the upper half of a float32."""
    raise NotImplementedError  # by type, below


@overload(value_of)
def _value_by_type(x: Any) -> Any:
    def widened(x: Any) -> Any:
        return _float_of(np.uint32(np.uint32(x) << np.uint32(16)))

    def itself(x: Any) -> Any:
        return x

    return widened if x == types.uint16 else itself


@summing
def power_sum(row: Array, p: int) -> Number:
    """Return ``sum |x|^p`` in float64, p = 1 or 2."""
    total = 0.0
    if p == 2:
        for i in range(len(row)):
            x = np.float64(value_of(row[i]))
            total += x * x
    else:
        for i in range(len(row)):
            total += abs(np.float64(value_of(row[i])))
    return total


@inlined
def clip_factor(norm: Number, max_norm: Number, automatic: bool) -> Number:
    aim = max_norm * SLACK
    if automatic:
        return aim / (norm + GAMMA)
    return 1.0 if norm <= aim else aim / norm


@inlined
def round_down(factor: Number, number: Any) -> Number:
    """Return the factor in a float type, never above ``factor``."""
    rounded = number(factor)
    return np.nextafter(rounded, number(0)) if np.float64(rounded) > factor else rounded


@inner
def add_row(row: Array, weight: Number, total: Array) -> None:
    """Add a weighted row: ``total += weight row``."""
    for i in range(len(row)):
        total[i] += weight * value_of(row[i])


@inner
def add_integer_row(row: Array, weight: Number, sign: int, p: int, total: Array) -> Number:
    """Add integers, ``total += sign trunc(weight row)``, and return their power, exactly."""
    power = np.int64(0)
    for i in range(len(row)):
        q = np.int32(weight * value_of(row[i]))
        total[i] += sign * q
        power += np.int64(q) * q if p == 2 else abs(np.int64(q))
    return power
