"""Compare two runs of a loop: how far sums moved, what is remembered, what the noise shows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...base.errors import PrivacyError
from ...privacy.accounting.shown import shown_lower_bound
from ...privacy.mechanisms.plan import Plan
from ..claims import GaussianDP, of_event
from ..findings import Check
from ..loop import Attack, LikelihoodRatio, StepMovement
from .loop_run import LoopTrace
from .loop_state import VARIABLE, differences

ROUNDING = 2.0**-12
"""Part of C by which each sample's gradient may round otherwise in a batch of another size."""
UNMOVED = 2.0**-20
"""Part of C that counts as no movement between batches of the same records."""
SHOWN = 8
"""Maximum of remembered names in a sentence."""


def listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def aligned(whole: LoopTrace, other: LoopTrace) -> bool:
    """Whether the generators of two runs stood alike at every release."""
    shared = min(whole.steps, other.steps)
    return whole.generators[:shared] == other.generators[:shared]


def compare(
    whole: LoopTrace, other: LoopTrace, *, bound: float, unstable: float
) -> tuple[StepMovement, ...]:
    """Return how far apart the sums of each step are."""
    assert whole.plan is not None
    found = []
    for step in range(min(whole.steps, other.steps)):
        moved, index = _distance(whole.plan, whole.sums[step], other.sums[step])
        held, size = whole.held[step], whole.sizes[step]
        allowed = bound + size * ROUNDING if held else UNMOVED
        found.append(
            StepMovement(
                step=step + 1,
                held=held,
                size=size,
                moved=moved,
                allowed=allowed + 2 * unstable,
                parameter=whole.names[index],
            )
        )
    return tuple(found)


def _distance(plan: Plan, one: list[Tensor], other: list[Tensor]) -> tuple[float, int]:
    """Return the largest distance of all clip groups in units of C, and the most moved parameter.

    Release coordinates are up to ``stretch`` times as long as what is clipped.
    """
    p = plan.p
    lengths = [
        float(torch.linalg.vector_norm((a - b).double(), p)) / block.sensitivity_factor
        for a, b, block in zip(one, other, plan.blocks, strict=True)
    ]
    lengths = [math.inf if math.isnan(length) else length for length in lengths]
    groups = [
        math.fsum(lengths[i] ** p for i in group) ** (1 / p) / bound
        for group, bound in zip(plan.groups, plan.group_bounds, strict=True)
    ]
    shares = [n / block.bound for n, block in zip(lengths, plan.blocks, strict=True)]
    return max(groups), max(range(len(shares)), key=shares.__getitem__)


def remembered_apart(whole: LoopTrace, other: LoopTrace) -> dict[str, str] | None:
    """Return what two runs hold that differs; None where there was nothing to compare."""
    found: dict[str, str] | None = None
    for one, two in ((whole.remembered, other.remembered), (whole.final, other.final)):
        if one is not None and two is not None:
            found = (found or {}) | differences(one, two)
    return found


def likelihood_ratio(whole: LoopTrace, other: LoopTrace, delta: float) -> LikelihoodRatio | None:
    """Compute the likelihood ratio of two runs with noise; None unless Gaussian everywhere."""
    plan = whole.plan
    assert plan is not None
    if plan.distribution != "gaussian" or not all(sd > 0 for sd in plan.scales):
        return None
    try:
        held = sum(whole.held[: other.steps])
        promised = of_event(plan.spec, neighbouring=plan.neighbouring, steps=held or 1)
    except PrivacyError:
        return None
    if not isinstance(promised, GaussianDP) or not held:
        return None
    square = math.fsum(
        float((a - b).double().square().sum()) / sd**2
        for one, two in zip(whole.sums, other.sums, strict=False)
        for a, b, sd in zip(one, two, plan.scales, strict=True)
    )
    return LikelihoodRatio(shown=math.sqrt(square), certified=promised.mu, steps=held, delta=delta)


def movement_check(attacks: list[Attack], *, held: bool) -> Check:
    """Whether every step kept its bound."""
    name = "movement" if held else "steps without the record"
    found = [(a, s) for a in attacks if (s := a.largest(held=held)) is not None]
    if not found:
        text = f"no step whose batch {'held' if held else 'did not hold'} the record"
        return Check(layer="sensitivity", name=name, passed=None, text=text)
    attack, step = max(found, key=lambda pair: pair[1].moved / pair[1].allowed)
    passed = all(s.kept for a in attacks for s in a.steps if s.held is held)
    without = "" if held else ", whose batch does not hold it"
    place = f", most in {step.parameter}" if step.moved else ""
    text = (
        f"one record ({attack.name}, record {attack.record}) moves the clipped sum by "
        f"{shown_lower_bound(step.moved, 3)} C at step {step.step}{without}{place}; "
        f"{attack.bound if held else 0:g} C is certified"
    )
    numbers = {"moved": step.moved, "allowed": step.allowed, "step": step.step}
    return Check(layer="sensitivity", name=name, passed=passed, text=text, numbers=numbers)


def state_check(attacks: list[Attack]) -> Check:
    """Whether what leaves with the model is made of releases alone."""
    found = {
        name: where
        for attack in attacks
        for name, where in (attack.remembered or {}).items()
        if where != VARIABLE
    }
    if all(attack.remembered is None for attack in attacks):
        text = "no step whose batch did not hold the record, and main() did not return"
        return Check(layer="sensitivity", name="state", passed=None, text=text)
    by_place: dict[str, list[str]] = {}
    for name, where in found.items():
        by_place.setdefault(where, []).append(name)
    text = "; ".join(
        f"{where} remembers the record in {listed(n)}" for where, n in by_place.items()
    )
    return Check(
        layer="sensitivity",
        name="state",
        passed=not found,
        text=text or "model, optimizers and other modules with parameters are the same without it",
        numbers={"different": len(found)},
    )


def hand_out_check(base: LoopTrace) -> Check:
    """Whether every step was one of a batch that the private loader had yielded."""
    missing = sum(
        not fresh and not elsewhere
        for fresh, elsewhere in zip(base.fresh, base.elsewhere, strict=True)
    )
    stated = sum(base.elsewhere)
    sampling = base.sampling["sampling"]
    text = (
        f"{missing} of {base.steps} steps took samples that the loader of make_private did not "
        f"yield, and are accounted as {sampling} batches of it"
        if missing
        else f"no step passes for a {sampling} batch that the loader of make_private did not yield"
    )
    if stated:
        text += f"; {stated} steps were accounted as samples from elsewhere, and not attacked"
    if base.strays:
        text += f"; {base.strays} forward passes in training mode had no new batch of it"
    numbers = {"missing": missing, "stray_forward_passes": base.strays}
    return Check(layer="plan", name="hand-outs", passed=not missing, text=text, numbers=numbers)
