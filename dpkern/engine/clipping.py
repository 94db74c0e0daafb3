"""Compute the clipped sum of one physical batch from the captured gradients.

    n_b^2 = sum over the clip group's parameters of ||grad_b||^2      (upper bounds, docs/ghost.md)
    c_b   = min(1, C / n_b)                                           (automatic: C / (n_b + gamma))
    sum   = sum_b c_b grad_b

A ``mean`` loss divides each sample's gradient by the batch size; the factors undo that. A sample
whose norm in a group is not finite gets factor zero there and is counted.

Flat clipping needs every layer's norm first. With one group per layer a group is finished inside
the backward pass, as soon as its last gradient has arrived, and nothing of it is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from ..base.errors import InvalidInput, PrivacyError
from ..base.phase import CLIP, MAP, phase
from ..ops import clip, ghost
from ..ops._count import count
from ..privacy.mechanisms import Plan
from ..step.step import DPStep
from .allocator import give_back_freed_pages, keep_freed_pages
from .attribution import attributed_to
from .capture import Capture
from .clip_norms import NormedGradients
from .exact_sums import integer_sums, squared_norms_rounded, sums_in_place
from .layers.expression import Expression
from .merge import merge
from .parameter import without_torch_function
from .per_sample_gradients import ExplicitGradients, squared_norms, to_sum_dtype_dense
from .program import kinds
from .program.close import close_replayed
from .release_norms import take_over, with_clip_norm
from .uses import CapturedGradients, ParameterSource

KINDS = kinds.__all__
"""Kinds of uses that a program can hold; the import registers them."""


def close_into(step: DPStep, capture: Capture) -> None:
    """Close the current samples and add their clipped sum to the step, if anything arrived.

    Raises:
        PrivacyError: a guard failed (``Capture.check_closed``); nothing was changed.
        UnsupportedModule: an expression whose per-sample gradients would not fit.
        InvalidInput: a step made with ``gradients='given'``.
    """
    if not step.ledger.batched:
        raise InvalidInput(
            "step",
            expected="gradients='batched'",
            got="gradients='given'",
            remedy="Construct it with DPStep(..., gradients='batched'): a model's gradients may "
            "depend on the whole batch.",
        )
    if capture.slots[0].parameter.is_cpu:
        keep_freed_pages()
        capture.closed_batches += 1
        if capture.closed_batches == 2:
            give_back_freed_pages()
    if close_replayed(step, capture):
        return
    result = clipped_sums(capture, step.plan)
    if isinstance(result, clip.ClipResult):
        step.add(sum=result)
    elif result is not None and step.plan.mapped:
        step.add(per_sample=result, released=True)
    elif result is not None:
        step.add(per_sample=result)


def prepare(capture: Capture, plan: Callable[[], Plan]) -> None:
    """Let the capture do all that a plan allows as soon as gradients arrive.

    Integer clipping takes its own norms. Several clip groups with floating-point sums are
    finished inside the backward pass; all gradients of the samples must then come from one pass.

    Args:
        capture: not in use yet.
        plan: the plan in force; its bounds may change between steps.
    """
    now = plan()
    take_over(capture, now)
    special = now.p != 2 or any(block.release is not None for block in now.blocks)
    capture.before_arrivals = (lambda: take_over(capture, plan())) if special else None
    capture.norms_on_arrival = now.arithmetic == "float" or sums_in_place(now, capture.slots)
    one_group = len({block.clip_group for block in now.blocks}) == 1
    capture.unscaled = in_place = sums_in_place(now, capture.slots)
    capture.joint_norms = one_group and (now.arithmetic == "float" or in_place)
    capture.square_of = squared_norms_rounded if in_place else squared_norms
    # Two ways round differently: a sample's integers may not depend on how many others there are.
    if now.arithmetic == "exact":
        capture.budget.cached = 0
    if not one_group and now.arithmetic == "float":
        capture.make_backward_clipper = lambda: GroupSums(capture, plan())


def clipped_sums(capture: Capture, plan: Plan) -> clip.ClipResult | list[Tensor] | None:
    """Close the current samples and return their clipped sums.

    Returns:
        The clipped sums with their bound; for exact arithmetic that ``exact_sums`` does not cover,
        in which ``DPStep.add(per_sample=...)`` clips in integers, the per-sample gradients
        themselves, or their release coordinates if the plan maps any parameter; None if nothing
        arrived.

    Raises:
        PrivacyError: a guard failed (``Capture.check_closed``); nothing was changed.
        UnsupportedModule: an expression whose per-sample gradients would not fit.
    """
    capture.check_closed()
    if not capture.captured:
        capture.discard_samples()
        return None
    capture.program.learn(plan)
    with without_torch_function(), torch.no_grad(), phase(CLIP):
        for source in capture.expressions:
            assert isinstance(source, Expression)
            source.lead_back()
        if sums_in_place(plan, capture.slots):
            result: clip.ClipResult | list[Tensor] = _integer_sums(capture, plan)
        elif plan.arithmetic == "exact":
            result = _gradients(capture, plan)
        else:
            sums = capture.early if isinstance(capture.early, GroupSums) else None
            result = (sums or GroupSums(capture, plan)).result()
    capture.discard_samples()
    return result


class GroupSums:
    """The clipped sums of the current samples, group after group.

    Args:
        capture: holds the gradients.
        plan: bounds, groups and style of the clipping.
    """

    def __init__(self, capture: Capture, plan: Plan) -> None:
        self.capture = capture
        take_over(capture, plan)
        self.p, self.style = plan.p, plan.clipping
        self.raw = dict(enumerate(_zeros(capture.slots))) if plan.needs_raw else None
        """Sums without clipping, by the parameter's index; None if the plan needs none."""
        self.groups: dict[int, list[ParameterSource]] = {}
        self.bounds: dict[int, float] = {}
        for slot, block in zip(capture.slots, plan.blocks, strict=True):
            self.groups.setdefault(block.clip_group, []).append(slot)
            self.bounds[block.clip_group] = block.bound
        self.group_of = {s.index: g for g, slots in self.groups.items() for s in slots}
        self.norms: dict[int, Tensor] = {}
        """Norms of each sample before clipping, by finished group."""
        self.sums: dict[int, Tensor] = {}
        """Clipped sums of the finished groups, by the parameter's index."""

    @cached_property
    def batch(self) -> int:
        """The number of samples that the gradients belong to."""
        return self.capture.arrived_batch

    @cached_property
    def loss_scale(self) -> float:
        """The factor on the loss that was known when the first group was finished."""
        return self.capture.loss_scale

    @cached_property
    def scale(self) -> float:
        """The factor from captured gradients to those of each sample's own loss."""
        mean = self.capture.loss_reduction == "mean" and not self.capture.mean_undone
        return (self.batch if mean else 1) / self.loss_scale

    def on_gradient(self, slot: ParameterSource) -> None:
        """Finish the slot's group if nothing of it is still to come.

        Raises:
            PrivacyError: the group is finished already, or one of its operands was changed.
        """
        group = self.group_of[slot.index]
        self._check_open(slot)
        slots = self.groups[group]
        if all(len(s.arrivals) == s.uses and not s.indirect for s in slots):
            for each in slots:
                each.check_operands()
            with phase(CLIP):
                self.finish(group)

    def _check_open(self, slot: ParameterSource) -> None:
        if self.group_of[slot.index] in self.norms:
            raise PrivacyError(
                slot.name,
                expected="all gradients of these samples in one backward pass",
                got="more of them after the parameter's clip group was finished",
                remedy="Add the losses and call backward once, or use flat clipping.",
            )

    def finish(self, group: int) -> None:
        """Compute norms, factors and sums of one group, and drop its gradients."""
        slots = self.groups[group]
        parts = []
        for slot in slots:
            with attributed_to(slot):
                parts += [(slot, arrival) for arrival in self._parts_of(slot)]
        batches = [_Explicit(dtype, parts) for dtype in {sum_dtype_of(slot) for slot in slots}]
        squares = [
            _square(slot, arrival)
            for slot, arrival in parts
            if arrival.square is not None or not isinstance(arrival.record, ExplicitGradients)
        ]
        squares += [batch.square() for batch in batches if batch.fresh]
        if not squares:
            device = slots[0].parameter.device
            squares = [torch.zeros(self.batch, dtype=torch.float64, device=device)]
        if self.p == 1:  # L1 norms add up, not their squares
            total = torch.stack([square.sqrt() for square in squares]).sum(0)
            squares = [total.square() * (1 + 2.0**-40)]
        factors = {}
        for batch in batches:
            with attributed_to(*slots):
                factors[batch.dtype], self.norms[group] = ghost.clip_factors(
                    squares,
                    self.bounds[group],
                    dtype=batch.dtype,
                    scale=self.scale,
                    automatic=self.style == "automatic",
                )
        for slot, out in zip(slots, self._outs(slots), strict=True):
            self.sums[slot.index] = out
        for slot, arrival in parts:
            if not isinstance(arrival.record, ExplicitGradients):
                place = _place(self.sums, slot, arrival)
                with attributed_to(slot):
                    arrival.record.add_sum(factors[sum_dtype_of(slot)], place)
        for batch in batches:
            batch.add_sums(factors[batch.dtype], self.sums)
        if self.raw is not None:
            self._add_raw(parts, torch.isfinite(self.norms[group]))
        for slot in slots:
            slot.arrivals.clear()

    def _parts_of(self, slot: ParameterSource) -> list[CapturedGradients]:
        """Return a parameter's gradients with the norm that its release map clips."""
        parts = _parts(slot)
        if slot.release is None and self.p == 2:
            return parts
        if len(parts) == 1 and isinstance(parts[0].record, NormedGradients):
            return parts
        if slot.release is not None:
            if not parts and slot.release.centre is not None:
                nothing = torch.zeros((), dtype=sum_dtype_of(slot), device=slot.parameter.device)
                parts = [
                    CapturedGradients(ExplicitGradients(nothing.expand(self.batch, *slot.shape)))
                ]
            elif len(parts) > 1 or any(part.rows for part in parts):
                parts = [CapturedGradients(_written_out(slot))]
        scale = self.scale or 1.0  # of an empty batch, where nothing is scaled
        return [
            CapturedGradients(with_clip_norm(slot, a.record, self.capture, scale), a.rows)
            for a in parts
        ]

    def _add_raw(
        self, parts: Sequence[tuple[ParameterSource, CapturedGradients]], finite: Tensor
    ) -> None:
        """Add the gradients of the samples with finite norms to the sums without clipping."""
        assert self.raw is not None
        for slot, arrival in parts:
            record = arrival.record
            record = record.record if isinstance(record, NormedGradients) else record
            factors = finite.to(sum_dtype_of(slot)) * self.scale
            with attributed_to(slot):
                record.add_sum(factors, _place(self.raw, slot, arrival))

    def _outs(self, slots: Sequence[ParameterSource]) -> list[Tensor]:
        """Return zeros for the sums of these parameters."""
        kinds = {(sum_dtype_of(s), s.parameter.device) for s in slots}
        if len(kinds) == 1 and len(self.groups) == 1:
            return self.capture.sum_store.zeros([slot.shape for slot in slots], *kinds.pop())
        return _zeros(slots)

    def result(self) -> clip.ClipResult:
        """Finish the groups that are left and return all clipped sums.

        Raises:
            PrivacyError: a group was finished before its last gradient or the loss scale was known.
        """
        if self.norms and self.capture.loss_scale != self.loss_scale:
            raise PrivacyError(
                "GradScaler",
                expected="a clip group finished with the scale of the loss",
                got="a scale that became known after the backward pass",
                remedy="Use bfloat16 without a scaler, or flat clipping.",
            )
        for slot in self.capture.slots:
            if slot.arrivals:  # an expression in a checkpoint may lead back here late
                self._check_open(slot)
        for group in self.groups:
            if group not in self.norms:
                self.finish(group)
        norms = _combined(list(self.norms.values()), self.p)
        ordered = tuple(self.bounds[group] for group in sorted(self.bounds))
        return clip.ClipResult(
            sums=tuple(self.sums[slot.index] for slot in self.capture.slots),
            norm_bound=math.hypot(*ordered) if self.p == 2 else math.fsum(ordered),
            norms=norms,
            nonfinite=count(~torch.isfinite(norms)),
            batch_size=self.batch,
            arithmetic="float",
            unit=None,
            p=self.p,
            max_norms=ordered,
            raw=None if self.raw is None else tuple(self.raw[i] for i in range(len(self.sums))),
            clipped_as=tuple(slot.release for slot in self.capture.slots),
        )


