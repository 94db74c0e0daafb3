"""A Python number that counts: each operation on it is one primitive of a tally."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from ..base.counts import Counts, Item, Itemised


class OpCounter:
    """A collector of counted numbers' operations, by the name of the phase they happen in.

    Args:
        newton_steps: do a square root by this many Newton steps instead of one SQRT.
        gate_weight: number of operations that a gate across a word counts for.
    """

    def __init__(self, *, newton_steps: int | None = None, gate_weight: int = 1) -> None:
        self.newton_steps = newton_steps
        self.gate_weight = gate_weight
        self._counts: dict[str, Counter[str]] = {}
        self._phase = ""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the operations inside under ``name``."""
        outer, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = outer

    def add(self, primitive: str, times: int = 1) -> None:
        """Add ``times`` of ``primitive`` to the present phase."""
        self._counts.setdefault(self._phase, Counter())[primitive] += times

    def number(self, value: float) -> Number:
        """Make a counted operand, which costs nothing."""
        return Number(value, self)

    def numbers(self, values: Iterator[float] | list[float]) -> list[Number]:
        """Make counted operands."""
        return [Number(value, self) for value in values]

    def word(self, value: int) -> Word:
        """Make a counted unsigned word."""
        return Word(value, self)

    @property
    def itemised(self) -> Itemised:
        """The operation counts, phase by phase in the order they began."""
        return Itemised(
            tuple(
                Item(name=name, counts=Counts(dict(counts)))
                for name, counts in self._counts.items()
            )
        )


class Number:
    """A float of a tally; the other operand may be a plain number."""

    __slots__ = ("tally", "value")

    def __init__(self, value: float, tally: OpCounter) -> None:
        self.value = float(value)
        self.tally = tally

    def _made(self, primitive: str, value: float) -> Number:
        self.tally.add(primitive)
        return Number(value, self.tally)

    def __add__(self, other: Number | float) -> Number:
        return self._made("ADD", self.value + _plain(other))

    def __sub__(self, other: Number | float) -> Number:
        return self._made("SUB", self.value - _plain(other))

    def __rsub__(self, other: float) -> Number:
        return self._made("SUB", other - self.value)

    def __mul__(self, other: Number | float) -> Number:
        return self._made("MUL", self.value * _plain(other))

    def __truediv__(self, other: Number | float) -> Number:
        return self._made("DIV", self.value / _plain(other))

    def __neg__(self) -> Number:
        return self._made("SUB", -self.value)

    def __gt__(self, other: Number | float) -> bool:
        self.tally.add("CMP")
        return self.value > _plain(other)

    def halved(self) -> Number:
        """Return half of the number, by a shift."""
        return self._made("SHIFT", self.value / 2)

    def exp(self) -> Number:
        """Return e to the power of the number."""
        return self._made("EXP", math.exp(self.value))

    def sqrt(self) -> Number:
        """Return the square root: one SQRT, or the tally's Newton steps s <- (s + v/s)/2."""
        if self.tally.newton_steps is None:
            return self._made("SQRT", math.sqrt(self.value))
        # The first guess halves the exponent, which is wiring.
        root = Number(math.ldexp(1.0, math.frexp(self.value)[1] // 2), self.tally)
        for _ in range(self.tally.newton_steps):
            root = (root + self / root) * 0.5
        return root


class Word:
    """An unsigned integer of a tally."""

    __slots__ = ("tally", "value")

    def __init__(self, value: int, tally: OpCounter) -> None:
        self.value = value
        self.tally = tally

    def _gate(self, primitive: str, value: int) -> Word:
        self.tally.add(primitive, self.tally.gate_weight)
        return Word(value, self.tally)

    def __add__(self, other: Word) -> Word:
        self.tally.add("ADD")
        return Word(self.value + other.value, self.tally)

    def __and__(self, other: Word) -> Word:
        return self._gate("AND", self.value & other.value)

    def __or__(self, other: Word) -> Word:
        return self._gate("OR", self.value | other.value)

    def __invert__(self) -> Word:
        return self._gate("NOT", ~self.value)


def select(condition: bool, chosen: Number, otherwise: Number) -> Number:
    """Return one of two values, by one MUX."""
    chosen.tally.add("MUX")
    return chosen if condition else otherwise


def _plain(operand: Number | float) -> float:
    return operand.value if isinstance(operand, Number) else operand


__all__ = ["Number", "OpCounter", "Word", "select"]
