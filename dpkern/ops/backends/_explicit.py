"""The compiled CPU kernels of the ghost ops for gradients that exist anyway."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ..ghost import explicit
from . import _ghost_dense
from . import cpu as _cpu  # used when called: cpu imports this module to register it

Tensors = Sequence[torch.Tensor]


def _refuse(tensors: Tensors, *_: Any, **__: Any) -> str | None:
    return _cpu._on_cpu(tensors[0])


def _addresses(tensors: Tensors) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def _columns(grads: Tensors) -> list[int]:
    return [part.stride(0) if part.numel() else 0 for part in grads]


def _explicit_norm(grads: Tensors, *, backend: str | None = None) -> torch.Tensor:
    batch = grads[0].shape[0]
    squares = torch.empty(batch, dtype=torch.float64)
    items = _addresses(grads), _columns(grads), batch
    _ghost_dense._call("explicit_norm", grads[0].dtype, *items, squares)
    return squares


def _clip_factors(
    squares: Tensors,
    max_grad_norm: float,
    *,
    dtype: torch.dtype,
    scale: float = 1.0,
    automatic: bool = False,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch = squares[0].shape[0]
    norms = torch.empty(batch, dtype=torch.float64)
    factors = torch.empty(batch, dtype=dtype)
    rule = float(max_grad_norm), float(scale), automatic
    _ghost_dense._call("clip_factors", dtype, _addresses(squares), batch, *rule, norms, factors)
    return factors, norms


def _contract(
    grads: Tensors, factors: torch.Tensor, outs: Tensors, *, backend: str | None = None
) -> None:
    # A gradient in another order of entries is summed in that order; the sum is put right at last.
    flat = [
        out if part.is_contiguous() else torch.zeros(out.numel(), dtype=out.dtype)
        for part, out in zip(grads, outs, strict=True)
    ]
    items = _addresses(grads), _columns(grads), _addresses(flat)
    _ghost_dense._call("contract", factors.dtype, *items, factors, len(factors))
    for part, out, total in zip(grads, outs, flat, strict=True):
        if total is out:
            increment_version(out)
            continue
        order = [i - 1 for i in explicit.memory_order(part)]
        with torch.no_grad():
            out.permute(order).add_(total.view([out.shape[i] for i in order]))


KERNELS: tuple[tuple[str, Any, Any], ...] = (
    ("ghost.explicit_norm", _explicit_norm, _refuse),
    ("ghost.clip_factors", _clip_factors, _refuse),
    ("ghost.contract", _contract, _refuse),
)
"""``(op, run, refuse)``."""
