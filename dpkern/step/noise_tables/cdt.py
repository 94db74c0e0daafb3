"""Draw noise from a cumulative table of the certified law, as small hardware does.

The table is public and fixed, its indices are fresh and secret: that is differential privacy, but
for what the table's words cannot resolve (``docs/noise_tables.md``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...base.laws import LAWS
from ...base.rng import Purpose
from ...ops import noise
from ...ops._cdt import WORDS_PER_DRAW
from ...ops._draws import CdtDraws, Draws
from ...privacy.accounting import Accountable, shown_bound
from ...privacy.accounting.events import EventSpec
from ...privacy.mechanisms.plan import Plan
from ._cdt_law import CdtLaw
from .source import Layout, NoiseSource, alias


class CdtTable(NoiseSource):
    """A noise source that looks up its draws' magnitudes in a table of ``word_bits``-bit words.

    Certificates hold for the law with the table's total variation distance set aside,
    ``(1 + e^epsilon) TV`` of delta for each coordinate of each release. On a CPU the step's own
    kernels look the draws up; on other backends a kernel before them does (devices: not yet run
    on a GPU). Sums are rounded by the usual stream.

    Args:
        word_bits: from 8 to 124; a draw takes two keystream words whatever it is.

    Raises:
        InvalidInput: a number out of range.
    """

    name = "cdt"

    def __init__(self, *, word_bits: int = 64) -> None:
        super().__init__()
        self._laws = {law: CdtLaw(law, word_bits) for law in LAWS}
        self._word_bits = word_bits
        self._produced = self._consumed = 0
        self._placed_table: torch.Tensor | None = None

    def covered(self, plan: Plan) -> Accountable:
        return plan if plan.distribution is None else _Covered(plan, self._laws[plan.distribution])

    @property
    def variation(self) -> float:
        return max(law.variation_bound for law in self._laws.values())

    @property
    def settings(self) -> tuple[object, ...]:
        return self.name, self._word_bits

    def words(self, plan: Plan) -> dict[str, int]:
        """Return keystream words: two for each coordinate, and a half for rounding."""
        words = {**plan.words}
        for block in plan.blocks if plan.distribution is not None else ():
            if block.noise_scale > 0:
                more = WORDS_PER_DRAW * block.size - noise.noise_words(block.size)
                words["consumed"] += more
                whole = noise.TILE * noise.tiles(0, block.size)
                words["produced"] += WORDS_PER_DRAW * whole - noise.noise_words(whole)
        return words

    def provenance(self) -> dict[str, Any]:
        made, used = self._produced, self._consumed
        words = {"produced": made, "consumed": used, "reused": 0, "discarded": made - used}
        law = None if self._layout is None else self._laws[self._layout.law]
        apart = None if law is None else law.variation_bound
        text = (
            f"fresh single-use indices into a table of {self._word_bits}-bit words; words produced "
            f"{made}, consumed {used}, reused 0, discarded {made - used}"
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

    def _table(self, layout: Layout) -> torch.Tensor:
        """Return the law's table where the parameters are."""
        if self._placed_table is None:
            self._placed_table = self._laws[layout.law].table.to(layout.device)
        return self._placed_table

    def _made(self, step: int) -> Draws:
        assert self._key is not None
        assert self._layout is not None
        layout = self._layout
        number, first = layout.place(step)
        stream = self._key.stream(Purpose.TABLES, number, layout.substream)
        table = alias(self._table(layout))
        self._consumed += WORDS_PER_DRAW * layout.count
        self._produced += WORDS_PER_DRAW * noise.TILE * noise.tiles(first, layout.count)
        return CdtDraws(first, table, stream=stream, distribution=layout.law)


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
