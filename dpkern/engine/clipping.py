"""From what the capture holds to the clipped sum of one physical batch.

    n_b^2 = sum over parameters of ||grad_b||^2        (upper bounds, see docs/ghost.md)
    c_b   = min(1, C / n_b)                            (flat; automatic: C / (n_b + gamma))
    sum   = sum_b c_b grad_b

A ``mean`` loss divides each sample's gradient by the batch size; the factors undo that. Samples
whose norm is not finite get factor zero and are counted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..mechanisms.base import Plan
from ..ops import clip
from ..ops._lattice import round_down
from .capture import Arrival, Capture, Slot
from .layers.expression import Expression
from .records import Explicit, merge


def clipped_sums(capture: Capture, plan: Plan) -> clip.ClipResult | list[Tensor] | None:
    """Close the current samples.

    Returns:
        The clipped sums with their bound; the per-sample gradients themselves for exact
        arithmetic, which ``DPStep.add(per_sample=...)`` clips in integers; None if nothing arrived.

    Raises:
        PrivacyError: a guard failed (``Capture.check_closed``); nothing was changed.
        UnsupportedModule: an expression whose per-sample gradients would not fit.
    """
    capture.check_closed()
    if not capture.captured:
        capture.discard_samples()
        return None
    with torch.no_grad():
        for source in capture.expressions:
            assert isinstance(source, Expression)
            source.lead_back()
        batch = capture.arrived_batch
        scale = (batch if capture.loss_reduction == "mean" else 1) / capture.loss_scale
        if plan.arithmetic == "exact":
            result: clip.ClipResult | list[Tensor] = _gradients(capture, batch, scale)
        else:
            result = _float_sums(capture, plan, batch, scale)
    capture.discard_samples()
    return result


def _float_sums(capture: Capture, plan: Plan, batch: int, scale: float) -> clip.ClipResult:
    parts = [_parts(slot) for slot in capture.slots]
    squares = [_square(part, batch) for part in parts]
    groups = [block.clip_group for block in plan.blocks]
    bounds = {block.clip_group: block.bound for block in plan.blocks}
    totals = {group: torch.zeros(batch, dtype=torch.float64) for group in bounds}
    for group, square in zip(groups, squares, strict=True):
        totals[group] = totals[group].to(square.device) + square
    overall: Tensor = torch.stack(list(totals.values())).sum(0)
    norms = overall.sqrt() * scale
    finite = torch.isfinite(norms)
    dtypes = {clip.sum_dtype(parameter.dtype) for parameter in capture.parameters}
    factors = {
        (group, dtype): round_down(
            _factors(total.sqrt() * scale, finite, bounds[group], plan.clipping, scale), dtype
        )
        for group, total in totals.items()
        for dtype in dtypes
    }
    sums = []
    for slot, part, group in zip(capture.slots, parts, groups, strict=True):
        dtype = clip.sum_dtype(slot.parameter.dtype)
        out = torch.zeros(slot.shape, dtype=dtype, device=slot.parameter.device)
        for arrival in part:
            place = out if arrival.rows is None else out[slice(*arrival.rows)]
            arrival.record.add_sum(factors[group, dtype], place.view(arrival.record.shape))
        sums.append(out)
    ordered = tuple(bounds[group] for group in sorted(bounds))
    return clip.ClipResult(
        sums=tuple(sums),
        norm_bound=math.hypot(*ordered),
        norms=norms,
        nonfinite=int((~finite).sum()),
        batch_size=batch,
        arithmetic="float",
        unit=None,
        p=2,
        max_norms=ordered,
    )


def _factors(norms: Tensor, finite: Tensor, bound: float, style: str, scale: float) -> Tensor:
    """Clip factors times ``scale``; 0 for samples that are not finite."""
    aim = bound * clip.SLACK
    if style == "automatic":
        factors = aim / (norms + clip.GAMMA)
    elif math.isinf(bound):
        factors = torch.ones_like(norms)
    else:
        factors = (aim / norms).clamp(max=1.0)
    return torch.where(finite, factors * scale, 0.0)


def _parts(slot: Slot) -> list[Arrival]:
    """What arrived for a parameter, merged so that no two parts touch the same entries."""
    by_rows: dict[tuple[int, int] | None, list[Arrival]] = {}
    for arrival in slot.arrivals:
        by_rows.setdefault(arrival.rows, []).append(arrival)
    if len(by_rows) > 1 and not _disjoint(list(by_rows)):
        return [Arrival(_written_out(slot))]
    return [
        same[0] if len(same) == 1 else Arrival(merge([a.record for a in same]), rows)
        for rows, same in by_rows.items()
    ]


def _disjoint(ranges: Sequence[tuple[int, int] | None]) -> bool:
    if None in ranges:
        return False
    ordered = sorted(r for r in ranges if r is not None)
    return all(a[1] <= b[0] for a, b in itertools.pairwise(ordered))


def _square(parts: Sequence[Arrival], batch: int) -> Tensor:
    """Squared norms of one parameter's gradients, ``[B]``."""
    total = torch.zeros(batch, dtype=torch.float64)
    for arrival in parts:
        square = arrival.record.square() if arrival.square is None else arrival.square
        total = total.to(square.device) + square
    return total


def _gradients(capture: Capture, batch: int, scale: float) -> list[Tensor]:
    """Every per-sample gradient ``[B, *shape]``, for integer clipping."""
    gradients = []
    for slot in capture.slots:
        dtype = clip.sum_dtype(slot.parameter.dtype)
        if slot.arrivals:
            total = _written_out(slot).per_sample().to(dtype) * scale
        else:
            total = torch.zeros((batch, *slot.shape), dtype=dtype, device=slot.parameter.device)
        gradients.append(total.contiguous())
    return gradients


def _written_out(slot: Slot) -> Explicit:
    """All arrivals of a parameter as explicit gradients of the whole of it."""
    total = None
    for arrival in slot.arrivals:
        part = arrival.record.per_sample()
        if total is None:
            total = part.new_zeros((part.shape[0], *slot.shape))
        place = total if arrival.rows is None else total[:, slice(*arrival.rows)]
        place += part.reshape(place.shape)
    assert total is not None
    return Explicit(total)
