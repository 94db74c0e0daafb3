"""Open gates: parameters at zero hide what is behind them from a probe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .parameter import without_torch_function

GATE = 0.1
"""Standard deviation of the values that replace all-zero parameters during a probe."""


def is_zero(data: Tensor) -> bool:
    """Whether a parameter is zero throughout, and so may hide what is behind it."""
    if data.layout is not torch.strided or data.is_meta:
        return False
    return not (data.dim() and data[:1].any()) and not data.any()


_LINEAR = (
    *(nn.Linear, nn.Bilinear, nn.modules.linear.NonDynamicallyQuantizableLinear),
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.LayerNorm, nn.GroupNorm),
)
_ADDED = dict.fromkeys(_LINEAR, "bias") | {nn.MultiheadAttention: "in_proj_bias"}
"""The parameter that modules of a type add, and do nothing else with."""


def possible_gates(module: nn.Module, trained: Sequence[Tensor]) -> list[Tensor]:
    """Return the trained parameters that may multiply; added biases hide nothing at zero."""
    with without_torch_function():
        added: set[int] = set()
        others: set[int] = set()
        for part in module.modules():
            bias = _ADDED.get(type(part))
            for name, parameter in part._parameters.items():
                (added if name == bias else others).add(id(parameter))
        return [p for p in trained if id(p) not in added or id(p) in others]


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
