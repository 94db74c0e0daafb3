"""Open gates: parameters at zero hide what is behind them from a probe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from .parameter import without_torch_function

GATE = 0.1
"""Standard deviation of the values that replace all-zero parameters during a probe."""


def is_zero(data: Tensor) -> bool:
    """Whether a parameter is zero throughout, and so may hide what is behind it."""
    if data.layout is not torch.strided or data.is_meta:
        return False
    return not (data.dim() and data[:1].any()) and not data.any()


@contextmanager
def gates_opened(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Replace parameters that are zero throughout by small random values in this block."""
    generator = torch.Generator().manual_seed(len(parameters))
    changed = []
    with without_torch_function(), torch.no_grad():
        for parameter in parameters:
            data = parameter.data
            if is_zero(data):
                noise = torch.randn(data.shape, generator=generator) * GATE
                changed.append(data)
                data.copy_(noise)
    try:
        yield
    finally:
        with torch.no_grad():
            for data in changed:
                data.zero_()
