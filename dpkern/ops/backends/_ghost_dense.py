"""The compiled CPU kernels of the ghost ops for linear, embedding and normalisation layers."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import increment_version

from ..ghost import affine, linear
from ..ghost._bounds import FLOATS
from . import cpu as _cpu  # used when called: cpu imports this module to register it

_ROUTE_CODES = {route: code for code, route in enumerate(linear.ROUTES)}
_NO_PADDING = -(2**63)
"""No id: a negative one is an id like any other where only norms are taken."""
_TYPES = {torch.float32: "float32", torch.float64: "float64"}


def _refuse(*args: Any, **_: Any) -> str | None:
    return _cpu._on_cpu(args[0])


def _refuse_linear(a: torch.Tensor, *_: Any, **__: Any) -> str | None:
    return _cpu._on_cpu(a) or not_wide(a)


def not_wide(x: torch.Tensor) -> str | None:
    """Why not, for 16-bit operands."""
    if x.dtype in FLOATS:
        return None
    return f"has float32 and float64 operands, got {str(x.dtype).removeprefix('torch.')}"


def _call(name: str, dtype: torch.dtype, *args: Any) -> None:
    """Run a kernel; tensors travel as addresses, None as null."""
    kernel = getattr(_cpu._C, f"{name}_{_TYPES[dtype]}")
    plain = [x.data_ptr() if isinstance(x, torch.Tensor) else 0 if x is None else x for x in args]
    kernel(*plain, _cpu._threads())


def _linear_norm(
    a: torch.Tensor, g: torch.Tensor, *, route: str = "auto", backend: str | None = None
) -> torch.Tensor:
    squares = torch.empty(a.shape[0], dtype=torch.float64)
    _call("linear_norm", a.dtype, a, g, *a.shape, g.shape[2], _ROUTE_CODES[route], squares)
    return squares


def _linear_gradient(
    a: torch.Tensor, g: torch.Tensor, *, backend: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    grads = torch.empty(a.shape[0], g.shape[2], a.shape[2], dtype=a.dtype)
    squares = torch.empty(a.shape[0], dtype=torch.float64)
    _call("linear_gradient", a.dtype, a, g, *a.shape, g.shape[2], grads, squares)
    return grads, squares


def _linear_sum(
    a: torch.Tensor,
    g: torch.Tensor,
    factors: torch.Tensor,
    out: torch.Tensor,
    *,
    backend: str | None = None,
) -> None:
    _call("linear_sum", a.dtype, a, g, *a.shape, g.shape[2], factors, out)
    increment_version(out)


def _embedding(ids: torch.Tensor, g: torch.Tensor, padding_idx: int | None) -> tuple[Any, ...]:
    """Operands and sizes of an embedding."""
    return ids, g, *g.shape, _NO_PADDING if padding_idx is None else padding_idx


def _embedding_norm(
    ids: torch.Tensor,
    g: torch.Tensor,
    *,
    padding_idx: int | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    squares = torch.empty(ids.shape[0], dtype=torch.float64)
    _call("embedding_norm", g.dtype, *_embedding(ids, g, padding_idx), squares)
    return squares


def _embedding_sum(
    ids: torch.Tensor,
    g: torch.Tensor,
    factors: torch.Tensor,
    out: torch.Tensor,
    *,
    padding_idx: int | None = None,
    backend: str | None = None,
) -> None:
    _call("embedding_sum", g.dtype, *_embedding(ids, g, padding_idx), factors, out)
    increment_version(out)


def _tied_cross(
    ids: torch.Tensor,
    e: torch.Tensor,
    a: torch.Tensor,
    g: torch.Tensor,
    *,
    padding_idx: int | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    products = torch.empty(ids.shape[0], dtype=torch.float64)
    sizes = a.shape[1], g.shape[2]
    _call("tied_cross", e.dtype, *_embedding(ids, e, padding_idx), a, g, *sizes, products)
    return products


def _layer_norm_backward(
    g: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    backend: str | None = None,
) -> affine.Gradients:
    dx = torch.empty_like(x, requires_grad=False)
    dweight, dbias = g.new_empty(2, g.shape[0], g.shape[2]).unbind()
    _call("layer_norm_backward", g.dtype, g, x, mean, rstd, weight, dx, dweight, dbias, *g.shape)
    return dx, dweight, dbias


def _rms_norm_backward(
    g: torch.Tensor,
    x: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    dx = torch.empty_like(x, requires_grad=False)
    dweight = g.new_empty(g.shape[0], g.shape[2])
    _call("layer_norm_backward", g.dtype, g, x, None, rstd, weight, dx, dweight, None, *g.shape)
    return dx, dweight


def _group_norm_backward(
    g: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    backend: str | None = None,
) -> affine.Gradients:
    dx = torch.empty_like(x, requires_grad=False)
    dweight, dbias = g.new_empty(2, *g.shape[:2]).unbind()
    groups = mean.shape[1]
    sizes = g.shape[0], groups, g.shape[1] // groups, g.shape[2]
    operands = g, x, mean, rstd, weight
    _call("group_norm_backward", g.dtype, *operands, dx, dweight, dbias, *sizes)
    return dx, dweight, dbias


KERNELS: tuple[tuple[str, Any, Any], ...] = (
    ("ghost.linear_norm", _linear_norm, _refuse_linear),
    ("ghost.linear_gradient", _linear_gradient, _refuse_linear),
    ("ghost.linear_sum", _linear_sum, _refuse_linear),
    ("ghost.embedding_norm", _embedding_norm, _refuse),
    ("ghost.embedding_sum", _embedding_sum, _refuse),
    ("ghost.tied_cross", _tied_cross, _refuse),
    ("ghost.layer_norm_backward", _layer_norm_backward, _refuse),
    ("ghost.rms_norm_backward", _rms_norm_backward, _refuse),
    ("ghost.group_norm_backward", _group_norm_backward, _refuse),
)
"""``(op, run, refuse)``."""
