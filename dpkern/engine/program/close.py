"""Close the samples of a replayed pass: check guards, sum, and pass the sums to the step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from ...base.phase import CLIP, phase
from ...ops import clip
from ...step.step import DPStep
from ..parameter import without_torch_function
from .flat import Flat
from .sums import SumMemory

if TYPE_CHECKING:
    from ..capture import Capture


def close_replayed(step: DPStep, capture: Capture) -> bool:
    """Add the samples of a replayed pass to the step; return False if the recorded path must.

    Raises:
        PrivacyError: a guard failed; nothing was changed.
    """
    program, plan = capture.program, step.plan
    flat = program.ready(plan)
    if flat is None:
        return False
    capture.check_closed()
    run = program.run
    with phase(CLIP):
        run.check_operands()
        memory = flat.sums.first() if step.sums is None else flat.sums.further()
        memory.samples = capture.arrived_batch - capture.arrived_padded
        lost = flat.close(
            run, plan, scale=capture.loss_factor(), records=memory.samples, memory=memory
        )
        _hand_over(step, flat, memory, lost)
    if capture.tested is not None:
        capture.tested.close()
    program.done()
    capture.discard_samples()
    return True


def _hand_over(step: DPStep, flat: Flat, memory: SumMemory, lost: int) -> None:
    """Let the step have the sums, which it may add to others before it releases them."""
    samples, joined = memory.samples, flat.sums.of(step.sums)
    if joined is not None and joined.samples + samples > flat.arithmetic.most_samples(step.plan):
        joined = None
    exact = flat.arithmetic.exact
    finite = exact or flat.calls.is_finite(memory.address, memory.size)
    # Others see these sums and may keep them, so that their memory cannot be used again.
    looked_at = not finite or step.watched or (joined is None and step.sums is not None)
    if looked_at or (step.plan.mapped and not step.maps_in_update):
        if looked_at:
            flat.sums.give_away()
        with without_torch_function(), torch.no_grad():
            step.add(sum=_result(step, flat, memory, lost))
        return
    if joined is not None:
        with torch.no_grad():
            joined.whole.add_(memory.whole)
        joined.samples += samples
        memory = joined
    seen = None if exact else flat.releases.seen
    step.adopt(memory.tensors, samples=samples, nonfinite=lost, clipped_as=seen)


def _result(step: DPStep, flat: Flat, memory: SumMemory, lost: int) -> clip.ClipResult:
    plan, exact = step.plan, flat.arithmetic.exact
    return clip.ClipResult(
        sums=tuple(total.clone() for total in memory.tensors),
        norm_bound=math.hypot(*plan.group_bounds),
        norms=flat.norms(plan, memory.samples),
        nonfinite=lost,
        batch_size=memory.samples,
        arithmetic=plan.arithmetic,
        unit=tuple(unit for unit in plan.units if unit is not None) if exact else None,
        p=2,
        max_norms=plan.group_bounds,
        raw=None,
        clipped_as=None if exact else flat.releases.seen,
        bounded_by="proved" if exact else "checked",
    )
