"""Small explicit gradients side by side: one norm and one contraction for all of them.

A model has many biases and scales; one operation for each would cost more than their numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..ops.clip import sum_dtype
from .records import Explicit
from .uses import Arrival, Slot

LARGEST = 1 << 8
"""Numbers per sample up to which a gradient counts as small."""


class Pack:
    """The small explicit gradients among these.

    Args:
        parts: what arrived for each parameter.
    """

    def __init__(self, parts: Sequence[tuple[Slot, Sequence[Arrival]]]) -> None:
        chosen = [(slot, part[0].record) for slot, part in parts if _is_small(part)]
        kinds = {(sum_dtype(s.parameter.dtype), s.parameter.device, r.batch) for s, r in chosen}
        if len(chosen) < 2 or len(kinds) > 1:
            chosen = []
        self.slots = [slot for slot, _ in chosen]
        self.places: dict[int, slice] = {}
        """Where each parameter's numbers stand, by the parameter's index."""
        self.arrivals: list[Arrival] = []
        if not chosen:
            return
        ((self.dtype, _, batch),) = kinds
        end = 0
        for slot in self.slots:
            start, end = end, end + math.prod(slot.shape)
            self.places[slot.index] = slice(start, end)
        rows = [
            record.per_sample().reshape(batch, math.prod(record.shape)).to(self.dtype)
            for _, record in chosen
        ]
        self.arrivals = [Arrival(Explicit(torch.cat(rows, dim=1)))]

    def sums(self, factors: Mapping[torch.dtype, Tensor]) -> dict[int, Tensor]:
        """The weighted sums by the parameter's index."""
        if not self.arrivals:
            return {}
        (arrival,) = self.arrivals
        record = arrival.record
        assert isinstance(record, Explicit)
        total = record.grads.new_zeros(record.shape)
        record.add_sum(factors[self.dtype], total)
        return {slot.index: total[self.places[slot.index]].view(slot.shape) for slot in self.slots}


def _is_small(part: Sequence[Arrival]) -> bool:
    if len(part) != 1 or part[0].rows is not None or part[0].square is not None:
        return False
    record = part[0].record
    small = math.prod(record.shape) <= LARGEST
    return isinstance(record, Explicit) and record.squares is None and small
