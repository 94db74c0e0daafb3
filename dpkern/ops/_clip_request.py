"""What a clipping call asks for and what it returns, shared by the reference and all kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import torch

from ..base import validate as check
from ..base.errors import InvalidInput
from ._count import Count, count

Gradients = torch.Tensor | Sequence[torch.Tensor]
_INT32_MOST = 2**31 - 1


@dataclass(frozen=True)
class ClipResult:
    """A clipped sum that carries its proof.

    Attributes:
        sums: one tensor per parameter, of the parameter's shape; float, or counts of ``unit``.
        norm_bound: no sample's own contribution has a larger norm (L2 for p = 2, L1 for p = 1).
        norms: float64 ``[B]`` norms before clipping; not finite for samples that were dropped.
        nonfinite: how many samples had a NaN or an infinity and contributed zero; for gradients on
            a device a 0-d tensor there, so that nothing waits.
        batch_size: B.
        arithmetic: ``float`` or ``exact``.
        unit: lattice unit per tensor, exact arithmetic only.
        p: the norm.
        max_norms: the bound per clip group: one number, or one per tensor (per layer).
        raw: sums of the same samples without clipping, for a release that bounds them itself; never
            returned, saved or logged.
        clipped_as: per tensor, the mechanism's release whose norm was clipped; None: the norms are
            the tensors' own.
    """

    sums: tuple[torch.Tensor, ...]
    norm_bound: float
    norms: torch.Tensor
    nonfinite: Count
    batch_size: int
    arithmetic: str
    unit: tuple[float, ...] | None
    p: int
    max_norms: tuple[float, ...]
    raw: tuple[torch.Tensor, ...] | None = field(default=None, repr=False)
    clipped_as: tuple[object, ...] | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Request:
    """The arguments of one ``clip_sum`` call with what follows from them."""

    tensors: tuple[torch.Tensor, ...]
    max_norms: tuple[float, ...]
    units: tuple[float, ...]
    unit_bounds: tuple[int, ...]
    p: int
    style: str
    arithmetic: str

    @classmethod
    def of(
        cls,
        grads: Gradients,
        max_grad_norm: float | Sequence[float],
        p: int,
        style: str,
        arithmetic: str,
        unit: float | Sequence[float] | None,
    ) -> Request:
        """Spread bounds and units over the tensors; ``M = floor(C / u)``."""
        tensors = tensors_of(grads)
        max_norms = _one_each(max_grad_norm, len(tensors))
        units = _one_each(1.0 if unit is None else unit, len(tensors))
        if arithmetic == "float":
            bounds = (0,) * len(tensors)
        else:
            bounds = tuple(unit_bound(c, u) for c, u in zip(max_norms, units, strict=True))
        return cls(tensors, max_norms, units, bounds, p, style, arithmetic)

    @property
    def batch_size(self) -> int:
        """B."""
        return int(self.tensors[0].shape[0])

    @property
    def exact_dtype(self) -> torch.dtype:
        """The narrowest dtype that holds every sum of integers."""
        most = self.batch_size * max(self.unit_bounds)
        return torch.int32 if most <= _INT32_MOST else torch.int64

    def accumulators(self, out: Sequence[torch.Tensor] | None) -> tuple[torch.Tensor, ...]:
        """The tensors that receive the sums: ``out``, or zeros of the narrowest safe dtype."""
        most = self.batch_size * max(self.unit_bounds)
        if out is not None:
            for tensor in out:
                if tensor.dtype is torch.int32 and tensor.numel():
                    _check_room(tensor, most)
            return tuple(out)
        exact = self.arithmetic == "exact"
        dtype = self.exact_dtype if exact else sum_dtype(self.tensors[0].dtype)
        return tuple(torch.zeros(t.shape[1:], dtype=dtype, device=t.device) for t in self.tensors)

    def result(self, sums: tuple[torch.Tensor, ...], norms: torch.Tensor) -> ClipResult:
        """Wrap sums and norms with the bound that was enforced."""
        exact = self.arithmetic == "exact"
        groups = range(len(self.tensors)) if self.style == "per_layer" else (0,)
        bounds = tuple(
            self.unit_bounds[i] * self.units[i] if exact else self.max_norms[i] for i in groups
        )
        return ClipResult(
            sums=sums,
            norm_bound=sum(bounds) if self.p == 1 else math.hypot(*bounds),
            norms=norms,
            nonfinite=count(~torch.isfinite(norms)),
            batch_size=self.batch_size,
            arithmetic=self.arithmetic,
            unit=self.units if exact else None,
            p=self.p,
            max_norms=tuple(self.max_norms[i] for i in groups),
        )


def unit_bound(max_norm: float, unit: float) -> int:
    """``M = floor(C / u)``, exactly: ``M u <= C``."""
    return math.floor(Fraction(max_norm) / Fraction(unit))


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of float sums: float64 for float64 gradients, else float32."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def tensors_of(grads: Gradients) -> tuple[torch.Tensor, ...]:
    """The gradients as a tuple of tensors."""
    return (grads,) if isinstance(grads, torch.Tensor) else tuple(grads)


def combine_norms(norms: torch.Tensor, p: int) -> torch.Tensor:
    """Norms per tensor ``[B, n]`` -> norms per sample ``[B]``."""
    return norms.square().sum(1).sqrt() if p == 2 else norms.sum(1)


def _one_each(value: float | Sequence[float], count: int) -> tuple[float, ...]:
    return (float(value),) * count if isinstance(value, (int, float)) else tuple(value)


def _check_room(total: torch.Tensor, more: int) -> None:
    """Whether ``more`` can join the largest entry of an int32 sum."""
    least, largest = total.aminmax()
    room = _INT32_MOST - more
    check.hold(
        (least >= -room) & (largest <= room),
        lambda: InvalidInput(
            "out",
            expected="int64 accumulators, for sums that may exceed 2^31 - 1",
            got="int32",
            remedy="Convert the accumulators with .to(torch.int64).",
        ),
    )
