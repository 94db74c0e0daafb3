"""Logical batches as physical ones: what workers are asked for, and in which order it arrives."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from .sampling import Batches


@dataclass(frozen=True)
class Part:
    """A physical batch: its size and its place in its logical batch."""

    size: int
    first: bool
    final: bool
    following: int = 0
    """How many parts of the same logical batch come after this one."""


class Parts:
    """What the workers are asked for: the records of one physical batch after the other."""

    def __init__(self, batches: Batches, steps: int, shard: tuple[int, int]) -> None:
        self.batches = batches
        self.steps = steps
        self.shard = shard
        self.left = steps
        self.most: int | None = None
        self.queue: deque[Part] = deque()
        """Parts asked for and not yet handed out, in order; empty ones need no worker."""

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[int]]:
        self.queue = deque()
        return self._draw(self.queue)

    def _draw(self, queue: deque[Part]) -> Iterator[list[int]]:
        rank, ranks = self.shard
        for records in islice(iter(self.batches), self.left):
            size = len(records)
            most = self.most or max(size, 1)
            for start in range(0, max(size, 1), most):
                part = records[start : start + most]
                following = max(size - 1 - start, 0) // most
                queue.append(Part(len(part), start == 0, following == 0, following))
                if len(part):
                    yield (part * ranks + rank).tolist()
