"""The power of two that takes a sample's largest entry to [1, 2), and its square then."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import launch

BLOCK = 1024


@triton.jit
def _wide(x, entry, entries):
    """Load entries as float64."""
    part = tl.load(x + entry, mask=entry < entries, other=0.0)
    return part if part.dtype == tl.float64 else part.to(tl.float32).to(tl.float64)


@triton.jit(do_not_specialize=["samples"])
def size_kernel(x, scales, squares, samples, entries, BLOCK: tl.constexpr):
    """Write the power of two that takes a sample's largest entry to [1, 2), and its square then."""
    sample = tl.program_id(0).to(tl.int64)
    x += sample * entries
    lanes = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.float64)
    for begin in range(0, entries, BLOCK):
        largest = tl.maximum(largest, tl.abs(_wide(x, begin + lanes, entries)))
    exponent = (tl.max(largest).to(tl.int64, bitcast=True) >> 52) & 0x7FF
    exponent = tl.minimum(tl.maximum(exponent, 1), 2045)  # a power of two that is a normal number
    scale = ((2046 - exponent) << 52).to(tl.float64, bitcast=True)
    total = tl.zeros([BLOCK], tl.float64)
    for begin in range(0, entries, BLOCK):
        part = _wide(x, begin + lanes, entries) * scale
        total += part * part
    tl.store(scales + sample, scale)
    tl.store(squares + sample, tl.sum(total))


def scaled(x: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``[2, B]`` powers of two for both operands' samples, and their squares then."""
    scales, sizes = x.new_empty(2, 2, len(x), dtype=torch.float64).unbind()
    for i, operand in enumerate((x, g)):
        given = operand, scales[i], sizes[i], len(x), operand[0].numel()
        launch(size_kernel, len(x), x, *given, BLOCK=BLOCK, maxnreg=255)
    return scales, sizes
