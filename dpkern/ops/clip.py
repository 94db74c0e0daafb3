"""Clipping: norms and clipped sums of explicit per-sample gradients, in two arithmetic tiers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ..base import validate as check
from ..base.codes import Style
from ..base.dispatch import op
from ..base.dtypes import DTYPES
from ..base.errors import InvalidInput
from ..base.signature import Double, Gradient, OneOrMore, strided
from ._clip_request import (
    ClipBounds,
    ClipRequest,
    ClipResult,
    Gradients,
    combine_norms,
    sum_dtype,
    tensors_of,
    unit_bound,
)
from ._lattice import round_down

Arithmetic = Literal["float", "exact"]
Power = Literal[1, 2]
STYLES = get_args(Style)
ARITHMETIC = get_args(Arithmetic)
GRAD_DTYPES = DTYPES["Gradient"]
SLACK = 1 - 2.0**-21
"""Clipping aims this far below C: rounding cannot lift a sample's own float term above C."""
GAMMA = 0.01
"""Stabiliser of automatic clipping, ``C g / (||g|| + gamma)`` (Bu et al. 2023)."""
MIN_BOUND = 2.0**-96
"""The smallest clipping bound: far above the rounding of denormal floats."""
MAX_BOUND = 2.0**96
"""The largest one where gradients are scaled up to it: far below the largest float."""
_MOST_UNITS = 1 << 24


def _check_sample_norm(
    grads: Sequence[Tensor], p: int, scale: Gradients | None, center: Gradients | None
) -> None:
    for name, extra in (("scale", scale), ("center", center)):
        if extra is None:
            continue
        listed = isinstance(extra, (Tensor, list, tuple))
        given = tensors_of(extra) if listed else ()
        if len(given) != len(grads):
            raise InvalidInput(
                name,
                expected=f"{len(grads)} tensors, one per gradient tensor",
                got=str(len(given)) if listed else type(extra).__name__,
                remedy="Give one tensor of the parameter's shape for each.",
            )
        for i, (g, e) in enumerate(zip(grads, given, strict=True)):
            check.tensor_at(f"{name}[{i}]", e, shape=g.shape[1:], device=g.device)
            if name == "scale" and not bool((e > 0).all()):
                raise InvalidInput(
                    f"scale[{i}]",
                    expected="entries > 0",
                    got="a tensor with other entries",
                    remedy="Pass positive scales: they divide the gradient.",
                )


@op(check=_check_sample_norm)
@torch.no_grad()
def sample_norm(
    grads: OneOrMore[Gradient[Tensor, "B *P", strided]],
    *,
    p: Power = 2,
    scale: Gradients | None = None,
    center: Gradients | None = None,
) -> Double[Tensor, "norms: B"]:
    """Return the norm of each sample's whole gradient: ``n_b = || (g_b - center) / scale ||_p``.

    Args:
        grads: per-sample gradients ``[B, ...]``, or one such tensor per parameter; float32,
            float64 or bfloat16.
        p: 1 or 2.
        scale, center: optional, of the parameters' shapes (whitened norms, as in AdaClip).

    Returns:
        float64 ``[B]``, accumulated in float64. NaN or infinite where the sample is not finite (or
        float64 squares overflow); 0 for zero rows; ``[0]`` for an empty batch.

    Raises:
        InvalidInput: wrong type, dtype, device, or batch sizes that differ.
    """
    tensors = tensors_of(grads)
    centers = (None,) * len(tensors) if center is None else tensors_of(center)
    scales = (None,) * len(tensors) if scale is None else tensors_of(scale)
    norms = []
    for g, c, s in zip(tensors, centers, scales, strict=True):
        g = g.double()
        g = g if c is None else g - c.double()
        g = g if s is None else g / s.double()
        norms.append(_row_norms(_rows(g), p))
    return combine_norms(torch.stack(norms, dim=1), p)


def _rows(grads: Tensor) -> Tensor:
    """Reshape ``[B, ...]`` to ``[B, P]``, also for scalar parameters and empty batches."""
    return grads.reshape(grads.shape[0], math.prod(grads.shape[1:]))


def _row_norms(rows: Tensor, p: int) -> Tensor:
    """Return float64 norms ``[B]``, which depend neither on the other rows nor on their number.

    torch splits a single row over its threads, but never a row among several.
    """
    several = torch.cat((rows, rows)) if len(rows) == 1 else rows
    norms: Tensor = torch.linalg.vector_norm(several.double(), ord=p, dim=1)
    return norms[: len(rows)]


