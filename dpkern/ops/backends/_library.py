"""Ops that are torch's own libraries on a device: products, transforms, sorts.

Every backend for devices has them, so that asking for one by name finds all that it needs.
"""

from __future__ import annotations

from typing import Any

import torch

from ..update import project
from . import _device_spectral


@torch.no_grad()
def _matmul(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    return x @ w if bias is None else torch.addmm(bias, x, w)


KERNELS: tuple[tuple[str, Any], ...] = (
    ("product.matmul", _matmul),
    ("update.project", project.reference),
    *_device_spectral.KERNELS,
)
"""``(op, run)``: they take whatever the ops take, on the device."""
