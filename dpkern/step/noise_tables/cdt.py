"""Draw noise from a cumulative table of the certified law, as small hardware does.

The table is public and fixed, its indices are fresh and secret: that is differential privacy, but
for what the table's words cannot resolve (``docs/noise_tables.md``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...base.laws import FINE_BITS, LAWS
from ...base.rng import Purpose
from ...ops import noise
from ...ops.update import Draws
from ...privacy.accounting import Accountable, shown_bound
from ...privacy.accounting.events import EventSpec
from ...privacy.mechanisms.plan import Plan
from ._cdt_law import HIGH_BITS, CdtLaw
from .source import NoiseSource

_PIECE = 1 << 16
_SIGN, _FIRST, _SECOND = 0, 1, 1 + FINE_BITS
"""Bits at which sign, first and second uniform begin in a coordinate's first word."""


class CdtTable(NoiseSource):
    """A noise source that looks up its draws' magnitudes in a table of ``word_bits``-bit words.

    Certificates hold for the law with the table's total variation distance set aside,
    ``(1 + e^epsilon) TV`` of delta for each coordinate of each release. They are made when they are
    taken, in plain torch on the CPU; sums are rounded by the usual stream.

    Args:
        word_bits: from 8 to 124.

    Raises:
        InvalidInput: a number out of range.
    """

    name = "cdt"

    def __init__(self, *, word_bits: int = 64) -> None:
        super().__init__()
        self._laws = {law: CdtLaw(law, word_bits) for law in LAWS}
        self._word_bits = word_bits
        self._drawn = 0

    def covered(self, plan: Plan) -> Accountable:
        return plan if plan.distribution is None else _Covered(plan, self._laws[plan.distribution])

    @property
    def variation(self) -> float:
        return max(law.variation_bound for law in self._laws.values())

    @property
    def settings(self) -> tuple[object, ...]:
        return self.name, self._word_bits

    def words(self, plan: Plan) -> dict[str, int]:
        """Return keystream words: one and an index for each coordinate, and a half for rounding."""
        found = dict(plan.words)
        if plan.distribution is None:
            return found
        size = sum(block.size for block in plan.blocks if block.noise_scale > 0)
        inline = noise.noise_words(size)
        more = self._each * size - inline
        return {name: count + more for name, count in found.items()}

    def provenance(self) -> dict[str, Any]:
        words = {"produced": self._drawn, "consumed": self._drawn, "reused": 0, "discarded": 0}
        law = None if self._layout is None else self._laws[self._layout.law]
        apart = None if law is None else law.variation_bound
        text = (
            f"fresh single-use indices into a table of {self._word_bits}-bit words; words produced "
            f"{self._drawn}, consumed {self._drawn}, reused 0, discarded 0"
        )
        if apart is not None:
            text += f"; each coordinate within total variation {shown_bound(apart)} of the "
            text += "certified law"
        return {
            "source": self.name,
            "words": words,
            "word_bits": self._word_bits,
            "variation": apart,
            "text": text,
        }

    def _made(self, step: int) -> Draws:
        assert self._layout is not None
        layout = self._layout
        values = torch.empty(layout.count, dtype=torch.int32)
        for start in range(0, layout.count, _PIECE):
            part = values[start : start + _PIECE]
            part.copy_(self._piece(step, layout.first + start, len(part)))
        self._drawn += self._each * layout.count
        return Draws(layout.first, values.to(layout.device))

    def _piece(self, step: int, position: int, count: int) -> torch.Tensor:
        """Return X at ``count`` positions from ``position`` on, int64."""
        assert self._layout is not None
        law = self._layout.law
        own, *index = self._words_at(step, position, count)
        rest = max(0, self._word_bits - HIGH_BITS)
        high = _bits(index, self._word_bits - rest)
        k = self._laws[law].magnitude(high, _bits(index[2:], rest))
        signed = torch.where((own >> _SIGN) & 1 == 1, -1 - k, k)
        first = (own >> _FIRST) & ((1 << FINE_BITS) - 1)
        if LAWS[law].uses_second_uniform:
            offset = 64 * ((own >> _SECOND) & 0xFF) + 32
        else:
            offset = torch.full_like(own, 1 << (FINE_BITS - 1))
        return (signed << FINE_BITS) + first + offset

    def _words_at(self, step: int, position: int, count: int) -> list[torch.Tensor]:
        """Return the words of these coordinates as int64: first one, then those of the index."""
        assert self._key is not None
        stream = self._key.stream(Purpose.TABLES, step)
        first, end = self._each * position, self._each * (position + count)
        block, last = first // 16, -(-end // 16)
        made = noise.keystream(stream, first_block=block, blocks=last - block)
        mine = made[first - 16 * block :][: end - first].view(count, self._each)
        return list((mine.to(torch.int64) & 0xFFFFFFFF).unbind(1))

    @property
    def _each(self) -> int:
        """Keystream words of a coordinate."""
        high = min(self._word_bits, HIGH_BITS)
        rest = self._word_bits - high
        return 1 + -(-high // 32) + -(-rest // 32)


def _bits(words: list[torch.Tensor], count: int) -> torch.Tensor:
    """Return the first ``count`` <= 62 bits of these words, int64."""
    if count == 0:
        return torch.zeros(0, dtype=torch.int64)
    if count <= 32:
        return words[0] & ((1 << count) - 1)
    return words[0] | ((words[1] & ((1 << (count - 32)) - 1)) << 32)


@dataclass(frozen=True)
class _Covered:
    """A plan whose noise is near its certified law."""

    plan: Plan
    law: CdtLaw

    @property
    def neighbouring(self) -> str:
        return self.plan.neighbouring

    @property
    def certified_for(self) -> str:
        return self.plan.certified_for

    @property
    def dimension(self) -> int | None:
        return self.plan.dimension

    @property
    def samples(self) -> int | None:
        return self.plan.samples

    @property
    def unsampled(self) -> EventSpec:
        return self.plan.unsampled

    @property
    def remarks(self) -> tuple[str, ...]:
        return (
            *self.plan.remarks,
            f"noise from a cumulative table of {self.law.word_bits}-bit words: each coordinate "
            f"takes (1 + e^epsilon) {shown_bound(self.law.variation_bound)} of delta",
        )

    @property
    def variation(self) -> float:
        return self.law.variation_bound

    def event_spec(self, dimension: int | None = None) -> EventSpec:
        return self.plan.event_spec(dimension)


__all__ = ["CdtTable"]
