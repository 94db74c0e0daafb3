"""Estimate energy by a proxy: published picojoules times counted work.

The proxy compares; it measures nothing.

Figures for a 45 nm process at 0.9 V: M. Horowitz, "Computing's energy problem (and what we can do
about it)", ISSCC 2014, figure 1.1.9: a 32-bit floating-point addition 0.9 pJ, multiplication 3.7
pJ, a 32-bit integer addition 0.1 pJ, and 1.3 to 2.6 nJ for 64 bits from DRAM. Instructions, caches
and leakage are left out; every declared byte is charged as if it came from DRAM, at the lower end.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..base.counts import CIPHER

SOURCE = (
    "M. Horowitz, Computing's energy problem (and what we can do about it), ISSCC 2014, "
    "figure 1.1.9 (45 nm, 0.9 V)"
)
FLOP = (0.9e-12 + 3.7e-12) / 2
"""Joules of a floating-point operation: half additions, half multiplications, as in products."""
INTEGER = 0.1e-12
"""Joules of a 32-bit integer addition; also charged for exclusive ors and shifts."""
BYTE = 1.3e-9 / 8
"""Joules of a byte from DRAM."""
_WORDS_PER_BLOCK = 16


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


def energy(*, bytes: int, flops: int, words: int, rounds: int) -> Energy:
    """Return the proxy for this work, whose random words take ``rounds`` ChaCha rounds."""
    per_word = sum(CIPHER[rounds].values()) / _WORDS_PER_BLOCK
    return Energy(flops=flops * FLOP, words=words * per_word * INTEGER, bytes=bytes * BYTE)
