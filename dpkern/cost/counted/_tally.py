"""The tally that a counted execution of an op returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ...base.counts import Counts


@dataclass(frozen=True, kw_only=True)
class CountedRun:
    """The operations and bytes that one execution took; tallies add.

    Attributes:
        counts: primitives, without those that depend on the noise that was drawn.
        random: primitives that depend on it: the law's tails.
        flops: additions, subtractions, products, quotients and roots of floating numbers.
        bytes_read, bytes_written: distinct bytes of the operands that were read and written, each
            once per direction.
    """

    counts: Counts = field(default_factory=Counts)
    random: Counts = field(default_factory=Counts)
    flops: int = 0
    bytes_read: int = 0
    bytes_written: int = 0

    @property
    def random_words(self) -> int:
        """The number of 32-bit words that the generator gave."""
        return self.counts["RNG"] + self.random["RNG"]

    def __add__(self, other: CountedRun) -> CountedRun:
        return CountedRun(
            counts=self.counts + other.counts,
            random=self.random + other.random,
            flops=self.flops + other.flops,
            bytes_read=self.bytes_read + other.bytes_read,
            bytes_written=self.bytes_written + other.bytes_written,
        )


Kernel = Callable[..., tuple[Any, CountedRun]]
"""A counted kernel: a function from an op's arguments to its result and what that took."""

__all__ = ["CountedRun", "Kernel"]
