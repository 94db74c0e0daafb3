"""Draw subsets of a data set's records from the words of a stream.

Every law here is exact: no float decides. A random number that is compared with a bound is drawn in
two parts, a byte for every record and 64 bits more for those whose byte leaves it open. A uniform
subset is drawn record by record; if it is small, in time that does not grow with the data set.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from torch import Tensor

from ..base.rng import Stream
from ..ops.noise import keystream

_LOWEST, _HIGHEST = -(1 << 63), (1 << 63) - 1
_BLOCK = 64
"""Bytes of one block of a stream."""
_SPARSE = 64
"""Subsets of less than one record in so many are kept as a list, others as a mask."""


class Words:
    """The words of one stream, each of which is used once.

    Args:
        stream: the stream.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._next = 0

    def _take(self, size: int, unit: int) -> Tensor:
        """Draw at least ``size`` bytes, whose units have their lowest byte first everywhere."""
        blocks = -(-size // _BLOCK)
        drawn = keystream(self._stream, first_block=self._next, blocks=blocks).view(torch.uint8)
        self._next += blocks
        if sys.byteorder == "big":
            drawn = drawn.view(-1, 4).flip(1).flatten().view(-1, unit).flip(1).flatten()
        return drawn

    def bytes(self, count: int) -> Tensor:
        """Draw independent uniform bytes, uint8 [count]."""
        return self._take(count, 1)[:count]

    def numbers(self, count: int) -> Tensor:
        """Draw independent uniform 64-bit numbers minus 2^63, int64 [count].

        Subtracting 2^63 maps unsigned order to signed order.
        """
        return self._take(8 * count, 8).view(torch.int64)[:count].bitwise_xor_(_LOWEST)


def independent_subset(words: Words, records: int, threshold: int) -> Tensor:
    """Let each record join with probability ``threshold / 2^72`` below 1, ascending, int64.

    A record's 72-bit number is a byte above a 64-bit number, which is drawn only if the byte does
    not exceed the threshold's.
    """
    highest, rest = divmod(threshold, 1 << 64)
    first = words.bytes(records).numpy()
    open_yet = np.flatnonzero(first <= highest)
    below = words.numbers(len(open_yet)).numpy() < rest + _LOWEST
    return torch.from_numpy(open_yet[below | (first[open_yet] < highest)])


def uniform_subset(words: Words, records: int, size: int) -> Tensor:
    """Draw one of all subsets of exactly ``size`` records, ascending, int64 [size].

    Records are drawn until ``size`` different ones are there, or as many as are left out. No round
    draws more than are missing: otherwise a record would be dropped again because of its number.
    """
    few = min(size, records - size)
    if _SPARSE * few < records:
        chosen = torch.empty(0, dtype=torch.int64)
        while missing := few - len(chosen):
            chosen = torch.unique(torch.cat([chosen, _draws(words, records, missing)]))
        if few == size:
            return chosen
        mask = np.zeros(records, dtype=bool)
        mask[chosen.numpy()] = True
    else:
        mask = np.zeros(records, dtype=bool)
        while missing := few - int(np.count_nonzero(mask)):
            mask[_draws(words, records, missing).numpy()] = True
    return torch.from_numpy(np.flatnonzero(mask == (few == size)))


def _draws(words: Words, records: int, most: int) -> Tensor:
    """Draw up to so many uniform records, with repeats; none by a number above all multiples."""
    last = (1 << 63) // records * records - 1
    drawn = words.numbers(most) & _HIGHEST
    return drawn[drawn <= last] % records
