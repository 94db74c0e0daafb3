"""Memory for the clipped sums of a step, kept from one step to the next.

Fresh pages cost more than zeroing. The memory is handed out again only when nobody holds the sums
of the step before.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

KEPT = 1 << 22
"""Numbers; larger sums are allocated anew, where the share of fresh pages is the same for all."""
_ALIGNED = 16


class SumStore:
    """One piece of zeros, cut into the shapes asked for."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self._handed_out: list[weakref.ref[Tensor]] = []

    def zeros(
        self, shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device
    ) -> list[Tensor]:
        """Contiguous zeros of these shapes."""
        sizes = [math.prod(shape) for shape in shapes]
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + -(-size // _ALIGNED) * _ALIGNED)
        memory = self._free(starts[-1], dtype, device)
        views = [
            memory[start : start + size].view(torch.Size(shape))
            for start, size, shape in zip(starts, sizes, shapes, strict=False)
        ]
        if memory is self._memory:
            self._handed_out = [weakref.ref(view) for view in views]
        return views

    def _free(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        held = self._memory
        if any(view() is not None for view in self._handed_out) or size > KEPT:
            return torch.zeros(size, dtype=dtype, device=device)
        fits = held is not None and (len(held), held.dtype, held.device) == (size, dtype, device)
        if fits:
            assert held is not None
            return held.zero_()
        self._memory = torch.zeros(size, dtype=dtype, device=device)
        return self._memory
