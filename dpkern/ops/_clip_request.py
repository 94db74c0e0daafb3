"""The arguments and results of clipping, shared by the reference and all kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch

from ..base import validate as check
from ..base.errors import InvalidInput
from ..base.layouts import CLIP_BOUND
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
        clipped_as: per tensor, the mechanism's release whose norm was clipped. None means that the
            norms are the tensors' own.
        bounded_by: of exact sums, ``checked``: each sample's norm of integers was computed; or
            ``proved``: it follows from the norms of its gradient (``docs/exact.md``).
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
    bounded_by: Literal["checked", "proved"] = "checked"


@dataclass(frozen=True)
class ClipBounds:
    """The clipping bounds of a list of tensors and what follows from them, one number per tensor.

    Attributes:
        max_norms: C of its clip group.
        units: u; 1 in float arithmetic.
        unit_bounds: ``M = floor(C / u)``; 0 in float arithmetic.
        norm_bound: what no sample's own contribution exceeds.
        enforced: the bound per clip group: one number, or one per tensor (per layer).
        unit: ``units`` in exact arithmetic, else None.
        p: the norm.
    """

    max_norms: tuple[float, ...]
    units: tuple[float, ...]
    unit_bounds: tuple[int, ...]
    norm_bound: float
    enforced: tuple[float, ...]
    unit: tuple[float, ...] | None
    p: int

    @staticmethod
    def of(
        max_grad_norm: float | Sequence[float],
        unit: float | Sequence[float] | None,
        count: int,
        p: int,
        style: str,
    ) -> ClipBounds:
        """Spread bounds and units over ``count`` tensors."""
        max_norms = _one_each(max_grad_norm, count)
        units = _one_each(1.0 if unit is None else unit, count)
        pairs = zip(max_norms, units, strict=True)
        most = (0,) * count if unit is None else tuple(unit_bound(c, u) for c, u in pairs)
        groups = range(count) if style == "per_layer" else range(1)
        enforced = [max_norms[i] if unit is None else most[i] * units[i] for i in groups]
        return ClipBounds(
            max_norms,
            units,
            most,
            sum(enforced) if p == 1 else math.hypot(*enforced),
            tuple(max_norms[i] for i in groups),
            None if unit is None else units,
            p,
        )

    def exact_dtype(self, batch_size: int) -> torch.dtype:
        """Return the narrowest dtype that holds every sum of integers."""
        most = batch_size * max(self.unit_bounds)
        return torch.int32 if most <= _INT32_MOST else torch.int64

    def result(
        self, sums: tuple[torch.Tensor, ...], norms: torch.Tensor, nonfinite: Count
    ) -> ClipResult:
        """Wrap sums and norms with the bound that was enforced."""
        fields = self._fields.copy()
        fields["sums"] = sums
        fields["norms"] = norms
        fields["nonfinite"] = nonfinite
        fields["batch_size"] = norms.numel()
        made = object.__new__(ClipResult)  # whose own way of setting attributes takes 2 us
        object.__setattr__(made, "__dict__", fields)
        return made

    @cached_property
    def _fields(self) -> dict[str, Any]:
        """The fields of every result; of those that a call makes only the places."""
        return {
            "sums": (),
            "norm_bound": self.norm_bound,
            "norms": None,
            "nonfinite": 0,
            "batch_size": 0,
            "arithmetic": "float" if self.unit is None else "exact",
            "unit": self.unit,
            "p": self.p,
            "max_norms": self.enforced,
            "raw": None,
            "clipped_as": None,
            "bounded_by": "checked",
        }

    @cached_property
    def packed(self) -> bytes:
        """The bounds in the form that compiled kernels take."""
        per_units = (1.0 / unit for unit in self.units)
        each = zip(self.max_norms, per_units, self.unit_bounds, strict=True)
        return b"".join(CLIP_BOUND.pack(*bound) for bound in each)


class ClipRequest(NamedTuple):
    """The arguments of one ``clip_sum`` call with what follows from them."""

    tensors: tuple[torch.Tensor, ...]
    bounds: ClipBounds
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
    ) -> ClipRequest:
        """Make the request of these arguments."""
        tensors = tensors_of(grads)
        bounds = ClipBounds.of(max_grad_norm, unit, len(tensors), p, style)
        return cls(tensors, bounds, p, style, arithmetic)

    @property
    def max_norms(self) -> tuple[float, ...]:
        """C per tensor."""
        return self.bounds.max_norms

    @property
    def units(self) -> tuple[float, ...]:
        """u per tensor."""
        return self.bounds.units

    @property
    def unit_bounds(self) -> tuple[int, ...]:
        """M per tensor."""
        return self.bounds.unit_bounds

    @property
    def batch_size(self) -> int:
        """B."""
        return int(self.tensors[0].shape[0])

    @property
    def exact_dtype(self) -> torch.dtype:
        """The narrowest dtype that holds every sum of integers."""
        return self.bounds.exact_dtype(self.batch_size)

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype of new sums."""
        exact = self.arithmetic == "exact"
        return self.exact_dtype if exact else sum_dtype(self.tensors[0].dtype)

    def accumulators(self, out: Sequence[torch.Tensor] | None) -> tuple[torch.Tensor, ...]:
        """Return tensors that receive the sums: ``out``, or zeros of the narrowest safe dtype."""
        if out is not None:
            return self.with_room(out)
        dtype = self.sum_dtype
        return tuple(torch.zeros(t.shape[1:], dtype=dtype, device=t.device) for t in self.tensors)

    def with_room(self, out: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return ``out``, whose int32 entries have room for this batch.

        Raises:
            InvalidInput: they have not.
        """
        if self.arithmetic == "exact":
            most = self.batch_size * max(self.unit_bounds)
            for tensor in out:
                if tensor.dtype is torch.int32 and tensor.numel():
                    _check_room(tensor, most)
        return tuple(out)

    def result(
        self, sums: tuple[torch.Tensor, ...], norms: torch.Tensor, nonfinite: Count | None = None
    ) -> ClipResult:
        """Wrap sums and norms with the bound that was enforced."""
        bad = count(~torch.isfinite(norms)) if nonfinite is None else nonfinite
        return self.bounds.result(sums, norms, bad)


def unit_bound(max_norm: float, unit: float) -> int:
    """Return ``M = floor(C / u)``, exactly: ``M u <= C``."""
    return math.floor(Fraction(max_norm) / Fraction(unit))


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of float sums: float64 for float64 gradients, else float32."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def tensors_of(grads: Gradients) -> tuple[torch.Tensor, ...]:
    """Return the gradients as a tuple of tensors."""
    return (grads,) if isinstance(grads, torch.Tensor) else tuple(grads)


def combine_norms(norms: torch.Tensor, p: int) -> torch.Tensor:
    """Combine norms per tensor ``[B, n]`` to norms per sample ``[B]``."""
    return norms.square().sum(1).sqrt() if p == 2 else norms.sum(1)


def _one_each(value: float | Sequence[float], count: int) -> tuple[float, ...]:
    return (float(value),) * count if isinstance(value, (int, float)) else (*map(float, value),)


def _check_room(total: torch.Tensor, more: int) -> None:
    """Check that ``more`` can join the largest entry of an int32 sum."""
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
