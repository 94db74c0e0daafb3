"""Split logical batches into physical ones, and keep the order in which workers prepare them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import NamedTuple, Protocol

import torch

from ..base.errors import PrivacyError
from .sampling import PrivateBatchSampler


class Masks(Protocol):
    """The changes that an audit makes to the batches that are drawn (``engine.observing``)."""

    def drawn(self, number: int, records: torch.Tensor) -> torch.Tensor:
        """Return the records of logical batch ``number`` in place of those that were drawn."""

    def kept(self, number: int, part: torch.Tensor) -> torch.Tensor:
        """Return the records that are left of one physical batch of it."""


class PhysicalBatch(NamedTuple):
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
            size = records.shape[0]
            parts = (
                torch.split(records, self.most) if self.most and self.most < size else (records,)
            )
            for place, part in enumerate(parts):
                if self.masks is not None:
                    part = self.masks.kept(number, part)
                following = len(parts) - 1 - place
                queue.append(PhysicalBatch(part.shape[0], not place, not following, following))
                if part.shape[0]:
                    yield (part if ranks == 1 else part * ranks + rank).tolist()
