"""Read noise again and again from a table of ready-made samples, as published hardware does.

It protects nothing: knowing the table, or seeing two releases that read the same entries, one can
subtract the noise. It is here so that this can be measured; ledgers and reports call it
non-private.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...base.rng import Key, Purpose
from ...ops import noise
from ...ops.update import Draws
from ...privacy.accounting import Accountable, events
from ...privacy.accounting.events import EventSpec
from ...privacy.accounting.history import NOTHING
from ...privacy.mechanisms.plan import Plan
from ._table import SCALE_BITS, TableShape
from .source import NoiseSource

SAMPLES, POINTER, MASK = 1, 2, 3
"""Their stream numbers; 0 is that of fresh indices."""


class SampleTable(NoiseSource):
    """A noise source that reads draws from a table filled once, from the run's key.

    A step reads as many samples as it has positions and goes on where the last one stopped. Not
    private, whatever its size: epsilon is infinite.

    Args:
        shape: contents and reading order; its ``distribution`` is what the samples look like,
            whatever the mechanism asks for.
    """

    name = "samples"

    def __init__(self, shape: TableShape | None = None) -> None:
        super().__init__()
        self.shape = TableShape() if shape is None else shape
        self._table = torch.empty(0, dtype=torch.int64)
        self._pointer = 0
        self._reads = 0

    def covered(self, plan: Plan) -> Accountable:
        return _Uncovered(plan, self.warning)

    @property
    def settings(self) -> tuple[object, ...]:
        return self.name, self.shape

    def words(self, plan: Plan) -> dict[str, int]:
        """Return keystream words of the rounding alone: nothing else is fresh."""
        inline = plan.words
        drawn = [block.size for block in plan.blocks if block.noise_scale > 0]
        tiles = sum(-(-size // 512) for size in drawn)
        own = {
            "produced": tiles * noise.noise_words(512),
            "consumed": sum(map(noise.noise_words, drawn)),
        }
        return {name: inline[name] - own[name] for name in inline}

    @property
    def warning(self) -> str:
        """The reason why nothing is certified."""
        return (
            f"table of {self.shape.entries} samples reused: no DP guarantee (delta = 1 against an "
            "adversary who knows the table)"
        )

    def provenance(self) -> dict[str, Any]:
        fresh = min(self._reads, self.shape.period)
        words = {"produced": self.shape.entries, "consumed": self._reads}
        words |= {"reused": self._reads - fresh, "discarded": 0}
        return {"source": self.name, "words": words, "text": self.warning}

    def _begin(self, step: int) -> None:
        if not len(self._table):
            self._fill()

    def _made(self, step: int) -> Draws:
        self._begin(step)
        assert self._layout is not None
        mask = self._secret(step, MASK) if self.shape.scrambled else 0
        indices, self._pointer = self.shape.indices(self._pointer, self._layout.count, mask)
        self._reads += self._layout.count
        units = self._table[indices] << (SCALE_BITS - self.shape.fraction_bits)
        return Draws(self._layout.first, units.to(torch.int32).to(self._layout.device))

    def _fill(self) -> None:
        assert self._key is not None
        self._table = table_of(self._key, self.shape)
        self._pointer = self._secret(0, POINTER)

    def _secret(self, step: int, which: int) -> int:
        """Return a secret index."""
        assert self._key is not None
        stream = self._key.stream(Purpose.TABLES, step, which)
        word = noise.keystream(stream, first_block=0, blocks=1)[0]
        return int(word) & (self.shape.entries - 1)

    def _end(self) -> None:
        self._table.zero_()
        self._table = torch.empty(0, dtype=torch.int64)


def table_of(key: Key, shape: TableShape) -> torch.Tensor:
    """Return the samples that this key fills a table with, int64 ``[K]``, unit 2^-fraction_bits."""
    stream = key.stream(Purpose.TABLES, 0, SAMPLES)
    words = noise.keystream(stream, first_block=0, blocks=-(-shape.entries // 16))
    whole = words[: shape.entries].to(torch.int64) & 0xFFFFFFFF
    return shape.samples((whole.double() + 0.5) / 2.0**32)


@dataclass(frozen=True)
class _Uncovered:
    """A plan whose noise protects nothing."""

    plan: Plan
    warning: str

    @property
    def neighbouring(self) -> str:
        return self.plan.neighbouring

    @property
    def certified_for(self) -> str:
        return NOTHING

    @property
    def dimension(self) -> int | None:
        return self.plan.dimension

    @property
    def unsampled(self) -> EventSpec:
        return self.plan.unsampled

    @property
    def remarks(self) -> tuple[str, ...]:
        return (*self.plan.remarks, self.warning)

    def event_spec(self, dimension: int | None = None) -> EventSpec:
        return events.non_private()


__all__ = ["SampleTable", "table_of"]
