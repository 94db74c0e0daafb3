"""Count the published read of a noise table: two adders and a 2:1 multiplexer."""

from __future__ import annotations

from collections.abc import Sequence

from .scalar import Number, OpCounter, Word


class TableReader:
    """A reader that walks a table of K samples with a stride: 2 ADD, NOT, 2 AND, OR per read.

    The inventory (with an idle shifter besides) is the paper's, the wiring ours; the memory's own
    access is not counted, as in the paper. K is a power of two.

    Args:
        table: the samples.
        tally: collector of the operations.
        stride: added to the pointer before every read.
        base: added to the pointer for the address.

    Attributes:
        pointer: the place p of the last read, before the base is added.
    """

    def __init__(
        self, table: Sequence[float], tally: OpCounter, *, stride: int = 1, base: int = 0
    ) -> None:
        self._table, self._tally = table, tally
        self.pointer = tally.word(0)
        self._stride, self._base = tally.word(stride), tally.word(base)

    def read(self) -> Number:
        """Return the next sample: u = p + s; p = u >= K ? u - K : u; T[(p + o) mod K]."""
        size = len(self._table)
        moved = self.pointer + self._stride
        # K is a power of two: the adder's carries are the select, u - K is u without them.
        wrapped = self._tally.word(moved.value % size)
        carry = self._tally.word(-1 if moved.value >= size else 0)
        self.pointer = _multiplexer(carry, wrapped, moved)
        index = self.pointer + self._base
        return self._tally.number(self._table[index.value % size])


def _multiplexer(choice: Word, chosen: Word, otherwise: Word) -> Word:
    return (choice & chosen) | (~choice & otherwise)


__all__ = ["TableReader"]
