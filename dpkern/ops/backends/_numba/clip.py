"""Clip and sum explicit per-sample gradients (csrc/cpu/clip.cpp).

Norm, factor and sum of a row follow each other while it is in the cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ....base.codes import STYLES
from ... import clip
from .._extension import on_cpu
from .compile import Array, addresses, entries, inner, kernel, like
from .parallel import in_parts, team_of
from .rows import SHRINK, add_integer_row, add_row, clip_factor, power_sum, round_down

_GRAIN = 1 << 16  # entries worth a thread
PER_LAYER, AUTOMATIC = STYLES.code("per_layer"), STYLES.code("automatic")


@inner
def _measure(call: Any, items: Any, row: int, like: Array, norms: Array, factors: Array) -> None:
    """Write norms of one row, and from them its clip factors; 0 for a row that is not finite."""
    p, style = call
    gradients, columns, max_norms, per_units, _ = items
    total = 0.0
    for i in range(len(columns)):
        at = gradients[i] + row * columns[i] * like.itemsize
        power = power_sum(entries(at, columns[i], like), p)
        norms[row, i] = np.sqrt(power) if p == 2 else power
        factors[i] = 0
        total += power
    if not np.isfinite(total):
        return
    norm = np.sqrt(total) if p == 2 else total
    for i in range(len(columns)):
        used = norms[row, i] if style == PER_LAYER else norm
        factor = clip_factor(used, max_norms[i], style == AUTOMATIC) * per_units[i]
        factors[i] = round_down(factor, factors.dtype.type)


@kernel
def _norms(call: Any, items: Any, like: Array, norms: Array, begin: int, end: int) -> None:
    factors = np.empty(len(items[0]), np.float64)
    for row in range(begin, end):
        _measure(call, items, row, like, norms, factors)


@kernel
def _float_sums(
    call: Any, items: Any, likes: Any, norms: Array, sums: Array, begin: int, end: int
) -> None:
    like, like_sum = likes
    gradients, columns, _, _, _ = items
    factors = np.empty(len(columns), like_sum.dtype)
    for row in range(begin, end):
        _measure(call, items, row, like, norms, factors)
        for i in range(len(columns)):
            if factors[i] == 0:
                continue  # not finite: 0 * inf would not vanish
            at = gradients[i] + row * columns[i] * like.itemsize
            total = entries(sums[i], columns[i], like_sum)
            add_row(entries(at, columns[i], like), factors[i], total)


@inner
def _add_integers(
    call: Any, items: Any, likes: Any, factors: Array, sums: Array, row: int, sign: int
) -> bool:
    """Add ``sign trunc(factor row)``; return whether the integers keep the bound of each group."""
    p, style = call
    gradients, columns, _, _, most = items
    like, like_sum, _ = likes
    kept, power = True, np.int64(0)
    for i in range(len(columns)):
        if style == PER_LAYER:
            power = np.int64(0)
        if factors[i] != 0:
            values = entries(gradients[i] + row * columns[i] * like.itemsize, columns[i], like)
            total = entries(sums[i], columns[i], like_sum)
            power += add_integer_row(values, factors[i], sign, p, total)
        group_ends = style == PER_LAYER or i + 1 == len(columns)
        if group_ends and power > most[i]:
            kept = False
    return kept


@kernel
def _integer_sums(
    call: Any, items: Any, likes: Any, norms: Array, sums: Array, begin: int, end: int
) -> None:
    """Add each sample first, then verify it.

    If its exact integer norm exceeds M, which only rounding at the bound can cause, it is
    subtracted, scaled by 1 - 2^-16 and added again.
    """
    like, _, like_factor = likes
    factors = np.empty(len(items[0]), like_factor.dtype)
    for row in range(begin, end):
        _measure(call, items, row, like, norms, factors)
        while not _add_integers(call, items, likes, factors, sums, row, 1):
            _add_integers(call, items, likes, factors, sums, row, -1)
            for i in range(len(factors)):
                factors[i] *= factors.dtype.type(SHRINK)


def _call(request: clip.ClipRequest) -> tuple[int, int]:
    return request.p, STYLES.code(request.style)


def _items(request: clip.ClipRequest, held: list[torch.Tensor]) -> tuple[Array, ...]:
    """Return gradients, columns, C, 1 / u and M^p of each tensor."""
    exact = request.arithmetic == "exact"
    return (
        addresses(held),
        np.array([t.shape[1:].numel() for t in held], np.int64),
        np.array(request.max_norms, np.float64),
        np.array([1.0 / u if exact else 1.0 for u in request.units], np.float64),
        np.array([bound**request.p for bound in request.unit_bounds], np.int64),
    )


def _team(items: tuple[Array, ...], batch: int) -> int:
    return team_of(batch, max(4, _GRAIN // max(1, int(items[1].sum()))))


def _sample_norm(grads: clip.Gradients, *, p: int = 2, **_: Any) -> torch.Tensor:
    request = clip.ClipRequest.of(grads, 1.0, p, "flat", "float", None)
    held = [t.contiguous() for t in request.tensors]
    items, batch, kind = _items(request, held), request.batch_size, like(held[0].dtype)
    norms = np.zeros((batch, len(held)))
    in_parts(
        batch,
        _team(items, batch),
        lambda _, begin, end: _norms(_call(request), items, kind, norms, begin, end),
    )
    return clip.combine_norms(torch.from_numpy(norms), p)


def _clip_sum(
    grads: clip.Gradients,
    max_grad_norm: float | tuple[float, ...],
    *,
    p: int = 2,
    style: str = "flat",
    arithmetic: str = "float",
    unit: float | tuple[float, ...] | None = None,
    out: list[torch.Tensor] | None = None,
    plan: clip.ClipRequest,
) -> clip.ClipResult:
    request = plan
    sums = request.accumulators(out)
    held = [t.contiguous() for t in request.tensors]
    items, batch = _items(request, held), request.batch_size
    norms = np.zeros((batch, len(held)))
    likes: tuple[Array, ...] = like(held[0].dtype), like(sums[0].dtype)
    if arithmetic == "exact":
        likes = *likes, like(clip.sum_dtype(held[0].dtype))
    kernel = _integer_sums if arithmetic == "exact" else _float_sums
    team = _team(items, batch)
    # The first thread adds to the result, the others to sums of their own, added at last in order.
    own = [sums, *([torch.zeros_like(s) for s in sums] for _ in range(1, team))]

    def part(index: int, begin: int, end: int) -> None:
        kernel(_call(request), items, likes, norms, addresses(own[index]), begin, end)

    in_parts(batch, team, part)
    for others in own[1:]:
        for total, other in zip(sums, others, strict=True):
            total.add_(other)
    return request.result(sums, clip.combine_norms(torch.from_numpy(norms), p))


def _refuse_sample_norm(grads: clip.Gradients, **kwargs: Any) -> str | None:
    if kwargs.get("scale") is not None or kwargs.get("center") is not None:
        return "has no per-coordinate scale or centre"
    return _refuse(grads)


def _refuse(grads: clip.Gradients, *_: Any, **__: Any) -> str | None:
    return on_cpu(*clip.tensors_of(grads))


KERNELS: tuple[tuple[str, Any, Any], ...] = (
    ("clip.sample_norm", _sample_norm, _refuse_sample_norm),
    ("clip.clip_sum", _clip_sum, _refuse),
)
"""``(op, run, refuse)``."""