class _Explicit:
    """The explicit gradients of one dtype among a group's parts: one call for all of them."""

    def __init__(
        self, dtype: torch.dtype, parts: Sequence[tuple[ParameterSource, CapturedGradients]]
    ) -> None:
        self.dtype = dtype
        self.parts = [
            (slot, arrival, to_sum_dtype_dense(arrival.record.grads, dtype))
            for slot, arrival in parts
            if isinstance(arrival.record, ExplicitGradients) and sum_dtype_of(slot) is dtype
        ]
        self.fresh = [(slot, grads) for slot, a, grads in self.parts if a.square is None]
        """The gradients whose norms are not known yet."""

    def square(self) -> Tensor:
        with attributed_to(*(slot for slot, _ in self.fresh)):
            return ghost.explicit_norm([grads for _, grads in self.fresh])

    def add_sums(self, factors: Tensor, sums: dict[int, Tensor]) -> None:
        if self.parts:
            outs = [_place(sums, slot, arrival) for slot, arrival, _ in self.parts]
            with attributed_to(*(slot for slot, _, _ in self.parts)):
                ghost.contract([grads for _, _, grads in self.parts], factors, outs)


def _square(slot: ParameterSource, arrival: CapturedGradients) -> Tensor:
    if arrival.square is not None:
        return arrival.square
    with attributed_to(slot):
        return arrival.record.squared_norms()


