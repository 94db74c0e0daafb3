"""Norms and coordinates of gradients behind a matrix per channel pair, for whitened clipping."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...base import validate as check
from ...base.dispatch import op
from ...base.errors import InvalidInput
from ...base.memory import is_dense
from ...base.signature import Double, Float, strided
from .. import ghost
from ..ghost._bounds import gamma
from ..ghost._conv_geometry import Size
from ._band import Band
from ._sizes import check_layer
from .conv_norm import check_band
from .conv_sum import conv_filtered


def _check(grads: Tensor, matrix: Tensor) -> None:
    if grads.dim() <= 3 or not is_dense(grads):
        raise InvalidInput(
            "grads",
            expected="[B, co, ci / groups, *kernel] without gaps, the samples outermost",
            got=f"shape {list(grads.shape)} with strides {grads.stride()}",
            remedy="Call .contiguous() first.",
        )
    taps = grads[:1, :1, :1].numel() if grads.shape[0] else _taps(grads)
    check.tensor(matrix=matrix, shape=(None, taps))


def _taps(grads: Tensor) -> int:
    taps = 1
    for size in grads.shape[3:]:
        taps *= size
    return taps


@op(check=_check)
@torch.no_grad()
def whitened_norm(
    grads: Float[Tensor, "B ...", strided],
    matrix: Double[Tensor, "r taps"],
) -> Double[Tensor, "squares: B"]:
    """Return the squared norm of each sample's coordinates, ``sum || M F ||^2`` over channel pairs.

    Args:
        grads: per-sample kernel gradients F ``[B, co, ci / groups, *kernel]``, float32 or float64,
            without gaps in memory and the samples outermost; the other dimensions in any order.
        matrix: M, float64 ``[r, taps]``.

    Returns:
        float64 ``[B]``: of exactly these numbers, never less than exact, and above it by at most
        ``1e-14 ||M|| ||F||``; not finite for a sample with NaN or inf.

    Raises:
        InvalidInput: wrong type, shape, dtype, device or layout.
    """
    pairs = grads.shape[1] * grads.shape[2]
    rows = grads.double().reshape(len(grads), pairs, matrix.shape[1])
    norms: Tensor = (rows @ matrix.T).flatten(1).norm(dim=1)
    error = gamma(matrix.shape[1] + 8) * matrix.norm() * rows.flatten(1).norm(dim=1)
    above: Tensor = norms + error
    return above.square() * (1 + 2.0**-42)


def conv_release(
    x: Tensor,
    g: Tensor,
    *,
    matrix: Tensor,
    kernel_size: Size,
    stride: Size = 1,
    padding: Size = 0,
    dilation: Size = 1,
    groups: int = 1,
    size: Sequence[int],
    band: Band | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the per-sample coordinates of the filtered kernel gradients, and their squared norms.

    ``y[b, o, c] = M F[b, o, c]`` with F the taps of ``h * R``: what is clipped and noised by a
    mechanism that releases a whitened crop.

    Args:
        x, g, kernel_size, stride, padding, dilation, groups, size, band: as ``conv_norm``.
        matrix: M, float64 ``[r, taps]`` (``WhitenedBasis.signal``).
        backend: name of the backend. None selects the first one that supports the call; see
            ``dpkern info``.

    Returns:
        ``[B, co, ci / groups, r]`` of the dtype of x (16 bits: float32), and float64 ``[B]``.

    Raises:
        InvalidInput: wrong type, shape, dtype, device, layout, size or band.
    """
    layer = check_layer(x, g, kernel_size, stride, padding, dilation, groups, size)
    check_band(band, layer)
    sizes: dict[str, Any] = {"kernel_size": kernel_size, "stride": stride, "dilation": dilation}
    sizes |= {"groups": groups, "backend": backend}
    if band is None:
        grads, _ = ghost.conv_gradient(x, g, padding=padding, **sizes)
    else:
        inputs = conv_filtered(x, layer, band, backend=backend)
        grads, _ = ghost.conv_gradient(inputs, g.to(inputs.dtype), **sizes)
    taps = layer.geometry.taps
    check.tensor(matrix=matrix, shape=(None, taps), dtypes=(torch.float64,), device=x.device)
    rows = grads.reshape(*grads.shape[:3], taps).double()
    coordinates = (rows @ matrix.T).to(grads.dtype).contiguous()
    return coordinates, ghost.explicit_norm([coordinates], backend=backend)


__all__ = ["conv_release", "whitened_norm"]
