"""Primitive operations, and a number of each.

Conventions, so that all counts agree: a comparison is one CMP; a choice between two values
one MUX; ``max(a, b)`` one CMP and one MUX; a negation one SUB; an absolute value one AND (the sign
bit); floor, truncation and changes of the number format one CVT each; a fused ``a b + c`` one MUL
and one ADD. RNG counts 32-bit words of the generator, whatever it does inside (``CIPHER``). LOAD
and STORE count elements that cross an operation's edge. Loop counters and addresses are free.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

PRIMITIVES = (
    *("ADD", "SUB", "MUL", "DIV", "SQRT", "EXP", "LOG"),
    *("NOT", "AND", "OR", "XOR", "SHIFT", "MUX", "CMP", "CVT"),
    *("LOAD", "STORE", "RNG"),
)


class Counts(Mapping[str, int]):
    """A number for each primitive, zeros left out. Counts add, and multiply by n.

    Raises:
        KeyError: an unknown primitive.
    """

    def __init__(self, counts: Mapping[str, int] | None = None, /, **more: int) -> None:
        given = {**(counts or {}), **more}
        unknown = [name for name in given if name not in PRIMITIVES]
        if unknown:
            raise KeyError(f"no such primitive: {unknown[0]}")
        self._counts = MappingProxyType({p: given[p] for p in PRIMITIVES if given.get(p)})

    def __getitem__(self, primitive: str) -> int:
        if primitive not in PRIMITIVES:
            raise KeyError(primitive)
        return self._counts.get(primitive, 0)

    def __iter__(self) -> Iterator[str]:
        return iter(self._counts)

    def __len__(self) -> int:
        return len(self._counts)

    def __contains__(self, primitive: object) -> bool:
        return primitive in self._counts

    def __add__(self, other: Counts) -> Counts:
        both = dict(self._counts)
        for primitive, n in other._counts.items():
            both[primitive] = both.get(primitive, 0) + n
        return Counts(both)

    def __sub__(self, other: Counts) -> Counts:
        return Counts({p: self[p] - other[p] for p in PRIMITIVES})

    def __mul__(self, times: int) -> Counts:
        return Counts({p: n * times for p, n in self._counts.items()})

    __rmul__ = __mul__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Counts) and dict(self._counts) == dict(other._counts)

    def __hash__(self) -> int:
        return hash(tuple(self._counts.items()))

    def __repr__(self) -> str:
        return f"Counts({', '.join(f'{p}={n}' for p, n in self._counts.items())})"

    def priced(self, costs: Mapping[str, float]) -> float:
        """Return the sum of counts times costs; a primitive without a price costs nothing."""
        return sum(n * costs.get(p, 0) for p, n in self._counts.items())


CIPHER = {
    rounds: Counts(ADD=16 * rounds + 16, XOR=16 * rounds, SHIFT=32 * rounds, OR=16 * rounds)
    for rounds in (20, 12, 8)
}
"""One ChaCha block, 16 words of RNG: 4 quarter rounds a round, 4 additions, 4 exclusive ors and 4
rotations (two shifts and an or) in each, and the final 16 additions (RFC 8439, 2.1 to 2.3)."""


FORMULA, WALK, EXECUTED = "formula", "reference walk", "executed"
EVIDENCE = (FORMULA, WALK, EXECUTED)
"""The ways a number is known, the weakest first. ``formula``: a closed form in the sizes, and
nothing else. ``reference walk``: plain code (an op's reference, torch between ops, the steps of an
appendix) did the same work, and each of its operations was counted. ``executed``: the template that
ships did it, on scalars that count."""


def weakest(evidence: Iterable[str]) -> str:
    """Return the evidence of a sum of numbers. An empty sum has that of a formula."""
    return min(evidence, key=EVIDENCE.index, default=FORMULA)


@dataclass(frozen=True, kw_only=True)
class Item:
    """A line of an itemised count.

    Attributes:
        name: what is done, in a few words.
        counts: what it takes.
        kind: ``exact`` (to the last operation), ``printed`` (as a source counts it), ``modelled``
            (a textbook form of a library's routine) or ``random`` (depends on the noise; the
            expected number is in the note).
        note: what a reader must know about the line.
        evidence: how the counts are known, one of ``EVIDENCE``.
        bytes_read, bytes_written: what the loads and stores hold.
        flops: operations on floating numbers. None takes all additions, subtractions, products,
            quotients and roots of the counts.
    """

    name: str
    counts: Counts
    kind: str = "exact"
    note: str = ""
    evidence: str = FORMULA
    bytes_read: int = 0
    bytes_written: int = 0
    flops: int | None = None

    @property
    def floating(self) -> int:
        """Operations on floating numbers."""
        if self.flops is not None:
            return self.flops
        return sum(self.counts[p] for p in ("ADD", "SUB", "MUL", "DIV", "SQRT"))


@dataclass(frozen=True)
class Itemised:
    """An itemised count; adds, and multiplies by n."""

    items: tuple[Item, ...] = ()

    @property
    def counts(self) -> Counts:
        """The sum of all items."""
        return sum((item.counts for item in self.items), Counts())

    @property
    def evidence(self) -> str:
        """The evidence of the weakest item."""
        return weakest(item.evidence for item in self.items)

    def of(self, *kinds: str) -> Counts:
        """Return the sum of the items of these kinds."""
        return sum((item.counts for item in self.items if item.kind in kinds), Counts())

    def __add__(self, other: Itemised) -> Itemised:
        return Itemised(self.items + other.items)

    def priced(self, costs: Mapping[str, float]) -> float:
        """Return the cost of all items."""
        return self.counts.priced(costs)


__all__ = [
    "CIPHER",
    "EVIDENCE",
    "EXECUTED",
    "FORMULA",
    "PRIMITIVES",
    "WALK",
    "Counts",
    "Item",
    "Itemised",
    "weakest",
]
