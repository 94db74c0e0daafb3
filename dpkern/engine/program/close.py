"""Close the samples of a replayed pass: check guards, sum, and pass the sums to the step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from ...base.phase import CLIP, followed, phase
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
    if followed() is not None:
        with phase(CLIP):
            _sum(step, capture, flat)
    else:
        _sum(step, capture, flat)
    if capture.tested is not None:
        capture.tested.close()
    program.done()
    capture.discard_samples()
    return True


def _sum(step: DPStep, capture: Capture, flat: Flat) -> None:
    """Make the sums, and let the step have them."""
    run, before = capture.program.run, step.sums
    run.check_operands()
    wide = run.batch > flat.most_samples
    memory = flat.sums.first(wide=wide) if before is None else flat.sums.further(wide=wide)
    memory.samples = capture.arrived_batch - capture.arrived_padded
    lost = flat.close(run, scale=capture.loss_factor(), records=memory.samples, memory=memory)
    joined = None if before is None else flat.sums.of(before)
    _hand_over(step, flat, memory, joined, lost)


def _hand_over(
    step: DPStep, flat: Flat, memory: SumMemory, joined: SumMemory | None, lost: int
) -> None:
    """Let the step have the sums, which may be added to those before it releases them.

    ``joined`` holds those of the samples before in the same step, None where others do or there are
    none.
    """
    samples, plan = memory.samples, step.plan
    # The recorded path may have added samples to the same memory.
    if joined is not None and step.added + samples > flat.most_samples:
        joined = None
    exact = flat.arithmetic.exact
    finite = exact or flat.calls.is_finite(memory.address, memory.size)
    # Others see these sums and may keep them, so that their memory cannot be used again.
    looked_at = not finite or step.watched or (joined is None and step.unfinished)
    if looked_at or (plan.mapped and not step.maps_in_update):
        if looked_at:
            flat.sums.give_away()
        with without_torch_function(), torch.no_grad():
            step.add(sum=_result(step, flat, memory, lost))
        return
    if joined is not None:
        with torch.no_grad():
            joined.whole.add_(memory.whole)
        memory = joined
    seen = None if exact else flat.releases.seen
    step.adopt(memory.tensors, samples=samples, nonfinite=lost, clipped_as=seen)


def _result(step: DPStep, flat: Flat, memory: SumMemory, lost: int) -> clip.ClipResult:
    plan, exact = step.plan, flat.arithmetic.exact
    return clip.ClipResult(
        sums=tuple(total.clone() for total in memory.tensors),
        norm_bound=math.hypot(*plan.group_bounds),
        norms=flat.norms(memory.samples),
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
