"""Randomized response: the words of eight symbols from every cipher block."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ....base.rng import Stream
from ... import symbols as op
from . import chacha
from .launch import INTERPRETED, launch

_BLOCKS = 128  # of the cipher in a program
_MOST_BLOCKS = 4096
_SIGNED = 1 << 63


@triton.jit(do_not_specialize=[
    "first", "skip", "n", "keep", "width", "reciprocal", "categories", *chacha.STREAM
])  # fmt: skip
def symbols_kernel(
    x,
    out,
    key0: tl.int64, key1: tl.int64, key2: tl.int64, key3: tl.int64, nonce: tl.int64,
    rounds: tl.int32,
    first: tl.int64,
    skip: tl.int32,
    n: tl.int64,
    keep: tl.int64,
    width: tl.int64,
    reciprocal: tl.int64,
    categories: tl.int64,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    stream = chacha.unpack(key0, key1, key2, key3, nonce, rounds)
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    words = chacha.blocks(stream, first + block)
    none = tl.zeros([BLOCKS], tl.uint64)
    truth = none + keep.to(tl.int64).to(tl.uint64, bitcast=True)
    wide = none + width.to(tl.int64).to(tl.uint64, bitcast=True)
    inverse = none + reciprocal.to(tl.int64).to(tl.uint64, bitcast=True)
    for k in tl.static_range(8):
        index = 8 * block - skip + k
        inside = (index >= 0) & (index < n)
        u = words[2 * k].to(tl.uint64) | (words[2 * k + 1].to(tl.uint64) << 32)
        rest = tl.sub(u, truth, False)
        # By the rounded reciprocal the quotient is at most one too small.
        lie = tl.umulhi(rest, inverse)
        lie = tl.where(rest - lie * wide >= wide, lie + 1, lie).to(tl.int64)
        # The quotient of a kept symbol is not used, and may look negative.
        move = tl.where(u < truth, 0, 1 + tl.minimum(lie, categories - 2))
        symbol = tl.load(x + index, mask=inside, other=0).to(tl.int64) + move
        symbol = tl.where(symbol >= categories, symbol - categories, symbol)
        tl.store(out + index, symbol.to(out.dtype.element_ty), mask=inside)


def _per_program(blocks: int) -> int:
    """Return how many blocks a program takes.

    The interpreter takes about as long for a thousand blocks as for one.
    """
    return min(_MOST_BLOCKS, triton.next_power_of_2(blocks)) if INTERPRETED else _BLOCKS


def _bits(number: int) -> int:
    """Return the int64 with these 64 bits."""
    return number - 2 * _SIGNED if number >= _SIGNED else number


def _randomize(
    symbols: torch.Tensor,
    *,
    stream: Stream,
    keep: int,
    categories: int = 2,
    position: int = 0,
) -> torch.Tensor:
    out = torch.empty_like(symbols)
    n = symbols.numel()
    first, skip = divmod(position, op.PER_BLOCK)
    blocks = -(-(skip + n) // op.PER_BLOCK)
    width = op.alternative_width(keep, categories)
    launch(
        symbols_kernel,
        -(-blocks // _per_program(blocks)) if n else 0,
        symbols,
        symbols,
        out,
        *chacha.arguments(stream),
        first,
        skip,
        n,
        _bits(keep),
        _bits(width),
        _bits((2**64 - 1) // width),
        categories,
        BLOCKS=_per_program(blocks),
    )
    return out


def _never(*_: Any, **__: Any) -> None:
    return None


KERNELS: tuple[tuple[str, Any, Any], ...] = (("symbols.randomize", _randomize, _never),)
"""``(op, run, refuse)``."""