def sum_dtype_of(slot: ParameterSource) -> torch.dtype:
    """Return the dtype of the parameter's clipped sum."""
    return clip.sum_dtype(slot.parameter.dtype)


def _combined(norms: list[Tensor], p: int) -> Tensor:
    """Return the norms over several groups together."""
    if len(norms) == 1:
        return norms[0]
    each = torch.stack(norms)
    return each.sum(0) if p == 1 else each.square().sum(0).sqrt()


def _zeros(slots: Sequence[ParameterSource]) -> list[Tensor]:
    return [torch.zeros(s.shape, dtype=sum_dtype_of(s), device=s.parameter.device) for s in slots]


def _place(sums: dict[int, Tensor], slot: ParameterSource, arrival: CapturedGradients) -> Tensor:
    """Return the view of ``sums`` that these gradients are added to."""
    out = sums[slot.index]
    out = out if arrival.rows is None else out[slice(*arrival.rows)]
    return out.view(arrival.record.shape)


def _parts(slot: ParameterSource) -> list[CapturedGradients]:
    """Return a parameter's gradients, merged so that no two parts touch the same entries."""
    by_rows: dict[tuple[int, int] | None, list[CapturedGradients]] = {}
    for arrival in slot.arrivals:
        by_rows.setdefault(arrival.rows, []).append(arrival)
    if len(by_rows) > 1 and not _disjoint(list(by_rows)):
        return [CapturedGradients(_written_out(slot))]
    return [
        same[0] if len(same) == 1 else CapturedGradients(merge([a.record for a in same]), rows)
        for rows, same in by_rows.items()
    ]


