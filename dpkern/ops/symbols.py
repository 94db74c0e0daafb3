"""Randomized response: symbols replaced with a probability known to the last bit."""

from __future__ import annotations

import numpy
import torch
from torch import Tensor

from ..base import validate as check
from ..base.dispatch import op
from ..base.dtypes import DTYPES as DTYPES_BY_GROUP
from ..base.errors import InvalidInput
from ..base.layouts import SYMBOLS_PER_CIPHER_BLOCK
from ..base.place import check_recording
from ..base.rng import Stream
from ..base.signature import Position, Symbol, Word
from . import _lattice
from .noise import check_stream

DTYPES = DTYPES_BY_GROUP["Symbol"]
MAX_CATEGORIES = 1 << 30
PER_BLOCK = int(SYMBOLS_PER_CIPHER_BLOCK)
"""A cipher block serves this many symbols, two words each."""


def alternative_width(keep: int, categories: int) -> int:
    """Return how many of the 2^64 words map to each other symbol.

    The last one also takes what is left.
    """
    return ((1 << 64) - keep) // (categories - 1)


def _check(symbols: Tensor, stream: Stream, keep: int, categories: int, position: int) -> None:
    check_recording(symbols.device)
    check_stream(stream=stream)
    check.integer(2, MAX_CATEGORIES, categories=categories)
    # Every other symbol needs a word, and the symbol itself as many.
    check.integer(-(-(1 << 64) // categories), (1 << 64) - categories + 1, keep=keep)
    if symbols.numel():
        # Wider first: 256 is no uint8.
        low, high = (bound.long() for bound in torch.aminmax(symbols))
        check.hold((low >= 0) & (high < categories), lambda: _outside(low, high, categories))


def _outside(low: Tensor, high: Tensor, categories: int) -> InvalidInput:
    return InvalidInput(
        "symbols",
        expected=f"numbers from 0 to {categories - 1}",
        got=f"{low.item()} to {high.item()}",
        remedy="Number the categories from 0.",
    )


def blocks(position: int, count: int) -> int:
    """Return how many cipher blocks serve ``count`` symbols from ``position`` on."""
    if not count:
        return 0
    return (position + count - 1) // PER_BLOCK - position // PER_BLOCK + 1


@op(check=_check)
def randomize(
    symbols: Symbol[Tensor, "*S"],
    *,
    stream: Stream,
    keep: Word,
    categories: int = 2,
    position: Position = 0,
) -> Symbol[Tensor, "randomized: *S"]:
    """Return each symbol, or with probability ``1 - keep / 2^64`` one of the others; a new tensor.

    Symbol i takes the 64-bit word u made of the keystream's words ``2 i`` (low half) and
    ``2 i + 1``, counted from ``position``. With ``w = floor((2^64 - keep) / (k - 1))``:

        u < keep:   x
        otherwise:  (x + 1 + j) mod k,   j = min(floor((u - keep) / w), k - 2)

    Integers only, so every backend gives the same symbols. The words are uniform and fresh: no
    noise source serves them, because a table holds draws of a noise law.

    Guarantee: one symbol's output is ``log(max(keep, last) / w)``-private for every pair of inputs,
    exactly; ``last = 2^64 - keep - (k - 2) w`` words map to the last symbol.

    Args:
        symbols: contiguous uint8, int32 or int64 tensor of any shape, entries in ``0 .. k - 1``.
        stream: ``key.stream(Purpose.SYMBOLS, step)``, used for nothing else.
        keep: how many of the 2^64 words keep the symbol, at least 2^64 / k. A mechanism knows it:
            ``RandomizedResponse(epsilon=..., categories=k).keep``.
        categories: k, from 2 to 2^30.
        position: where symbol 0 stands in the stream. Later calls with the same stream continue
            where the last one ended: a position used twice answers for two symbols with one word.

    Raises:
        InvalidInput: wrong dtype, strides, categories, ``keep``, or an entry that is no category.
        PrivacyError: a CUDA graph is recorded, whose every replay would give the same responses.

    =========== =================================
    edge case   result
    =========== =================================
    empty       empty
    outside     ``InvalidInput``; nothing is drawn
    =========== =================================
    """
    first, count = position // PER_BLOCK, symbols.numel()
    words = _lattice.keystream(stream, first, blocks(position, count)).numpy()
    skip = position - first * PER_BLOCK
    u = words.view("<u8")[skip : skip + count]
    width = numpy.uint64(alternative_width(keep, categories))
    lie = numpy.minimum((u - numpy.uint64(keep)) // width, numpy.uint64(categories - 2))
    shift = numpy.where(u < numpy.uint64(keep), 0, 1 + lie.astype(numpy.int64))
    moved = symbols.to(torch.int64) + torch.from_numpy(shift).view(symbols.shape).to(symbols.device)
    return (moved % categories).to(symbols.dtype)
