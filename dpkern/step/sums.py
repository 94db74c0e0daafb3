"""The clipped sums of an unfinished step, which physical batches join."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..ops import clip
from ..ops._count import count
from ..privacy.mechanisms.plan import Block, Plan

Sums = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Shards:
    """The shards that one process holds and updates of parameters divided among processes.

    Attributes:
        tensors: a run of each parameter's entries, maybe empty, in the parameter's flat order.
        offsets: where each run begins.
    """

    tensors: Sequence[torch.Tensor]
    offsets: Sequence[int]


_INT32_MOST = 2**31 - 1
_NO_CLIPPING = 2.0**1000
"""A bound that no finite gradient reaches, for runs without privacy (C = infinity)."""


def accumulators(
    sums: Sums | None, params: Sequence[torch.Tensor], plan: Plan, samples: int, *, wide: bool
) -> Sums:
    """Return the sums so far, or zeros, wide enough for ``samples`` samples.

    Args:
        sums: what was summed before, or None.
        params: the parameters.
        plan: bounds and arithmetic.
        samples: how many samples the sums will hold.
        wide: int64 whatever the number of samples, for sums that other processes add to.
    """
    if plan.arithmetic != "exact":
        if sums is not None:
            return sums
        return tuple(
            _zeros(p, block, clip.sum_dtype(p.dtype))
            for p, block in zip(params, plan.blocks, strict=True)
        )
    dtype = torch.int64 if wide or samples * plan.most_units > _INT32_MOST else torch.int32
    if sums is None:
        return tuple(_zeros(p, b, dtype) for p, b in zip(params, plan.blocks, strict=True))
    if dtype is torch.int64:
        return tuple(total.to(torch.int64) for total in sums)
    return sums


def _zeros(param: torch.Tensor, block: Block, dtype: torch.dtype) -> torch.Tensor:
    shape = param.shape if block.release is None else block.signal_shape
    return torch.zeros(shape, dtype=dtype, device=param.device)


def adopted(sums: Sequence[torch.Tensor], params: Sequence[torch.Tensor], plan: Plan) -> Sums:
    """Return the first sums of a step, taken over without a copy where dtype and strides allow."""
    if plan.arithmetic == "exact":
        widest = torch.int64 if any(s.dtype is torch.int64 for s in sums) else torch.int32
        return tuple(s.to(widest).contiguous() for s in sums)
    dtypes = [clip.sum_dtype(p.dtype) for p in params]
    return tuple(s.to(dtype).contiguous() for s, dtype in zip(sums, dtypes, strict=True))


def clipped(
    per_sample: Sequence[torch.Tensor], plan: Plan, out: Sums | None, backend: str | None
) -> clip.ClipResult:
    """Clip and sum explicit gradients by the plan, onto ``out`` if given."""
    if plan.clipping == "group":
        return _clipped_by_group(per_sample, plan, out, backend)
    return clip.clip_sum(per_sample, **clip_arguments(plan), out=out, backend=backend)


def clip_arguments(plan: Plan) -> dict[str, Any]:
    """Return the arguments of ``clip_sum`` by which a plan clips, unless it does so by group."""
    bounds = [min(bound, _NO_CLIPPING) for bound in plan.bounds]
    per_layer = plan.clipping == "per_layer"
    return {
        "max_grad_norm": bounds if per_layer else bounds[0],
        "p": plan.p,
        "style": plan.clipping,
        "arithmetic": plan.arithmetic,
        "unit": _units(plan, range(len(bounds)), each=per_layer),
    }


def _units(plan: Plan, indices: Sequence[int], *, each: bool) -> float | list[float] | None:
    if plan.arithmetic != "exact":
        return None
    units = [unit for i in indices if (unit := plan.units[i]) is not None]
    return units if each else units[0]


def _clipped_by_group(
    per_sample: Sequence[torch.Tensor], plan: Plan, out: Sums | None, backend: str | None
) -> clip.ClipResult:
    """Clip flat per group; a sample that is not finite in one group is dropped from all."""
    norms = clip.sample_norm(per_sample, p=plan.p, backend=backend)
    finite = torch.isfinite(norms)
    kept = per_sample if bool(finite.all()) else [g[finite] for g in per_sample]
    sums: list[torch.Tensor | None] = [None] * len(per_sample)
    results = []
    for group, bound in zip(plan.groups, plan.group_bounds, strict=True):
        result = clip.clip_sum(
            [kept[i] for i in group],
            min(bound, _NO_CLIPPING),
            p=plan.p,
            arithmetic=plan.arithmetic,
            unit=_units(plan, group, each=False),
            out=None if out is None else [out[i] for i in group],
            backend=backend,
        )
        results.append(result)
        for i, total in zip(group, result.sums, strict=True):
            sums[i] = total
    bounds = [result.norm_bound for result in results]
    return clip.ClipResult(
        sums=tuple(total for total in sums if total is not None),
        norm_bound=sum(bounds) if plan.p == 1 else math.hypot(*bounds),
        norms=norms,
        nonfinite=count(~finite),
        batch_size=int(per_sample[0].shape[0]),
        arithmetic=plan.arithmetic,
        unit=tuple(u for u in plan.units if u is not None) if plan.arithmetic == "exact" else None,
        p=plan.p,
        max_norms=tuple(result.max_norms[0] for result in results),
    )


def common_dtype(per_sample: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return gradients of several dtypes, or of one without a clipping kernel, in one dtype."""
    dtypes = {gradient.dtype for gradient in per_sample}
    if len(dtypes) == 1 and dtypes <= set(clip.GRAD_DTYPES):
        return list(per_sample)
    wide = torch.float64 if torch.float64 in dtypes else torch.float32
    return [gradient.to(wide) for gradient in per_sample]