def _disjoint(ranges: Sequence[tuple[int, int] | None]) -> bool:
    if None in ranges:
        return False
    ordered = sorted(r for r in ranges if r is not None)
    return all(a[1] <= b[0] for a, b in pairwise(ordered))


def _integer_sums(capture: Capture, plan: Plan) -> clip.ClipResult:
    """Return the clipped sums in units of the plan's lattice."""
    take_over(capture, plan)
    batch = capture.arrived_batch
    if capture.square_of is not squared_norms_rounded:
        # The noise, and with it the lattice, came after the capture was prepared: these norms are
        # not of the numbers that become integers.
        for slot in capture.slots:
            for arrival in slot.arrivals:
                arrival.square = None
    parts = []
    for slot in capture.slots:
        with attributed_to(slot):
            parts += [(slot, arrival) for arrival in _parts(slot)]
    result = integer_sums(
        plan,
        capture.slots,
        parts,
        batch=batch,
        scale=capture.loss_factor(),
        store=capture.sum_store,
    )
    if capture.tested is not None:
        capture.tested.close()
    if not capture.arrived_padded:
        return result
    norms = result.norms[: batch - capture.arrived_padded]
    return replace(
        result, norms=norms, nonfinite=count(~torch.isfinite(norms)), batch_size=len(norms)
    )


