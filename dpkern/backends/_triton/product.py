"""Matrix products: on GPUs torch's own library is the kernel."""

from __future__ import annotations

from typing import Any

import torch

from .launch import Aot


def _matmul(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    with torch.no_grad():
        return x @ w if bias is None else torch.addmm(bias, x, w)


def _never(*_: Any, **__: Any) -> None:
    return None


KERNELS: tuple[tuple[str, Any, Any], ...] = (("product.matmul", _matmul, _never),)
AOT: tuple[Aot, ...] = ()
