"""The matrix product of linear layers, forwards ``x W^T + b`` and backwards ``g W``."""

from __future__ import annotations

from typing import Any

import torch

from ..base import validate as check
from ..base.dispatch import op
from ..base.errors import InvalidInput

FLOATS = (torch.float32, torch.float64)


def fits(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """Whether ``matmul`` takes these, up to the leading dimensions of ``x``."""
    alike = x.dtype in FLOATS and w.dtype is x.dtype and w.device == x.device
    dense = x.is_contiguous() and (w.is_contiguous() or w.t().is_contiguous())
    return alike and dense and (bias is None or (bias.dtype is x.dtype and bias.is_contiguous()))


def _validate(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    backend: str | None = None,
) -> str:
    check.tensor(x=x, shape=(None, None), dtypes=FLOATS, contiguous=True)
    kind: dict[str, Any] = {"dtypes": (x.dtype,), "device": x.device}
    check.tensor(w=w, shape=(x.shape[1], None), **kind)
    if not (w.is_contiguous() or w.t().is_contiguous()):
        raise InvalidInput(
            "w",
            expected="a contiguous matrix or the transpose of one",
            got=f"strides {w.stride()}",
            remedy="Call .contiguous() first.",
        )
    if bias is not None:
        check.tensor(bias=bias, shape=w.shape[1:], contiguous=True, **kind)
    return x.device.type


@op(validate=_validate)
@torch.no_grad()
def matmul(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """``x w + bias``.

    Args:
        x: ``[N, K]``, float32 or float64, contiguous.
        w: ``[K, M]``, same dtype, contiguous or the transpose of a contiguous matrix, as ``W.t()``.
        bias: ``[M]``, same dtype, or None.
        backend: who runs it.

    Returns:
        ``[N, M]``, a new tensor; sums are rounded in an order of the backend's own. Rows of ``x``
        never meet, so NaN stays in its row.

    Raises:
        InvalidInput: wrong type, shape, dtype, device or layout.
    """
    out = x @ w
    return out if bias is None else out.add_(bias)