def _check_clip_sum(
    tensors: Sequence[Tensor],
    max_grad_norm: float | Sequence[float],
    p: int,
    style: str,
    arithmetic: str,
    unit: float | Sequence[float] | None,
    out: Sequence[Tensor] | None,
) -> ClipRequest:
    bounds = bounds_of(len(tensors), max_grad_norm, unit, p, style, arithmetic)
    if out is not None:
        check_out(tensors, arithmetic, out)
    return ClipRequest(tuple(tensors), bounds, p, style, arithmetic)


def bounds_of(
    count: int,
    max_grad_norm: float | Sequence[float],
    unit: float | Sequence[float] | None,
    p: int,
    style: str,
    arithmetic: str,
) -> ClipBounds:
    """Return the bounds of so many tensors, checked.

    Raises:
        InvalidInput: numbers that do not fit each other or the style.
    """
    single = max_grad_norm.__class__ is float and (unit is None or unit.__class__ is float)
    checked = _known_bounds if single else _checked_bounds
    return checked(max_grad_norm, unit, count, p, style, arithmetic)


def _checked_bounds(
    max_grad_norm: float | Sequence[float],
    unit: float | Sequence[float] | None,
    count: int,
    p: int,
    style: str,
    arithmetic: str,
) -> ClipBounds:
    _check_per_tensor(count, style == "per_layer", max_grad_norm=max_grad_norm)
    if (unit is None) != (arithmetic == "float"):
        raise InvalidInput(
            "unit",
            expected="a lattice unit for exact arithmetic, None for float",
            got=unit,
            remedy="Pass unit = noise scale / 2^20 together with arithmetic='exact'.",
        )
    bounds = [max_grad_norm] if isinstance(max_grad_norm, (int, float)) else [*max_grad_norm]
    if min(bounds) < MIN_BOUND:
        raise InvalidInput(
            "max_grad_norm",
            expected="at least 2^-96",
            got=min(bounds),
            remedy="Raise max_grad_norm; smaller bounds underflow in float32.",
        )
    # A float sum that is only ever shrunk may have a bound that no gradient reaches.
    if max(bounds) > MAX_BOUND and (style == "automatic" or arithmetic == "exact"):
        raise InvalidInput(
            "max_grad_norm",
            expected="at most 2^96",
            got=max(bounds),
            remedy="Lower max_grad_norm; gradients are scaled up to it, which floats must hold.",
        )
    if unit is not None:
        _check_per_tensor(count, style == "per_layer", unit=unit)
    made = ClipBounds.of(max_grad_norm, unit, count, p, style)
    for bound in made.unit_bounds if unit is not None else ():
        if not 1 <= bound <= _MOST_UNITS:
            raise InvalidInput(
                "unit",
                expected="1 <= max_grad_norm / unit <= 2^24",
                got=f"{bound} units",
                remedy="Use noise multipliers from 2^-4 to 2^10: unit = scale / 2^20.",
            )
    return made


_known_bounds = lru_cache(maxsize=256)(_checked_bounds)
"""A run clips by the same few numbers at every step."""


def _check_per_tensor(count: int, each: bool, **value: object) -> None:
    ((name, got),) = value.items()
    if not each or (count == 1 and isinstance(got, (int, float))):
        check.positive_at(name, got)
        return
    if not isinstance(got, (list, tuple)) or len(got) != count:
        raise InvalidInput(
            name,
            expected=f"{count} numbers, one per tensor, for per-layer clipping",
            got=got,
            remedy="Pass a list with one number per parameter.",
        )
    for i, number in enumerate(got):
        check.positive_at(f"{name}[{i}]", number)


def check_out(tensors: Sequence[Tensor], arithmetic: str, out: Sequence[Tensor]) -> None:
    """Check accumulators for the sums of these gradients.

    Raises:
        InvalidInput: another list, or tensors of other shapes, dtypes or devices.
    """
    if not isinstance(out, (list, tuple)) or len(out) != len(tensors):
        raise InvalidInput(
            "out",
            expected=f"a list of {len(tensors)} accumulators",
            got=f"a list of {len(out)}" if isinstance(out, (list, tuple)) else type(out).__name__,
            remedy="Give one accumulator of the parameter's shape for each tensor.",
        )
    integers = (torch.int32, torch.int64)
    dtypes = integers if arithmetic == "exact" else (sum_dtype(tensors[0].dtype),)
    first: Any = getattr(out[0], "dtype", None)
    shapes = [g.shape[1:] for g in tensors]
    kind: dict[str, Any] = {"device": tensors[0].device, "contiguous": True}
    if first in dtypes and check.alike(out, dtypes=(first,), shapes=shapes, **kind):
        return
    for i, (shape, o) in enumerate(zip(shapes, out, strict=True)):
        name = f"out[{i}]"
        check.tensor_at(name, o, shape=shape, dtypes=dtypes, **kind)
        check.tensor_at(name, o, dtypes=(out[0].dtype,))


