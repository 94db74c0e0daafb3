"""Closed form of ``DPStep`` with any plan: add the samples, finish the step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..base.counts import Counts
from ..base.rng import Purpose
from ..ops import clip, update
from ..privacy.mechanisms import Mechanism, Site
from ..privacy.mechanisms.plan import Block, Plan, first_positions
from ..step.noise_tables.named import INLINE
from . import _glue as glue
from . import drawing
from ._glue import WIDE
from ._ops import call, shaped, stream
from ._step_maps import Items, centred, exact, signal
from ._step_maps import noised as mapped
from ._step_operands import summing
from ._step_work import Lines
from .phases import CLIP, IMPORTANCE, LEARN, NOISE, UPDATE

SAMPLES = ("gradients", "released", "sum", "operands")
_INT32_MOST = 2**31 - 1
_NO_CLIPPING = 2.0**1000


@dataclass(frozen=True, kw_only=True)
class CountSetting:
    """The facts that the operation count of a step depends on.

    Attributes:
        mechanism: the configuration.
        shapes: shapes of the parameters.
        batch: samples, in one physical batch; all of them finite.
        dtype: dtype of parameters and gradients, float32 or float64.
        rule: optimizer's rule. None means that ``finish`` returns the gradients.
        clipped: number of samples that each clip group really clips.
        number: number of the step, from 1.
        samples: input of ``add``, one of ``SAMPLES``.
        source: source of the noise.
        sites: geometry of the parameters, where it is known.
    """

    mechanism: Mechanism
    shapes: tuple[tuple[int, ...], ...]
    batch: int
    dtype: torch.dtype
    rule: update.Rule | None
    clipped: tuple[int, ...]
    number: int
    samples: str
    source: str = INLINE
    sites: tuple[Site, ...] = ()

    @property
    def learns(self) -> bool:
        """Whether the mechanism has a memory."""
        return self.mechanism.memory([torch.empty(())]) is not None

    @property
    def sizes(self) -> list[int]:
        """The number of entries of each parameter."""
        return [math.prod(shape) for shape in self.shapes]


def adding(s: CountSetting, plan: Plan) -> Items:
    """Count one call of ``DPStep.add`` on a new step."""
    if s.samples == "sum":
        return _taken_over(s, plan)
    if s.samples == "operands":
        made = summing(plan, s.clipped, s.batch, s.dtype, s.sites)
        return made + _taken_over(s, plan)
    if s.samples == "released":
        shapes = [block.signal_shape for block in plan.blocks]
        zeros = exact(f"{CLIP}: accumulators", glue.filled(sum(map(math.prod, shapes))))
        return zeros + _clipped(s, plan, shapes, into=_accumulators(s, plan, shapes))
    if not (plan.mapped or plan.needs_raw):
        zeros = exact(f"{CLIP}: accumulators", glue.filled(sum(s.sizes)))
        return zeros + _clipped(s, plan, s.shapes, into=_accumulators(s, plan, s.shapes))
    items = [item for b in plan.blocks for item in centred(b, s.batch, s.dtype)]
    if {b.release.norm for b in plan.blocks if b.release is not None} == {"gradient"}:
        items += _clipped(s, plan, s.shapes) + _gains(s, plan)
        if not plan.maps_late:
            items += _signals(plan, 1, s.dtype)
    else:
        items += _signals(plan, s.batch, s.dtype)
        items += _clipped(s, plan, [block.signal_shape for block in plan.blocks])
    return items + (_raw(s) if plan.needs_raw else [])


def _taken_over(s: CountSetting, plan: Plan) -> Items:
    """Count taking over a sum that is already clipped: checked, and mapped if maps come first."""
    if plan.arithmetic == "exact":
        return []
    checked = exact(f"{CLIP}: checks", sum((glue.sum_read(n) for n in s.sizes), Counts()))
    later = plan.maps_late or _mapped_late(s, plan)
    return checked + ([] if later else _signals(plan, 1, s.dtype))


def _accumulators(
    s: CountSetting, plan: Plan, shapes: Sequence[tuple[int, ...]]
) -> list[torch.Tensor]:
    return [shaped(shape, _sums_dtype(s, plan)) for shape in shapes]


def _signals(plan: Plan, rows: int, dtype: torch.dtype) -> Items:
    return [item for block in plan.blocks for item in signal(block, rows, dtype)]


def _gains(s: CountSetting, plan: Plan) -> Items:
    """Count gains other than one, which join the norm and leave the sum again."""
    gained = [
        math.prod(b.shape) for b in plan.blocks if b.release is not None and b.release.gain != 1
    ]
    return exact(
        f"{CLIP}: gain",
        sum((glue.each(s.batch * n, MUL=1) + glue.each(n, DIV=1) for n in gained), Counts()),
    )


def _raw(s: CountSetting) -> Items:
    """Count the float64 sums of the finite samples, without clipping."""
    total = glue.are_finite(s.batch)
    for n in s.sizes:
        rows = s.batch * n
        chosen = glue.gathered(rows, s.batch) + Counts(CMP=s.batch)
        widened = Counts(CVT=rows if s.dtype is not WIDE else 0)
        total = total + chosen + widened + glue.folded(rows, n, "ADD")
    return exact(f"{CLIP}: sums without clipping", total)


def _clipped(
    s: CountSetting,
    plan: Plan,
    shapes: Sequence[tuple[int, ...]],
    into: Sequence[torch.Tensor] | None = None,
) -> Items:
    """Count the clipped sum of gradients or release coordinates of these shapes."""
    rows = [shaped((s.batch, *shape), s.dtype) for shape in shapes]
    exact_sums = plan.arithmetic == "exact"
    kind: dict[str, Any] = {"p": plan.p, "arithmetic": plan.arithmetic}
    units = [unit or 0.0 for unit in plan.units]
    if plan.clipping != "group":
        each = plan.clipping == "per_layer"
        bounds = [min(bound, _NO_CLIPPING) for bound in plan.bounds]
        unit = None if not exact_sums else units if each else units[0]
        return call(
            "clip.clip_sum",
            CLIP,
            rows,
            bounds if each else bounds[0],
            **kind,
            style=plan.clipping,
            unit=unit,
            out=into,
            clipped=sum(s.clipped),
        )
    items = call("clip.sample_norm", CLIP, rows, p=plan.p)
    told = glue.folded(s.batch, 1, "AND") + glue.read_out()
    counted = glue.each(s.batch, NOT=1) + glue.sum_read(s.batch)
    items += exact(f"{CLIP}: which are finite", glue.are_finite(s.batch) + told + counted)
    for group, bound, clipped in zip(plan.groups, plan.group_bounds, s.clipped, strict=True):
        items += call(
            "clip.clip_sum",
            CLIP,
            [rows[i] for i in group],
            min(bound, _NO_CLIPPING),
            **kind,
            style="flat",
            unit=units[group[0]] if exact_sums else None,
            out=None if into is None else [into[i] for i in group],
            clipped=clipped,
        )
    return items


def finishing(s: CountSetting, plan: Plan) -> Items:
    """Count ``DPStep.finish()``."""
    items: Items = _made_ahead(s, plan)
    if plan.noise_point == "per_sample":
        items += exact(f"{NOISE}: number of samples", glue.read_out())
    if plan.importance is not None:
        items += _weighed(s, plan) + _signals(plan, 1, s.dtype)
    maps = _maps_in_update(s, plan)
    if _mapped_late(s, plan) and s.rule is None:
        items += _signals(plan, 1, s.dtype)
    fused = [b for b in plan.blocks if plan.direct or b.fused or maps]
    ready = [b for b in plan.blocks if s.learns or s.rule is None or b not in fused]
    for block in ready:
        items += _gradient(s, plan, block)
    if s.learns:
        lines = Lines(LEARN)
        s.mechanism.count_learning(lines, s.sizes)
        s.mechanism.count_plan(lines, s.sizes, s.number)
        items += lines.items
    for block in ready:
        items += exact(
            f"{UPDATE}: formats", glue.converted(math.prod(block.shape), _ready(block, s), s.dtype)
        )
    if s.rule is not None:
        left = [b for b in plan.blocks if b not in ready]
        items += _updated(s, plan, ready, noised=False) + _updated(s, plan, left, noised=True)
    return items


def _made_ahead(s: CountSetting, plan: Plan) -> Items:
    """Count what a ring's producer does for one step, in whole tiles."""
    if s.source != "ring" or plan.distribution is None:
        return []
    noised = [b for b in plan.blocks if b.noise_scale > 0]
    count = max((b.first_position + b.size for b in noised), default=0)
    made = drawing.made_ahead(plan.distribution, 0, count, rounding=plan.arithmetic == "float")
    return [replace(item, name=f"{NOISE}: {item.name}, ahead") for item in made.items]


