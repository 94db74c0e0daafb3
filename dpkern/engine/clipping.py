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

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..base.errors import InvalidInput
from ..base.phase import CLIP, MAP, phase
from ..ops import clip
from ..ops._count import count
from ..privacy.mechanisms import Plan
from ..step.step import DPStep
from .allocator import give_back_freed_pages, keep_freed_pages
from .attribution import attributed_to
from .capture import Capture
from .clip_norms import NormedGradients
from .exact_sums import integer_sums, squared_norms_rounded, sums_in_place
from .group_sums import GroupSums
from .joined import parts_of, sum_dtype_of, written_out
from .layers.expression import Expression
from .parameter import without_torch_function
from .per_sample_gradients import ExplicitGradients, squared_norms
from .program import kinds
from .program.close import close_replayed
from .release_norms import take_over, with_clip_norm
from .use_counts import CONDITION
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
    replayed = close_replayed(step, capture)
    result = None if replayed else clipped_sums(capture, step.plan)
    if capture.use_counts.follow_records and step.plan.arithmetic == "exact":
        step.ledger.assume(CONDITION)
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
        _lead_back(capture)
        if plan.arithmetic == "exact":
            capture.use_counts.note(capture.slots)
        if sums_in_place(plan, capture.slots):
            result: clip.ClipResult | list[Tensor] = _integer_sums(capture, plan)
        elif plan.arithmetic == "exact":
            result = _gradients(capture, plan)
        else:
            sums = capture.early if isinstance(capture.early, GroupSums) else None
            result = (sums or GroupSums(capture, plan)).result()
    capture.discard_samples()
    return result


def _lead_back(capture: Capture) -> None:
    """Turn the gradients of expressions into gradients of their parameters."""
    for source in capture.expressions:
        assert isinstance(source, Expression)
        source.lead_back()


def gathered(capture: Capture) -> list[tuple[ParameterSource, CapturedGradients]]:
    """Return parameters with their gradients, expressions led back, as integers are made of them.

    Norms are those of the numbers that become integers.
    """
    with without_torch_function(), torch.no_grad():
        _lead_back(capture)
        found = _parts(capture)
        for slot, part in found:
            if part.square is None:
                with attributed_to(slot):
                    part.square = squared_norms_rounded(part.record)
    return found


def _parts(capture: Capture) -> list[tuple[ParameterSource, CapturedGradients]]:
    parts = []
    for slot in capture.slots:
        with attributed_to(slot):
            parts += [(slot, arrival) for arrival in _clipped_parts(slot, capture)]
    return parts


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
    result = integer_sums(
        plan,
        capture.slots,
        _parts(capture),
        batch=batch,
        scale=capture.loss_factor(),
        store=capture.sum_store,
        left_out=capture.filling,
    )
    if capture.tested is not None:
        capture.tested.close()
    if not capture.arrived_padded:
        return result
    norms = result.norms[: batch - capture.arrived_padded]
    return replace(
        result, norms=norms, nonfinite=count(~torch.isfinite(norms)), batch_size=len(norms)
    )


def _clipped_parts(slot: ParameterSource, capture: Capture) -> list[CapturedGradients]:
    """Return a parameter's gradients, with the norm of its release coordinates if it has any."""
    parts = parts_of(slot)
    if slot.release is None or not parts:
        return parts
    if len(parts) > 1 or parts[0].rows is not None:
        parts = [CapturedGradients(written_out(slot))]
    if isinstance(parts[0].record, NormedGradients):
        return parts
    return [CapturedGradients(with_clip_norm(slot, parts[0].record, capture))]


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
                total = written_out(slot).per_sample().to(dtype)
                if scale != 1:
                    total = total * scale
            else:
                total = torch.zeros((batch, *slot.shape), dtype=dtype, device=slot.parameter.device)
        gradients.append(total.contiguous())
    return gradients


def _coordinates(slot: ParameterSource, capture: Capture, scale: float, batch: int) -> Tensor:
    """Return each sample's release coordinates of a parameter."""
    assert slot.release is not None
    parts = parts_of(slot)
    record = parts[0].record if len(parts) == 1 and parts[0].rows is None else None
    if record is None and parts:
        record = written_out(slot)
    if record is None:
        zero = torch.zeros((), dtype=torch.float64, device=slot.parameter.device)
        record = ExplicitGradients(zero.expand(batch, *slot.shape))
    front = with_clip_norm(slot, record, capture, scale or 1.0)
    if isinstance(front, NormedGradients):
        return front.coordinates(scale)
    rows = front.per_sample().double() * scale
    with phase(MAP):
        return slot.release.forward(rows.reshape(batch, *slot.shape))
