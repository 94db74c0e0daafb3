"""The clipped sums of floating-point gradients, one clip group after another.

n_b^2 = sum over the group's parameters of ||grad_b||^2
sum   = sum_b min(1, C / n_b) grad_b
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..base.errors import PrivacyError
from ..base.phase import CLIP, phase
from ..ops import clip, ghost
from ..ops._count import count
from ..privacy.mechanisms import Plan
from .attribution import attributed_to
from .capture import Capture
from .clip_norms import NormedGradients
from .joined import parts_of, place, sum_dtype_of, written_out, zeros
from .per_sample_gradients import (
    ExplicitGradients,
    LinearGradients,
    RoundedGradients,
    operands,
    to_sum_dtype_dense,
)
from .release_norms import take_over, with_clip_norm
from .uses import CapturedGradients, ParameterSource


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
        self.raw = dict(enumerate(zeros(capture.slots))) if plan.needs_raw else None
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
        batches = [_Materialized(dtype, parts) for dtype in {sum_dtype_of(slot) for slot in slots}]
        squares: list[Tensor] = []
        shared: dict[Any, list[tuple[ParameterSource, LinearGradients]]] = {}
        for slot, arrival in parts:
            record = arrival.record
            if arrival.square is not None:
                squares.append(arrival.square)
            elif isinstance(record, LinearGradients) and record.shares_launch:
                alike = record.a.dtype, record.a.shape, record.shape
                shared.setdefault(alike, []).append((slot, record))
            elif not isinstance(record, ExplicitGradients):
                with attributed_to(slot):
                    squares.append(record.squared_norms())
        squares += map(_squares_together, shared.values())
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
            if self.capture.filling is not None:
                # Even a norm of such a row that is not finite counts for nothing.
                factors[batch.dtype].masked_fill_(self.capture.filling, 0)
                self.norms[group].masked_fill_(self.capture.filling, 0)
        for slot, out in zip(slots, self._outs(slots), strict=True):
            self.sums[slot.index] = out
        for slot, arrival in parts:
            if not isinstance(arrival.record, (ExplicitGradients, RoundedGradients)):
                out = place(self.sums, slot, arrival)
                with attributed_to(slot):
                    arrival.record.add_sum(factors[sum_dtype_of(slot)], out)
        for batch in batches:
            batch.add_sums(factors[batch.dtype], self.sums)
        if self.raw is not None:
            self._add_raw(parts, torch.isfinite(self.norms[group]))
        for slot in slots:
            slot.arrivals.clear()

    def _parts_of(self, slot: ParameterSource) -> list[CapturedGradients]:
        """Return a parameter's gradients with the norm that its release map clips."""
        parts = parts_of(slot)
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
                parts = [CapturedGradients(written_out(slot))]
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
                record.add_sum(factors, place(self.raw, slot, arrival))

    def _outs(self, slots: Sequence[ParameterSource]) -> list[Tensor]:
        """Return zeros for the sums of these parameters."""
        kinds = {(sum_dtype_of(s), s.parameter.device) for s in slots}
        if len(kinds) == 1 and len(self.groups) == 1:
            return self.capture.sum_store.zeros([slot.shape for slot in slots], *kinds.pop())
        return zeros(slots)

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


class _Materialized:
    """The gradients of one sum dtype that a group's parts hold: one call for all of them.

    Those that are rounded to 16 bits have one of their own.
    """

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
        self.rounded = [
            (slot, arrival, arrival.record.grads)
            for slot, arrival in parts
            if isinstance(arrival.record, RoundedGradients) and sum_dtype_of(slot) is dtype
        ]

    def square(self) -> Tensor:
        with attributed_to(*(slot for slot, _ in self.fresh)):
            return ghost.explicit_norm([grads for _, grads in self.fresh])

    def add_sums(self, factors: Tensor, sums: dict[int, Tensor]) -> None:
        for add, parts in ((ghost.contract, self.parts), (ghost.rounded_sum, self.rounded)):
            if parts:
                outs = [place(sums, slot, arrival) for slot, arrival, _ in parts]
                with attributed_to(*(slot for slot, _, _ in parts)):
                    add([grads for _, _, grads in parts], factors, outs)


def _squares_together(layers: Sequence[tuple[ParameterSource, LinearGradients]]) -> Tensor:
    """Return the squared norms of several layers of one shape together, which share launches."""
    slots, records = zip(*layers, strict=True)
    given = [operands(record.a, record.g) for record in records]
    with attributed_to(*slots):
        return ghost.linear_norms([a for a, _ in given], [g for _, g in given])


def _combined(norms: list[Tensor], p: int) -> Tensor:
    """Return the norms over several groups together."""
    if len(norms) == 1:
        return norms[0]
    each = torch.stack(norms)
    return each.sum(0) if p == 1 else each.square().sum(0).sqrt()
