"""Clipping, counted."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...base.codes import GradType, Style
from ...base.dtypes import by_dtype
from ...ops import clip
from ._native import addresses, kernels, tallied
from ._tally import Kernel, Tally

_GRAD_CODES = by_dtype(GradType)
_STYLE_CODES = Style.__members__


def _held(grads: clip.Gradients) -> tuple[list[torch.Tensor], list[int]]:
    """The gradients without gaps, and their columns."""
    tensors = [t.detach().contiguous() for t in clip.tensors_of(grads)]
    return tensors, [t.shape[1:].numel() for t in tensors]


def _sample_norm(
    grads: clip.Gradients,
    *,
    p: int = 2,
    scale: clip.Gradients | None = None,
    center: clip.Gradients | None = None,
) -> tuple[torch.Tensor, Tally]:
    tensors, columns = _held(grads)
    norms = torch.empty(len(tensors[0]), dtype=torch.float64)
    extras, kept = [], []
    for extra in (center, scale):
        given = [] if extra is None else [_real(t) for t in clip.tensors_of(extra)]
        kept.append(given)
        extras += [addresses(given) or [0] * len(tensors)]
        extras += [[t.dtype is torch.float64 for t in given] or [False] * len(tensors)]
    code = _GRAD_CODES[tensors[0].dtype]
    packed = kernels().sample_norm(
        code, len(tensors[0]), p, addresses(tensors), columns, *extras, norms.data_ptr()
    )
    return norms, tallied(packed)[1]


def _real(tensor: torch.Tensor) -> torch.Tensor:
    wide = tensor.detach()
    return (wide if wide.dtype in (torch.float32, torch.float64) else wide.double()).contiguous()


def _clip_sum(
    grads: clip.Gradients,
    max_grad_norm: float | Sequence[float],
    *,
    p: int = 2,
    style: str = "flat",
    arithmetic: str = "float",
    unit: float | Sequence[float] | None = None,
    out: Sequence[torch.Tensor] | None = None,
) -> tuple[clip.ClipResult, Tally]:
    request = clip.Request.of(grads, max_grad_norm, p, style, arithmetic, unit)
    sums = request.accumulators(out)
    tensors, columns = _held(grads)
    norms = torch.empty(len(tensors[0]), dtype=torch.float64)
    code = 1 if arithmetic == "float" else (2 if sums[0].dtype is torch.int32 else 3)
    packed = kernels().clip_sum(
        len(tensors[0]),
        p,
        _STYLE_CODES[style],
        code,
        _GRAD_CODES[tensors[0].dtype],
        out is None,
        addresses(tensors),
        addresses(sums),
        columns,
        list(request.max_norms),
        [1.0 / u for u in request.units],
        list(request.unit_bounds),
        norms.data_ptr(),
    )
    return request.result(sums, norms), tallied(packed)[1]


KERNELS: dict[str, Kernel] = {"clip.sample_norm": _sample_norm, "clip.clip_sum": _clip_sum}
