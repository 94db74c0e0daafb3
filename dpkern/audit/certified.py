"""Check dpkern's own plans and ledgers by recomputing their numbers another way.

``mechanisms.certify`` computes the multiplier of a plan in floats, rounded down; here it is
compared with exact rationals. ``accounting`` computes upper bounds; here none of them may lie below
the lower bound of the same event.
"""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

from ..base.laws import SCALE_UNITS
from ..privacy.accounting import Ledger, events, shown_bound, shown_lower_bound
from ..privacy.accounting.history import MIN_NOISE_MULTIPLIER, NOTHING, read_uses
from ..privacy.mechanisms.plan import TILE, Block, Plan
from .epsilon_lower_bound import epsilon_lower
from .findings import Check

_MOST_UNITS = 1 << 24


def of_plan(plan: Plan) -> tuple[Check, ...]:
    """Run every check that applies to a plan."""
    return (_protected(plan), _places(plan), _integer_bounds(plan), _multiplier(plan))


def of_ledger(ledger: Ledger, delta: float) -> tuple[Check, ...]:
    """Run every check that applies to a ledger.

    Raises:
        InvalidInput: delta outside (0, 1).
        MissingDependency: dp-accounting is not installed.
    """
    return (_bounds(ledger, delta), _saved(ledger, delta), _seeded(ledger, delta))


def _check(name: str, passed: bool | None, text: str, **numbers: float | int | str) -> Check:
    return Check(layer="plan", name=name, passed=passed, text=text, numbers=numbers)


def _protected(plan: Plan) -> Check:
    """Check that certified plans noise every coordinate, and that others are not called private."""
    name = "every coordinate protected"
    if not plan.private:
        passed = plan.certified_for == NOTHING
        return _check(name, passed, f"not private, certified for {plan.certified_for}")
    bare = [
        block.index
        for block in plan.blocks
        if block.noise_scale <= 0
        or not math.isfinite(block.bound * block.sensitivity_factor)
        or (block.release is not None and not block.release.covers_all_directions)
    ]
    if bare or plan.distribution is None:
        return _check(name, False, f"parameters {bare} are released without noise or bound")
    return _check(name, True, f"{len(plan.blocks)} parameters have noise and a bound")


def _places(plan: Plan) -> Check:
    """Check that no two coordinates of a release take the same place in the noise stream."""
    name = "noise places"
    spans = sorted((b.first_position, b.first_position + b.size, b.index) for b in plan.blocks)
    for (_, end, one), (start, _, other) in pairwise(spans):
        if start < end:
            return _check(name, False, f"parameters {one} and {other} share noise")
    if any(start % TILE for start, _, _ in spans):
        return _check(name, False, f"a parameter starts beside a multiple of {TILE}")
    return _check(name, True, "every coordinate has a place of its own in the noise stream")


def _integer_bounds(plan: Plan) -> Check:
    """Check that each integer bound M has M u <= C exactly, and an int64 norm can verify it."""
    name = "integer bounds"
    if plan.arithmetic != "exact":
        return _check(name, None, "float sums have no integer bounds")
    for block in plan.blocks:
        most = block.integer_bound
        if most is None or not 1 <= most <= _MOST_UNITS:
            return _check(name, False, f"parameter {block.index} has the integer bound {most}")
        if most * Fraction(block.noise_scale) > Fraction(block.bound) * SCALE_UNITS:
            return _check(name, False, f"parameter {block.index}: {most} units exceed the bound")
    return _check(name, True, "M u <= C for every parameter, as exact rationals")


def _multiplier(plan: Plan) -> Check:
    """Check that the event's multiplier is at most the exact one of all clip groups together."""
    name = "noise multiplier"
    leaves = events.leaves(plan.spec)
    wanted = {"gaussian": events.GAUSSIAN_EVENT, "laplace": events.LAPLACE_EVENT}
    if not plan.private:
        return _check(name, None, "nothing is certified")
    kind = wanted.get(plan.distribution or "")
    if kind is None or any(leaf.kind != kind or leaf.sampled for leaf in leaves):
        return _check(name, None, "other than plain releases of this noise are in the event")
    power = 2 if plan.distribution == "gaussian" else 1
    ratios = [_moved(plan, [plan.blocks[i] for i in group]) ** power for group in plan.groups]
    needed = sum(ratios, Fraction(0))
    # 1 / multiplier^power as exact rationals of the floats that the event holds.
    stated = sum((leaf.count / Fraction(leaf.multiplier) ** power for leaf in leaves), Fraction(0))
    least = min(leaf.multiplier for leaf in leaves)
    text = (
        f"one record moves the release by {float(needed) ** (1 / power):.6g} noise scales, and the "
        f"event is for {float(stated) ** (1 / power):.6g}"
    )
    passed = stated >= needed and least >= MIN_NOISE_MULTIPLIER * (1 - 2.0**-16)
    return _check(name, passed, text, needed=float(needed), stated=float(stated))


def _moved(plan: Plan, group: list[Block]) -> Fraction:
    """Return a clip group's largest move in units of its noise: M / 2^20, or C stretch / sd."""
    if plan.arithmetic == "exact":
        return max(Fraction(block.integer_bound or 0, SCALE_UNITS) for block in group)
    return max(
        Fraction(block.bound) * Fraction(block.sensitivity_factor) / Fraction(block.noise_scale)
        for block in group
    )


def _bounds(ledger: Ledger, delta: float) -> Check:
    """Check that no upper bound of the certificate is below the lower bound of the same event."""
    certificate = ledger.certify_if_seed_secret(delta)
    lower = epsilon_lower(_accounted(ledger), certificate.relation, delta)
    below = {name: bound for name, bound in certificate.bounds.items() if bound < lower}
    text = f"epsilon {shown_bound(certificate.epsilon)} is certified, at least "
    text += f"{shown_lower_bound(lower)} reached"
    if below:
        small = (f"{name} {shown_bound(bound)}" for name, bound in below.items())
        text += f"; too small: {', '.join(small)}"
    passed = not below and certificate.epsilon >= lower
    return _check("certificate", passed, text, lower=lower, certified=certificate.epsilon)


def _accounted(ledger: Ledger) -> events.EventSpec:
    uses, _ = read_uses(ledger.state_dict())
    return events.composed([use.total() for use in uses])


def _saved(ledger: Ledger, delta: float) -> Check:
    """Check that a ledger that loads the state has the same certificate."""
    other = Ledger()
    other.load_state_dict(ledger.state_dict())
    same = other.certify(delta) == ledger.certify(delta) and other.steps == ledger.steps
    text = "a loaded state has the same certificate"
    return _check("saved history", same, text if same else "a loaded state certifies another run")


def _seeded(ledger: Ledger, delta: float) -> Check:
    """Check that noise which a seed repeats certifies nothing."""
    name = "seed"
    if not ledger.seeded:
        return _check(name, True, "the key of the noise came from the operating system")
    infinite = ledger.epsilon(delta) == math.inf
    return _check(name, infinite, "noise from a seed: epsilon is infinite")
