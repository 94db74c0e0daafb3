"""Keep what a probe hears of each use: sums and norms of each sample's rows.

They live in blocks of many uses. Small tensors allocated one by one, between the large ones of a
backward pass, keep the pages around them from serving again: a ResNet's first batch took twice the
memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .uses import CapturedOp

USES = 64
"""Number of uses in a block."""


class Heard:
    """Sums and norms over each sample's rows, use by use, of one backward pass."""

    def __init__(self) -> None:
        self._uses: list[CapturedOp] = []
        self._places: list[Tensor] = []
        self._block: Tensor | None = None
        self._left = 0
        self.is_narrow = False
        """Whether any gradient is of 16 bits."""

    def __len__(self) -> int:
        return len(self._uses)

    def note(self, use: CapturedOp, rows: Tensor) -> None:
        """Note a gradient ``[B, entries]`` of a use: two numbers of each sample, in float64."""
        self.is_narrow = self.is_narrow or rows.element_size() == 2
        if not self._left or self._block is None or self._block.device != rows.device:
            size = (USES, 2, len(rows))
            self._block = torch.empty(size, dtype=torch.float64, device=rows.device)
            self._left = USES
        self._left -= 1
        place = self._block[self._left]
        torch.sum(rows, 1, dtype=torch.float64, out=place[0])
        torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64, out=place[1])
        self._uses.append(use)
        self._places.append(place)

    def __iter__(self) -> Iterator[tuple[CapturedOp, Tensor]]:
        return zip(self._uses, self._places, strict=True)
