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
        batch, mean = run.batch, capture.loss_reduction == "mean"
        lost = flat.close(
            run,
            plan.group_bounds[0],
            (batch if mean else 1) / capture.loss_scale,
            automatic=plan.clipping == "automatic",
            memory=memory,
        )
        _hand_over(step, flat, memory, lost)
    program.done()
    capture.discard_samples()
    return True


def _hand_over(step: DPStep, flat: Flat, memory: SumMemory, lost: int) -> None:
    """Let the step have the sums, which it may add to others before it releases them."""
    joined = flat.sums.of(step.sums)
    finite = flat.calls.is_finite(memory.address, memory.size)
    if not finite or step.watched or (joined is None and step.sums is not None):
        # Whatever looks at these sums may keep them, so that their memory cannot be used again.
        flat.sums.give_away()
        with without_torch_function(), torch.no_grad():
            step.add(sum=_result(step, flat, memory, lost))
        return
    if joined is not None:
        with torch.no_grad():
            joined.whole.add_(memory.whole)
        memory = joined
    step.adopt(memory.tensors, samples=flat.batch, nonfinite=lost)


def _result(step: DPStep, flat: Flat, memory: SumMemory, lost: int) -> clip.ClipResult:
    (bound,) = step.plan.group_bounds
    return clip.ClipResult(
        sums=tuple(total.clone() for total in memory.tensors),
        norm_bound=math.hypot(bound),
        norms=flat.norms.clone(),
        nonfinite=lost,
        batch_size=flat.batch,
        arithmetic="float",
        unit=None,
        p=2,
        max_norms=(bound,),
        raw=None,
        clipped_as=(None,) * len(memory.tensors),
    )
