"""The compiled CPU kernels of polynomial losses."""

from __future__ import annotations

from typing import Any

import torch

from ..ops import coef
from . import cpu as _cpu  # used when called: cpu imports this module to register it


def _refuse(first: torch.Tensor, *_: Any, **__: Any) -> str | None:
    return _cpu._on_cpu(first)


def _perturb(
    targets: torch.Tensor,
    *,
    form: str,
    noise: coef.Noise | None = None,
    backend: str | None = None,
) -> coef.Coefficients:
    made = coef.Coefficients(torch.empty_like(targets), torch.empty_like(targets))
    _cpu._C.coef_perturb(
        *coef.packed(targets, form, noise),
        targets.data_ptr(),
        *(out.data_ptr() for out in made),
        _cpu._threads(),
    )
    return made


def _quadratic(
    z: torch.Tensor,
    targets: torch.Tensor,
    *,
    form: str,
    noise: coef.Noise | None = None,
    shift: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    loss, dz = torch.empty(len(z), dtype=torch.float64), torch.empty_like(z)
    _cpu._C.coef_quadratic(
        *coef.packed(targets, form, noise),
        z.data_ptr(),
        targets.data_ptr(),
        0 if shift is None else shift.data_ptr(),
        loss.data_ptr(),
        dz.data_ptr(),
        _cpu._threads(),
    )
    return loss, dz


KERNELS: tuple[tuple[str, Any, Any], ...] = (
    ("coef.perturb", _perturb, _refuse),
    ("coef.quadratic", _quadratic, _refuse),
)
"""``(op, run, refuse)``."""
