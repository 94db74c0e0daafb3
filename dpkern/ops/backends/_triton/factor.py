"""The clip factor of one sample (``csrc/core/clip_factor.h``), shared by every kernel."""

from __future__ import annotations

import triton
import triton.language as tl

from ... import clip

SLACK = tl.constexpr(clip.SLACK)
GAMMA = tl.constexpr(clip.GAMMA)


@triton.jit
def clip_factor(norm, max_norm, AUTOMATIC: tl.constexpr):
    """Return the clip factor of a norm, in float64; 0 for one that is not finite."""
    wide = tl.zeros_like(norm)  # a constant alone would be a float32
    aim = max_norm * (wide + SLACK)
    if AUTOMATIC:
        factor = aim / (norm + (wide + GAMMA))
    else:
        factor = tl.where(norm <= aim, 1.0, aim / tl.where(norm == 0, 1.0, norm))
    return tl.where((norm - norm) == 0, factor, 0.0)


@triton.jit
def round_down(x, dtype: tl.constexpr):
    """Round numbers >= 0 to another dtype, never up."""
    if dtype == tl.float64:
        return x
    else:
        rounded = x.to(tl.float32)
        # The number before a positive one has the bits before.
        below = (rounded.to(tl.int32, bitcast=True) - 1).to(tl.float32, bitcast=True)
        return tl.where(rounded.to(tl.float64) > x, below, rounded)