def _maps_in_update(s: CountSetting, plan: Plan) -> bool:
    """Whether sums are noised in their coordinates inside the update, as on the CPU."""
    return plan.maps_in_update and not s.learns


def _mapped_late(s: CountSetting, plan: Plan) -> bool:
    """Whether the update also maps the sums: those of gradients, which are clipped as floats."""
    of_gradients = s.samples in ("sum", "operands") and plan.arithmetic != "exact"
    return of_gradients and _maps_in_update(s, plan)


def _ready(block: Block, s: CountSetting) -> torch.dtype:
    """Return the dtype of a block's noisy gradient."""
    release = block.release
    return s.dtype if release is None or release.is_identity else WIDE


def _weighed(s: CountSetting, plan: Plan) -> Items:
    """Count the importance (mean, norm, clipping, noise, update) and the plan that follows."""
    given = plan.importance
    assert given is not None
    items: Items = []
    for n, position in zip(s.sizes, first_positions(s.shapes), strict=True):
        mean = glue.converted(n, s.dtype, WIDE) if given.source == "full" else glue.each(n, DIV=1)
        norm = glue.each(n, MUL=1) + glue.sum_read(n)
        items += exact(
            f"{IMPORTANCE}: mean and norm", mean + norm + glue.each(n, MUL=1) + glue.each(n)
        )
        items += _noise(IMPORTANCE, shaped((n,), WIDE), "gaussian", position, given.noise_scale)
        items += exact(f"{IMPORTANCE}: places inside cells", glue.each(n, reads=2, ADD=1))
    lines = Lines(IMPORTANCE)
    s.mechanism.count_plan(lines, s.sizes, s.number)
    return items + lines.items


