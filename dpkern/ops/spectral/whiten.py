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
from ..ghost._conv_geometry import Geometry, Size, check_geometry
from ._band import Band
from ._sizes import check_layer, planes
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


def by_positions(geometry: Geometry, rank: int) -> bool:
    """Whether whitened windows are cheaper than whitened gradients: for few output positions."""
    ins, outs = geometry.in_channels, geometry.out_channels
    taps, positions = geometry.taps, geometry.positions
    windows = positions * ins * taps * rank + positions * positions * (ins * rank + outs)
    return geometry.groups == 1 and 2 * windows < outs * ins * taps * rank


def whitened_conv_norm(
    x: Tensor,
    g: Tensor,
    *,
    matrix: Tensor,
    kernel_size: Size,
    stride: Size = 1,
    dilation: Size = 1,
    groups: int = 1,
    backend: str | None = None,
) -> Tensor:
    """Run ``whitened_norm`` on a convolution's per-sample gradients, none of which is kept.

    Where there are few output positions, M acts on the input's windows instead: with whitened
    windows ``a[t] = M window_t(x)`` the norm is that of ``sum_t g_t a_t^T``.

    Args:
        x: padded (and filtered) inputs ``[B, ci, *S]``, as ``filtered`` makes them.
        g: output gradients ``[B, co, *O]`` of the same dtype.
        matrix: M, float64 ``[r, taps]``.
        kernel_size, stride, dilation, groups: of the convolution; its padding is in x.
        backend: name of the backend. None selects the first one that supports the call; see
            ``dpkern info``.

    Returns:
        float64 ``[B]``, from above.

    Raises:
        InvalidInput: wrong type, shape, dtype, device, layout or size.
    """
    geometry = check_geometry(x, g, kernel_size, stride, 0, dilation, groups)
    if not by_positions(geometry, len(matrix)):
        sizes: dict[str, Any] = {"kernel_size": kernel_size, "stride": stride}
        sizes |= {"dilation": dilation, "groups": groups, "backend": backend}
        return whitened_norm(ghost.conv_gradient(x, g, **sizes)[0], matrix, backend=backend)
    windows = torch.nn.functional.unfold(
        planes(x),
        (1, *geometry.kernel)[-2:],
        dilation=(1, *geometry.dilation)[-2:],
        stride=(1, *geometry.stride)[-2:],
    )
    taps = windows.mT.reshape(len(x), geometry.positions, -1, geometry.taps)
    wide = taps.double()
    rows = (wide @ matrix.T).flatten(2).to(x.dtype)
    outs = g.flatten(2).mT.contiguous()
    norms = ghost.linear_norm(rows, outs, backend=backend).sqrt()
    # The rounding of every row, which need not cancel where the rows do.
    error = torch.finfo(x.dtype).eps * rows.double().norm(dim=2)
    error += gamma(geometry.taps + 8) * matrix.norm() * wide.flatten(2).norm(dim=2)
    above: Tensor = norms + (error * outs.double().norm(dim=2)).sum(1)
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


__all__ = ["by_positions", "conv_release", "whitened_conv_norm", "whitened_norm"]
