"""The parts of a case: callables that reuse their buffers, and values to give them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dpkern.base.op_cost import Cost


@dataclass(frozen=True)
class Work:
    """A case made concrete: callables without arguments that reuse their buffers.

    Attributes:
        ours: the op on the backend asked for.
        torch: the best torch formulation of the same work, or None where torch has none.
        cost: what the op says one call costs.
    """

    ours: Callable[[], Any]
    torch: Callable[[], Any] | None
    cost: Cost


def random_values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)
