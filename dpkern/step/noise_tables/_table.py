"""Describe a table of samples: its contents, its reading order, and the cost of a read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...base import validate as check
from ...base.counts import Counts
from ...base.errors import InvalidInput
from ...base.laws import LAWS, SCALE_UNITS

SCALE_BITS = SCALE_UNITS.bit_length() - 1
"""Draws count units of scale / 2^20."""

READ = Counts(ADD=2, NOT=1, AND=2, OR=1)
"""One read: pointer + stride, its wrap by a 2:1 multiplexer, + base. The shifter stands idle."""


@dataclass(frozen=True, kw_only=True)
class TableShape:
    """The contents and reading order of a table of samples.

    Attributes:
        entries: K, a power of two from 2 to 2^24.
        stride: s, what the pointer moves by at each read, below K.
        base: o, what is added to the pointer, below K.
        word_bits: bits of an entry, sign included; larger samples saturate.
        fraction_bits: how many of them are behind the point; samples have scale 1.
        distribution: ``laplace`` or ``gaussian``, both by their inverse distribution function.
        scrambled: exclusive or of the index with a secret mask, new at every step; one XOR more for
            each read. Off in the source.
        prescaled: the table holds samples times the noise scale; else a multiplication follows each
            read, one MUL more.

    Raises:
        InvalidInput: numbers that do not fit each other.

    Reference: the read model that SPOF (appendix G) attributes to the DINAR design.
    """

    entries: int = 1 << 16
    stride: int = 1
    base: int = 0
    word_bits: int = 16
    fraction_bits: int = 10
    distribution: str = "laplace"
    scrambled: bool = False
    prescaled: bool = True

    def __post_init__(self) -> None:
        check.integer(2, 1 << 24, entries=self.entries)
        if self.entries & (self.entries - 1):
            raise InvalidInput(
                "entries",
                expected="a power of two",
                got=self.entries,
                remedy="Choose a power of two: the index wraps by leaving its carry out.",
            )
        check.integer(1, self.entries - 1, stride=self.stride)
        check.integer(0, self.entries - 1, base=self.base)
        check.integer(0, SCALE_BITS, fraction_bits=self.fraction_bits)
        most = self.fraction_bits + 31 - SCALE_BITS  # in units of the lattice below 2^30
        check.integer(2, most, word_bits=self.word_bits)
        check.choice(LAWS, distribution=self.distribution)

    @property
    def per_read(self) -> Counts:
        """Operations of one read."""
        return READ + Counts(XOR=int(self.scrambled), MUL=int(not self.prescaled))

    @property
    def period(self) -> int:
        """Reads after which the same entries come again in the same order."""
        return self.entries // math.gcd(self.stride, self.entries)

    def samples(self, uniform: torch.Tensor) -> torch.Tensor:
        """Return ``round(2^f F^-1(u))``, saturated, for u in (0, 1), float64: int64."""
        u = uniform
        if self.distribution == "laplace":
            value = torch.where(u < 0.5, (2 * u).log(), -(2 * (1 - u)).log())
        else:
            value = torch.special.ndtri(u)
        most = (1 << (self.word_bits - 1)) - 1
        return (value * 2.0**self.fraction_bits).round().clamp(-most, most).long()

    def indices(self, pointer: int, count: int, mask: int = 0) -> tuple[torch.Tensor, int]:
        """Return the entries that ``count`` reads fetch, int64, and the pointer after them."""
        reads = torch.arange(1, count + 1, dtype=torch.int64)
        at = (pointer + self.base + self.stride * reads) & (self.entries - 1)
        return at ^ mask, (pointer + self.stride * count) & (self.entries - 1)


class Circuit:
    """An operation counter of unsigned words. Wires cost nothing."""

    def __init__(self) -> None:
        self.counts = Counts()

    def add(self, a: int, b: int) -> int:
        self.counts += Counts(ADD=1)
        return a + b

    def either(self, select: int, a: int, b: int, width: int) -> int:
        """Return ``a`` if the wire ``select`` is 1, else ``b``: (s AND a) OR (NOT s AND b)."""
        wide = -select & ((1 << width) - 1)  # the wire, fanned out
        self.counts += Counts(NOT=1, AND=2, OR=1)
        return (wide & a) | (~wide & b)

    def scramble(self, a: int, mask: int) -> int:
        self.counts += Counts(XOR=1)
        return a ^ mask

    def scale(self, a: int, scale: int) -> int:
        self.counts += Counts(MUL=1)
        return a * scale


def counted_reads(
    shape: TableShape, table: Sequence[int], pointer: int, count: int, mask: int = 0
) -> tuple[list[int], int, Counts]:
    """Count ``count`` reads as the circuit does them.

    Returns:
        the samples, the pointer after them, and what it took.
    """
    width = shape.entries.bit_length() - 1
    last = shape.entries - 1
    circuit, samples = Circuit(), []
    for _ in range(count):
        moved = circuit.add(pointer, shape.stride)
        carry = moved >> width  # the adder's
        pointer = circuit.either(carry, moved & last, moved, width) & last
        index = circuit.add(pointer, shape.base) & last
        if shape.scrambled:
            index = circuit.scramble(index, mask)
        sample = table[index] >> 0  # the shifter
        samples.append(sample if shape.prescaled else circuit.scale(sample, 1))
    return samples, pointer, circuit.counts


__all__ = ["READ", "SCALE_BITS", "TableShape", "counted_reads"]
