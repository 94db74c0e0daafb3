"""Bytes, operations and random words of one call of an op."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """The traffic and operations of one call, a projection of its closed form (``cost.forms``).

    Attributes:
        bytes_read, bytes_written: traffic at the call's edge: every byte of an operand that is read
            and every one that is written once, whatever a kernel reads again.
        flops: additions, subtractions, products, quotients and roots of floating numbers, for data
            that is finite, clipped and moved.
        random_words: 32-bit words that the generator makes, in whole tiles, tails apart.
        launches: kernel launches (parallel regions on a CPU).
    """

    bytes_read: int
    bytes_written: int
    flops: int
    random_words: int = 0
    launches: int = 1

    @property
    def bytes(self) -> int:
        """Total traffic."""
        return self.bytes_read + self.bytes_written
