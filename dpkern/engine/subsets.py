"""Draw subsets of a data set's records from the words of a stream.

Every law here is exact: no float decides. A random number that is compared with a bound is drawn in
two parts, a byte for every record and 64 bits more for those whose byte leaves it open. A uniform
subset is drawn record by record; if it is small, in time that does not grow with the data set.
"""

from __future__ import annotations

import sys
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..base.rng import Stream
from ..ops.noise import keystream

_HIGHEST = (1 << 63) - 1
_BLOCK = 64
"""Bytes of one block of a stream."""
_SPARSE, _LISTED = 64, 2048
"""Subsets of less than one record in so many, or of no more records, are kept as a list while they
are drawn, others as a mask."""


class Words:
    """The words of one stream, each of which is used once.

    Args:
        stream: the stream.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._next = 0

    def _take(self, size: int, unit: int) -> NDArray[np.int32]:
        """Draw at least ``size`` bytes, whose units have their lowest byte first everywhere."""
        blocks = -(-size // _BLOCK)
        drawn = keystream(self._stream, first_block=self._next, blocks=blocks).numpy()
        self._next += blocks
        if sys.byteorder == "big":
            lowest_first = drawn.view(np.uint8).reshape(-1, 4)[:, ::-1].reshape(-1, unit)
            drawn = np.ascontiguousarray(lowest_first[:, ::-1]).reshape(-1).view(np.int32)
        return drawn

    def bytes(self, count: int) -> NDArray[np.uint8]:
        """Draw independent uniform bytes, uint8 [count]."""
        return self._take(count, 1).view(np.uint8)[:count]

    def numbers(self, count: int) -> NDArray[np.uint64]:
        """Draw independent uniform 64-bit numbers, uint64 [count]."""
        return self._take(8 * count, 8).view(np.uint64)[:count]


def independent_subset(words: Words, records: int, threshold: int) -> Tensor:
    """Let each record join with probability ``threshold / 2^72`` below 1, ascending, int64.

    A record's 72-bit number is a byte above a 64-bit number, which is drawn only if the byte does
    not exceed the threshold's.
    """
    highest, rest = divmod(threshold, 1 << 64)
    first = words.bytes(records)
    open_yet = np.flatnonzero(first <= highest)
    below = words.numbers(len(open_yet)) < np.uint64(rest)
    return torch.from_numpy(open_yet[below | (first[open_yet] < highest)])


def uniform_subset(words: Words, records: int, size: int) -> Tensor:
    """Draw one of all subsets of exactly ``size`` records, ascending, int64 [size].

    Records are drawn until ``size`` different ones are there, or as many as are left out.
    """
    few = min(size, records - size)
    if few <= _LISTED or _SPARSE * few < records:
        chosen = _different(words, records, few)
        if few == size:
            chosen.sort()
            return torch.from_numpy(chosen)
        mask = np.zeros(records, dtype=bool)
        mask[chosen] = True
    else:
        mask = np.zeros(records, dtype=bool)
        # No round draws more than are missing: a record would be dropped because of its number.
        while missing := few - int(np.count_nonzero(mask)):
            mask[_draws(words, records, missing)] = True
    return torch.from_numpy(np.flatnonzero(mask == (few == size)))


def _different(words: Words, records: int, few: int) -> NDArray[np.int64]:
    """Draw records until so many different ones are there, at most half of all."""
    # Usually enough: on average it takes n ln(n / (n - few)), at most few + 0.8 few^2 / n.
    missing = few + few * few // records + 8
    drawn: dict[int, None] = {}  # in the order in which they were drawn first
    while len(drawn) < few:
        drawn |= dict.fromkeys(_draws(words, records, missing).tolist())
        missing = few - len(drawn) + 8
    return np.fromiter(islice(drawn, few), np.int64, few)


def _draws(words: Words, records: int, most: int) -> NDArray[np.int64]:
    """Draw up to so many uniform records, with repeats; none by a number above all multiples."""
    last = (1 << 63) // records * records - 1
    drawn = words.numbers(most).view(np.int64) & _HIGHEST
    if drawn.max(initial=0) > last:
        drawn = drawn[drawn <= last]
    return drawn % records