def _noise(
    phase: str,
    values: torch.Tensor,
    law: str,
    position: int,
    scale: float | None,
    source: str = INLINE,
) -> Items:
    purpose = Purpose.NOISE if law == "gaussian" else Purpose.LAPLACE
    return call(
        "noise.add_noise",
        phase,
        values,
        stream=stream(purpose),
        position=position,
        distribution=law,
        scale=scale,
        rounding=None if scale is None else stream(Purpose.ROUNDING),
        draws=drawing.source_draws(source, law, values.numel(), rounding=scale is not None),
    )


def _gradient(s: CountSetting, plan: Plan, block: Block) -> Items:
    """Count the noisy gradient of one block."""
    n, release = math.prod(block.shape), block.release
    exact_sums = plan.arithmetic == "exact"
    dtype = _sums_dtype(s, plan)
    scaled = exact(f"{UPDATE}: scaling", glue.each(n, MUL=1))
    noised: Items = []
    if plan.distribution is not None and block.noise_scale > 0:
        values = shaped(block.release_shape, dtype)
        scale = None if exact_sums else block.noise_scale
        place = block.first_position
        noised = _noise(NOISE, values, plan.distribution, place, scale, s.source)
    if release is None or release.is_identity:
        return noised + exact(f"{UPDATE}: formats", glue.converted(n, dtype, s.dtype)) + scaled
    restored = Counts()
    if release.restore and release.centre is not None:
        restored = glue.each(n, reads=2, ADD=1)
    return noised + mapped(block, dtype) + scaled + exact(f"{UPDATE}: centre restored", restored)


def _sums_dtype(s: CountSetting, plan: Plan) -> torch.dtype:
    if plan.arithmetic != "exact":
        return clip.sum_dtype(s.dtype)
    wide = s.batch * plan.most_units > _INT32_MOST
    return torch.int64 if wide else torch.int32


def _updated(s: CountSetting, plan: Plan, blocks: Sequence[Block], *, noised: bool) -> Items:
    """Count the optimizer's rule on noisy gradients, or fused with noise on clipped sums."""
    rule = s.rule
    assert rule is not None
    if not blocks:
        return []
    law = plan.distribution if noised else None
    params = [shaped(block.shape, s.dtype) for block in blocks]
    maps, coordinates = None, False
    if noised and _maps_in_update(s, plan):
        maps = plan.pair_maps.part(block.index for block in blocks)
        coordinates = not _mapped_late(s, plan)
        maps = maps.only_back if coordinates else maps
    sums = [
        shaped(
            b.signal_shape if coordinates else b.shape, _sums_dtype(s, plan) if noised else s.dtype
        )
        for b in blocks
    ]
    drawn = None
    if law is not None:
        floats = plan.arithmetic != "exact"
        drawn = update.Noise(
            distribution=law,
            scales=tuple(block.noise_scale for block in blocks),
            stream=stream(Purpose.NOISE if law == "gaussian" else Purpose.LAPLACE),
            positions=tuple(block.first_position for block in blocks),
            rounding=stream(Purpose.ROUNDING) if floats else None,
            draws=drawing.source_draws(s.source, law, 1, rounding=floats),
        )
    names = rule.buffer_names()
    state = update.State(s.number - 1, {name: list(params) for name in names})
    return call("update.step", UPDATE, params, sums, rule=rule, state=state, noise=drawn, maps=maps)


__all__ = ["SAMPLES", "CountSetting", "adding", "finishing"]
