"""The compiled CPU kernels of the ghost ops for linear, embedding and normalisation layers."""

from __future__ import annotations

from typing import Any

import torch

from ..ops.ghost import linear
from . import cpu as _cpu  # used when called: cpu imports this module to register it

_ROUTE_CODES = {route: code for code, route in enumerate(linear.ROUTES)}


def _refuse_off_cpu(first: torch.Tensor, *_: Any, **__: Any) -> str | None:
    return _cpu._on_cpu(first)


def _linear(a: torch.Tensor, g: torch.Tensor) -> tuple[Any, ...]:
    """Type, addresses and sizes of the operands."""
    wide = a.dtype is torch.float64
    return wide, a.data_ptr(), g.data_ptr(), *a.shape, g.shape[2]


def _linear_norm(
    a: torch.Tensor, g: torch.Tensor, *, route: str = "auto", backend: str | None = None
) -> torch.Tensor:
    squares = torch.empty(a.shape[0], dtype=torch.float64)
    code = _ROUTE_CODES[route]
    _cpu._C.linear_norm(*_linear(a, g), code, squares.data_ptr(), _cpu._threads())
    return squares


def _linear_gradient(
    a: torch.Tensor, g: torch.Tensor, *, backend: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    grads = torch.empty(a.shape[0], g.shape[2], a.shape[2], dtype=a.dtype)
    squares = torch.empty(a.shape[0], dtype=torch.float64)
    addresses = grads.data_ptr(), squares.data_ptr()
    _cpu._C.linear_gradient(*_linear(a, g), *addresses, _cpu._threads())
    return grads, squares


KERNELS: tuple[tuple[str, Any, Any], ...] = (
    ("ghost.linear_norm", _linear_norm, _refuse_off_cpu),
    ("ghost.linear_gradient", _linear_gradient, _refuse_off_cpu),
)
"""``(op, run, refuse)``."""
