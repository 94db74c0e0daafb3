"""The matrix product of linear layers, forward ``x W^T + b`` and backward ``g W``."""

from __future__ import annotations

import torch
from torch import Tensor

from ..base.dispatch import op
from ..base.dtypes import FLOATS
from ..base.memory import is_matrix
from ..base.signature import Float, transposable


def fits(x: Tensor, w: Tensor, bias: Tensor | None = None) -> bool:
    """Whether ``matmul`` takes these, up to the leading dimensions of ``x``."""
    alike = x.dtype in FLOATS and w.dtype is x.dtype and w.device == x.device
    dense = x.is_contiguous() and is_matrix(w)
    return alike and dense and (bias is None or (bias.dtype is x.dtype and bias.is_contiguous()))


@op()
@torch.no_grad()
def matmul(
    x: Float[Tensor, "N K"],
    w: Float[Tensor, "K M", transposable],
    bias: Float[Tensor, "M"] | None = None,
) -> Float[Tensor, "out: N M"]:
    """Return ``x w + bias``.

    Args:
        x: ``[N, K]``, float32 or float64, contiguous.
        w: ``[K, M]``, same dtype, contiguous or the transpose of a contiguous matrix, as ``W.t()``.
        bias: ``[M]``, same dtype, or None.

    Returns:
        ``[N, M]``, a new tensor; sums are rounded in an order of the backend's own. Rows of ``x``
        never meet, so NaN stays in its row.

    Raises:
        InvalidInput: wrong type, shape, dtype, device or layout.
    """
    out = x @ w
    return out if bias is None else out.add_(bias)