def _gradients(capture: Capture, plan: Plan) -> list[Tensor]:
    """Return all per-sample gradients ``[B, *shape]``, mapped ones as release coordinates."""
    take_over(capture, plan)
    batch = capture.arrived_batch
    scale = capture.loss_factor()
    gradients = []
    for slot in capture.slots:
        dtype = sum_dtype_of(slot)
        with attributed_to(slot):
            if plan.mapped and slot.release is not None:
                total = _coordinates(slot, capture, scale, batch).to(dtype)
            elif slot.arrivals:
                total = _written_out(slot).per_sample().to(dtype)
                if scale != 1:
                    total = total * scale
            else:
                total = torch.zeros((batch, *slot.shape), dtype=dtype, device=slot.parameter.device)
        gradients.append(total.contiguous())
    return gradients


def _coordinates(slot: ParameterSource, capture: Capture, scale: float, batch: int) -> Tensor:
    """Return each sample's release coordinates of a parameter."""
    assert slot.release is not None
    parts = _parts(slot)
    record = parts[0].record if len(parts) == 1 and parts[0].rows is None else None
    if record is None and parts:
        record = _written_out(slot)
    if record is None:
        zero = torch.zeros((), dtype=torch.float64, device=slot.parameter.device)
        record = ExplicitGradients(zero.expand(batch, *slot.shape))
    front = with_clip_norm(slot, record, capture, scale or 1.0)
    if isinstance(front, NormedGradients):
        return front.coordinates(scale)
    rows = front.per_sample().double() * scale
    with phase(MAP):
        return slot.release.forward(rows.reshape(batch, *slot.shape))


def _written_out(slot: ParameterSource) -> ExplicitGradients:
    """Return all gradients of a parameter, materialized and added up over its uses."""
    if len(slot.arrivals) == 1 and slot.arrivals[0].rows is None:
        alone = slot.arrivals[0].record.per_sample()
        return ExplicitGradients(alone.reshape(alone.shape[0], *slot.shape))
    total = None
    for arrival in slot.arrivals:
        part = arrival.record.per_sample()
        if total is None:
            total = part.new_zeros((part.shape[0], *slot.shape))
        place = total if arrival.rows is None else total[:, slice(*arrival.rows)]
        place += part.reshape(place.shape)
    assert total is not None
    return ExplicitGradients(total)
