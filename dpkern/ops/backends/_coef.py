"""The compiled CPU kernels of polynomial losses."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import increment_version

from .. import coef
from . import cpu as _cpu  # used when called: cpu imports this module to register it


def _refuse(first: torch.Tensor, *_: Any, **__: Any) -> str | None:
    return _cpu._on_cpu(first)


def _perturb(
    targets: torch.Tensor,
    *,
    form: str,
    noise: coef.Noise | None = None,
    out: coef.Coefficients | None = None,
    backend: str | None = None,
) -> coef.Coefficients:
    made = out or coef.Coefficients(torch.empty_like(targets), torch.empty_like(targets))
    outside = _cpu._C.coef_perturb(
        *coef.packed(targets, form, noise),
        targets.data_ptr(),
        *(tensor.data_ptr() for tensor in made),
        _cpu._threads(),
    )
    if outside:
        coef.refuse_release(targets, made)
    increment_version(made)
    return made


def _quadratic(
    z: torch.Tensor,
    targets: torch.Tensor,
    *,
    form: str,
    noise: coef.Noise | None = None,
    shift: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    made = out or (torch.empty(len(z), dtype=torch.float64), torch.empty_like(z))
    outside = _cpu._C.coef_quadratic(
        *coef.packed(targets, form, noise),
        z.data_ptr(),
        targets.data_ptr(),
        0 if shift is None else shift.data_ptr(),
        *(tensor.data_ptr() for tensor in made),
        _cpu._threads(),
    )
    if outside:
        coef.refuse_release(targets, made)
    increment_version(made)
    return made


def _expanded(
    hidden: torch.Tensor,
    targets: torch.Tensor,
    weights: torch.Tensor,
    *,
    noise: coef.Noise | None = None,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    made = out or coef.empty_results(hidden, weights)
    _cpu._C.coef_expanded(
        *coef.packed_features(hidden, weights, noise),
        *(tensor.data_ptr() for tensor in (hidden, targets, weights, *made)),
        _cpu._threads(),
    )
    increment_version(made)
    return made


KERNELS: tuple[tuple[str, Any, Any], ...] = (
    ("coef.perturb", _perturb, _refuse),
    ("coef.quadratic", _quadratic, _refuse),
    ("coef.expanded", _expanded, _refuse),
)
"""``(op, run, refuse)``."""
