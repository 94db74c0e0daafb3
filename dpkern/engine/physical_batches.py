"""Split logical batches into physical ones, and keep the order in which workers prepare them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import torch

from ..base.errors import PrivacyError
from .sampling import PrivateBatchSampler


class Masks(Protocol):
    """The changes that an audit makes to the batches that are drawn (``engine.observing``)."""

    def drawn(self, number: int, records: torch.Tensor) -> torch.Tensor:
        """Return the records of logical batch ``number`` in place of those that were drawn."""

    def kept(self, number: int, part: torch.Tensor) -> torch.Tensor:
        """Return the records that are left of one physical batch of it."""


@dataclass(frozen=True)
class PhysicalBatch:
    """A physical batch: its size and its place in its logical batch."""

    size: int
    first: bool
    final: bool
    following: int = 0
    """Number of physical batches of the same logical batch that come after this one."""


class PhysicalBatchSampler:
    """The batch sampler that gives workers the records of one physical batch after the other."""

    def __init__(self, batches: PrivateBatchSampler, steps: int, shard: tuple[int, int]) -> None:
        self.batches = batches
        self.steps = steps
        self.shard = shard
        self.left = steps
        self.most: int | None = None
        self._own = False
        self.masks: Masks | None = None
        """Set under an audit only."""
        self.queue: deque[PhysicalBatch] = deque()
        """Physical batches requested and not yet yielded, in order; empty ones need no worker."""

    def __len__(self) -> int:
        return self.steps

    @contextmanager
    def iterated_by_its_loader(self) -> Iterator[None]:
        """Allow iteration in this block, to the private loader, which knows whose samples come."""
        self._own = True
        try:
            yield
        finally:
            self._own = False

    def __iter__(self) -> Iterator[list[int]]:
        """Return an iterator over the records of each physical batch.

        Raises:
            PrivacyError: another loader was built from this sampler, as wrappers do.
        """
        if not self._own:
            raise PrivacyError(
                "data_loader",
                expected="the private loader itself",
                got="another loader made from its batch sampler, as accelerator.prepare() makes "
                "one",
                remedy="Leave the private loader out of prepare(), iterate over it, and move its "
                "tensors with .to(device); another loader cannot say which samples its batches "
                "are.",
            )
        self.queue = deque()
        return self._draw(self.queue)

    def _draw(self, queue: deque[PhysicalBatch]) -> Iterator[list[int]]:
        rank, ranks = self.shard
        for records in islice(iter(self.batches), self.left):
            number = self.batches.step - 1
            if self.masks is not None:
                records = self.masks.drawn(number, records)
            size = len(records)
            most = self.most or max(size, 1)
            for start in range(0, max(size, 1), most):
                part = records[start : start + most]
                if self.masks is not None:
                    part = self.masks.kept(number, part)
                following = max(size - 1 - start, 0) // most
                queue.append(PhysicalBatch(len(part), start == 0, following == 0, following))
                if len(part):
                    yield (part if ranks == 1 else part * ranks + rank).tolist()
