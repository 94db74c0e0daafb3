"""Keep the memory of a step's clipped sums for the next step.

Fresh pages cost more than zeroing. The memory is used again only when no tensor shares it any more,
not even a view of a sum of the step before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

KEPT = 1 << 22
"""Maximum number of entries that are kept; larger sums are allocated anew."""
_ALIGNED = 16


class SumStore:
    """The memory of zeros that is cut into the shapes asked for."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self._alone = 0
        """Number of holders of the memory while no sum uses it."""

    def zeros(
        self, shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device
    ) -> list[Tensor]:
        """Return contiguous zeros of these shapes."""
        sizes = [math.prod(shape) for shape in shapes]
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + -(-size // _ALIGNED) * _ALIGNED)
        memory = self._free(starts[-1], dtype, device)
        return [
            memory[start : start + size].view(torch.Size(shape))
            for start, size, shape in zip(starts, sizes, shapes, strict=False)
        ]

    def _free(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        held = self._memory
        if size > KEPT or (held is not None and _holders(held) > self._alone):
            return torch.zeros(size, dtype=dtype, device=device)
        if held is not None and (len(held), held.dtype, held.device) == (size, dtype, device):
            return held.zero_()
        self._memory = torch.zeros(size, dtype=dtype, device=device)
        self._alone = _holders(self._memory)
        return self._memory


def _holders(tensor: Tensor) -> int:
    """Return the number of holders of this tensor's memory, tensors and others."""
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # type: ignore[attr-defined, unused-ignore]
    return count
