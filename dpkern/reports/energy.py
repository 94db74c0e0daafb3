"""Bound the energy of counted work by published picojoules: a range, not a measurement.

Figures are those of N. Jouppi et al., "Ten lessons from three generations shaped Google's TPUv4i",
ISCA 2021, table 2, which takes its 45 nm column from M. Horowitz, "Computing's energy problem",
ISSCC 2014. A 32-bit addition and product take 0.38 and 1.31 pJ at 7 nm, 0.9 and 3.7 pJ at 45 nm; an
integer addition 0.03 and 0.1 pJ; 64 bits from a cache of 1 MB 14 and 100 pJ, from DDR memory 1300.

    low     arithmetic at 7 nm, every byte from a cache
    high    arithmetic at 45 nm, every byte from memory

The 45 nm column was checked against copies of Horowitz's table, which gives 1300 to 2600 pJ for 64
bits of DRAM; the 7 nm column was not found in another copy and is unverified.

Where operands lie is not known, so the truth is between. Instructions and leakage are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..base.counts import CIPHER

SOURCE = (
    "N. Jouppi et al., Ten lessons from three generations shaped Google's TPUv4i, ISCA 2021, "
    "table 2 (45 nm: M. Horowitz, ISSCC 2014; the 7 nm column is unverified)"
)
_WORDS_PER_BLOCK = 16
_ACCESS_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class ProcessNode:
    """Joules of operations at a process node, and of a byte from one level of memory.

    Attributes:
        flop: a floating-point operation: half additions, half products.
        integer: a 32-bit integer addition; also charged for exclusive ors and shifts.
        byte: a byte of an operand.
    """

    flop: float
    integer: float
    byte: float


LOW = ProcessNode(flop=(0.38e-12 + 1.31e-12) / 2, integer=0.03e-12, byte=14e-12 / _ACCESS_BYTES)
"""7 nm, bytes from a cache of 1 MB."""
HIGH = ProcessNode(flop=(0.9e-12 + 3.7e-12) / 2, integer=0.1e-12, byte=1.3e-9 / _ACCESS_BYTES)
"""45 nm, bytes from DDR memory."""


@dataclass(frozen=True)
class Energy:
    """Joules by the work that they are spent on."""

    flops: float
    words: float
    bytes: float

    @property
    def total(self) -> float:
        """The total energy."""
        return self.flops + self.words + self.bytes


def energy(*, bytes: int, flops: int, words: int, rounds: int) -> tuple[Energy, Energy]:
    """Return the least and the largest energy of this work.

    Args:
        bytes: of operands.
        flops: floating-point operations.
        words: random words.
        rounds: ChaCha rounds of a word's block.
    """
    per_word = sum(CIPHER[rounds].values()) / _WORDS_PER_BLOCK

    def at(node: ProcessNode) -> Energy:
        return Energy(
            flops=flops * node.flop, words=words * per_word * node.integer, bytes=bytes * node.byte
        )

    return at(LOW), at(HIGH)


__all__ = ["HIGH", "LOW", "SOURCE", "Energy", "ProcessNode", "energy"]