@op(check=_check_clip_sum)
@torch.no_grad()
def clip_sum(
    grads: OneOrMore[Gradient[Tensor, "B *P", strided]],
    max_grad_norm: float | Sequence[float],
    *,
    p: Power = 2,
    style: Style = "flat",
    arithmetic: Arithmetic = "float",
    unit: float | Sequence[float] | None = None,
    out: Sequence[Tensor] | None = None,
) -> ClipResult:
    """Clip per-sample gradients and return their sum: ``sum_b c_b g_b``, ``||c_b g_b||_p <= C``.

    ====================  =========================================================
    style                 factor
    ====================  =========================================================
    flat                  ``c_b = min(1, C / ||g_b||)`` over all tensors together
    per_layer             the same tensor by tensor, one C each
    automatic             ``c_b = C / (||g_b|| + 0.01)`` (Bu et al. 2023)
    ====================  =========================================================

    In ``exact`` arithmetic the sum is one of integers, ``q_b = trunc(c_b g_b / u)``; after rounding
    the kernel verifies ``sum |q_b|^p <= M^p`` with ``M = floor(C / u)`` in int64 and shrinks a
    sample that fails. Integer sums do not depend on order, so the removal of a sample changes them
    by exactly that sample's ``q_b``. In ``float`` arithmetic a sample's own term is at most C, but
    the rounding of the sum depends on the other samples.

    Args:
        grads: per-sample gradients ``[B, ...]``, or one such tensor per parameter; float32,
            float64 or bfloat16.
        max_grad_norm: C, at least 2^-96, and at most 2^96 in exact arithmetic or automatic style;
            per layer a sequence, one per tensor (of one tensor also a number).
        p: 1 or 2.
        style: see above.
        arithmetic: ``float`` or ``exact``.
        unit: u, exact arithmetic only (per layer a sequence), ``C / u`` at most 2^24.
        out: accumulators to add to, as returned by an earlier call.

    Returns:
        ``ClipResult``; sums are int32 (int64 if ``B M`` may exceed 2^31 - 1), or float32 (float64
        for float64 gradients).

    =================== ===========================================
    edge case           result
    =================== ===========================================
    empty batch         zero sums
    zero rows           contribute zero
    NaN or inf in a row the whole sample contributes zero, counted
    C or u not > 0      InvalidInput
    =================== ===========================================

    Raises:
        InvalidInput: wrong type, shape, dtype, device or number.
    """
    request = ClipRequest.of(grads, max_grad_norm, p, style, arithmetic, unit)
    sums = request.accumulators(out)
    rows = [_rows(t) for t in request.tensors]
    each = torch.stack([_row_norms(r, p) for r in rows], dim=1)
    norms = combine_norms(each, p)
    finite = torch.isfinite(norms)
    wide = [row[finite].to(sum_dtype(row.dtype)) for row in rows]
    weights = []
    for i, row in enumerate(wide):
        norm = (each[:, i] if style == "per_layer" else norms)[finite]
        aim = request.max_norms[i] * SLACK
        factor = aim / (norm + GAMMA) if style == "automatic" else (aim / norm).clamp(max=1.0)
        factor = factor * (1.0 / request.units[i]) if arithmetic == "exact" else factor
        weights.append(round_down(factor, row.dtype)[:, None])
    terms = (
        _exact_terms(wide, weights, request)
        if arithmetic == "exact"
        else [weight * row for weight, row in zip(weights, wide, strict=True)]
    )
    for total, term in zip(sums, terms, strict=True):
        total.add_(term.sum(0).to(total.dtype).view(total.shape))
    return request.result(sums, norms)


def _exact_terms(rows: list[Tensor], weights: list[Tensor], request: ClipRequest) -> list[Tensor]:
    """Return ``trunc(weight row)`` as int64; a sample shrinks until it keeps every bound."""
    p = request.p
    most = torch.tensor([m**p for m in request.unit_bounds], device=rows[0].device)
    while True:
        q = [(weight * row).to(torch.int64) for weight, row in zip(weights, rows, strict=True)]
        power = torch.stack([x.abs().pow(p).sum(1) for x in q], dim=1)
        if request.style != "per_layer":
            power = power.sum(1, keepdim=True).expand(power.shape)
        over = (power > most).any(1, keepdim=True)
        if not bool(over.any()):
            return q
        weights = [torch.where(over, weight * (1 - 2.0**-16), weight) for weight in weights]


__all__ = [
    "ARITHMETIC",
    "GAMMA",
    "GRAD_DTYPES",
    "MIN_BOUND",
    "SLACK",
    "STYLES",
    "ClipRequest",
    "ClipResult",
    "Gradients",
    "clip_sum",
    "combine_norms",
    "sample_norm",
    "sum_dtype",
    "tensors_of",
    "unit_bound",
]
