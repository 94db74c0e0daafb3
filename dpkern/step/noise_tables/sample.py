"""Read noise again and again from a table of ready-made samples, as published hardware does.

It protects nothing: knowing the table, or seeing two releases that read the same entries, one can
subtract the noise. It is here so that this can be measured; ledgers and reports call it
non-private.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ...base.rng import Key, Purpose
from ...ops import noise
from ...ops._draws import Draws, SampleReads
from ...privacy.accounting import Accountable, events
from ...privacy.accounting.events import EventSpec
from ...privacy.accounting.history import NOTHING
from ...privacy.mechanisms.plan import Plan
from ._table import SCALE_BITS, TableShape
from .source import Layout, NoiseSource, alias

SAMPLES, POINTER, MASK = 1, 2, 3
"""Their stream numbers; 0 is that of fresh indices."""


_PIECE = 1 << 20
"""Reads whose indices are in memory together."""
_FEW = 1 << 11
"""Reading orders are repeated up to so many entries: kernels then seldom begin anew."""


class SampleTable(NoiseSource):
    """A noise source that reads draws from a table filled once, from the run's key.

    A step reads as many samples as it has positions and goes on where the one before it stopped.
    The table is laid out in that order once, in the hardware's bits, so that on a CPU the step's
    own kernels read it from end to end, and on a device a kernel before them (not yet run on a
    GPU); with ``scrambled`` the order is another one at every step,
    and is laid out anew. Not private, whatever its size: epsilon is infinite.

    Args:
        shape: contents and reading order; its ``distribution`` is what the samples look like,
            whatever the mechanism asks for. None is 2^16 samples of the law that it asks for.
    """

    name = "table"

    def __init__(self, shape: TableShape | None = None) -> None:
        super().__init__()
        self.shape, self._follows = shape or TableShape(), shape is None
        self._table = self._order = torch.empty(0, dtype=torch.int16)
        self._start = 0
        self._reads = 0

    def covered(self, plan: Plan) -> Accountable:
        return _Uncovered(plan, self.warning)

    def bind(self, key: Key, layout: Layout, *, backend: str | None = None) -> None:
        super().bind(key, layout, backend=backend)
        if self._follows:
            self.shape = replace(self.shape, distribution=layout.law)

    @property
    def settings(self) -> tuple[object, ...]:
        return self.name, None if self._follows else self.shape

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
        (_, first), count = self._layout.place(step), self._layout.count
        # Reads of the steps before this one; blocks of one stream are numbered from 0.
        before = count * (step if self._layout.one_stream is not None else step - 1)
        if self.shape.scrambled:
            pointer = (self._start + self.shape.stride * before) % self.shape.entries
            reads = max(1, min(count, self.shape.period))
            order, cursor = self._ordered(pointer, reads, self._secret(step, MASK)), 0
        else:
            order, cursor = self._order, before % self.shape.period
        self._reads += count
        shift = SCALE_BITS - self.shape.fraction_bits
        held = alias(order.to(self._layout.device))
        return SampleReads(first, held, cursor=cursor, shift=shift)

    def _fill(self) -> None:
        assert self._key is not None
        narrow = torch.int16 if self.shape.word_bits <= 16 else torch.int32
        self._table = table_of(self._key, self.shape).to(narrow)
        self._start = self._secret(0, POINTER)
        if not self.shape.scrambled:
            order = self._ordered(self._start, self.shape.period)
            self._order = order if self._layout is None else order.to(self._layout.device)

    def _ordered(self, pointer: int, reads: int, mask: int = 0) -> torch.Tensor:
        """Return what these reads fetch, one behind the other, several times if they are few."""
        made = torch.empty(reads, dtype=self._table.dtype)
        for start in range(0, reads, _PIECE):
            part = made[start : start + _PIECE]
            indices, pointer = self.shape.indices(pointer, len(part), mask)
            torch.take(self._table, indices, out=part)
        return made.repeat(-(-_FEW // reads))

    def _secret(self, step: int, which: int) -> int:
        """Return a secret index."""
        assert self._key is not None
        stream = self._key.stream(Purpose.TABLES, step, which)
        word = noise.keystream(stream, first_block=0, blocks=1)[0]
        return int(word) & (self.shape.entries - 1)

    def _forked(self) -> None:
        self._table = self._order = torch.empty(0, dtype=torch.int16)

    def _end(self) -> None:
        self._table.zero_()
        self._order.zero_()
        self._forked()


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
