"""Audit a user's whole training loop, with and without one record: ``path.py:main``.

``main`` takes no arguments, makes its data, model and engine, and trains. It is run unchanged: once
to see which records matter, then with all records, then without one of them or with an adversarial
one. All runs have the same random numbers and the same batches up to the record, and release the
same (``loop_run``), so that two of them differ by what one record does.
"""

from __future__ import annotations

import ast
import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...base import validate as check
from ...base.errors import InvalidInput
from ..findings import Check
from ..loop import Attack, LikelihoodRatio, LoopFindings
from .loop_compare import (
    aligned,
    compare,
    hand_out_check,
    likelihood_ratio,
    listed,
    movement_check,
    remembered_apart,
    state_check,
)
from .loop_records import OUTLIER, Content
from .loop_run import CannotAudit, LoopError, LoopSetting, LoopTrace, run
from .loop_state import VARIABLE

STEPS = 10
SECONDS = 120.0
REPEATABLE = 2.0**-7
"""Part of C by which two runs on the same records may differ; beyond it nothing can be told."""

Tell = Callable[[str, float], None]


@dataclass(frozen=True)
class _Plan:
    """An attack to be tried: which batches hold what, and what the second run changes."""

    name: str
    record: int
    quiet: bool
    targets: tuple[int, ...]
    contents: Mapping[int, Content]


def is_loop(reference: str) -> bool:
    """Whether ``path.py:name`` is a function of the file that needs no arguments.

    The file is parsed and not run: a release is a function of one or two arguments
    (``subjects.script``).
    """
    path, _, symbol = reference.rpartition(":")
    if not path.endswith(".py") or not Path(path).is_file():
        return False
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (SyntaxError, ValueError):
        return False
    found = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == symbol]
    if not found:
        return False
    given = found[-1].args
    positional = len(given.posonlyargs) + len(given.args) - len(given.defaults)
    return positional == 0 and all(default is not None for default in given.kw_defaults)


def audit_loop(
    reference: str,
    *,
    steps: int = STEPS,
    seconds: float = SECONDS,
    delta: float = 1e-5,
    progress: Tell = lambda stage, share: None,
) -> LoopFindings:
    """Audit the training loop ``path.py:name``.

    Args:
        reference: a function without arguments that calls ``make_private`` and trains.
        steps: releases of each run, at most.
        seconds: no attack begins later than this; the first one is always tried.
        delta: delta of the epsilons.
        progress: called with a stage and the share of the work that is done.

    Raises:
        InvalidInput: numbers out of range, a script that raises an error of its own, that is not
            reproducible, or that this audit cannot speak of.
    """
    check.integer(1, steps=steps)
    check.positive(seconds=seconds)
    check.open_unit(delta=delta)
    path, _, symbol = reference.rpartition(":")
    first = LoopSetting(
        path=Path(path).resolve(), symbol=symbol, steps=steps, seconds=max(seconds / 16, 1.0)
    )
    try:
        return _LoopAudit(first, seconds, delta, progress).findings()
    except (CannotAudit, LoopError) as error:
        told = {"expected": error.expected, "got": error.got, "remedy": error.remedy}
        raise InvalidInput(error.name, **told) from error


class _LoopAudit:
    def __init__(self, setting: LoopSetting, seconds: float, delta: float, tell: Tell) -> None:
        self.setting, self.seconds, self.delta, self.tell = setting, seconds, delta, tell
        self.began = time.monotonic()
        self.runs = 0
        self.attacks: list[Attack] = []
        self.notes: list[str] = []
        self.likelihood: LikelihoodRatio | None = None
        self.epsilon: float | None = None
        self.unstable = 0.0
        self.changing: set[str] = set()
        self.refusal = ""
        """The engine's error when it refused the first run."""
        self.refused = False
        """Whether the engine refused a later run."""

    def findings(self) -> LoopFindings:
        """Run everything."""
        self.tell("first run", 0.0)
        scout = self._run(self.setting, None, silent=False)
        if scout.refusal is not None and not scout.steps:
            self.refusal = _named(scout)
            return self._found(scout, ())
        if not scout.steps:
            raise LoopError(
                self.setting.label,
                expected="a loop that takes at least one private step",
                got="none",
                remedy="Call optimizer.step() of the optimizer that make_private returned.",
            )
        assert scout.plan is not None
        if not all(math.isfinite(bound) and bound > 0 for bound in scout.plan.group_bounds):
            raise self._cannot(
                "a finite max_grad_norm",
                "none: nothing bounds a record",
                "Pass a finite max_grad_norm to make_private.",
            )
        self.refusal = "" if scout.refusal is None else _named(scout)
        if not any(scout.fresh):
            taken = hand_out_check(scout)
            if taken.passed:
                raise self._cannot(
                    "steps on batches of the loader of make_private",
                    "samples from elsewhere in every step, where no record can be left out",
                    "Train on the loader, or audit one step: "
                    "dpkern.audit.subjects.model.ModelStep.",
                )
            self.notes.append("No record could be left out: the loop takes none from the loader.")
            return self._found(scout, (taken,))
        self.setting = replace(self.setting, steps=scout.steps, seconds=math.inf)
        if not scout.quiet:
            self.notes.append("This mechanism has no form without noise: noise is always on.")
        base = self._attack_all(scout)
        checks = self._checks(base)
        found = self._found(base, checks)
        if found.passed and not self.refused and not self._reached():
            raise self._cannot(
                "a record that moves a clipped sum",
                f"none in {base.steps} steps, of which {sum(base.held)} held one",
                "Take more --steps; feed the module what the loader of make_private yields, and "
                "look whether every gradient is 0.",
            )
        return found

    def _attack_all(self, scout: LoopTrace) -> LoopTrace:
        """Try attack after attack while there is time; return the first run with all records."""
        base: LoopTrace | None = None
        shared: tuple[Any, LoopTrace] | None = None
        plans = self._plans(scout)
        for number, plan in enumerate(plans):
            late = time.monotonic() - self.began + 2 * scout.seconds > self.seconds
            if number and late:
                left = ", ".join(_title(p) for p in plans[number:])
                self.notes.append(f"Not tried, for want of time (--seconds): {left}.")
                break
            self.tell(_title(plan), (number + 1) / (len(plans) + 1))
            key = plan.quiet, plan.targets, plan.contents
            setting = replace(
                self.setting, quiet=plan.quiet, targets=plan.targets, contents=plan.contents
            )
            if shared is None or shared[0] != key:
                ask = not plan.quiet and self.epsilon is None
                shared = key, self._run(setting, None, delta=self.delta if ask else None)
                self.epsilon = shared[1].epsilon if ask else self.epsilon
            whole = shared[1]
            if whole.refusal is not None:
                self._note_refusal(plan, whole)
            if base is None:
                base = whole
                self._control(setting, whole)
            self._attack(plan, setting, whole)
        assert base is not None
        return base

    def _plans(self, scout: LoopTrace) -> list[_Plan]:
        largest = max(scout.norms, key=lambda i: scout.norms[i], default=0)
        others = [i for i in range(scout.records) if i != largest]
        if not others:
            raise self._cannot("two records at least", "one", "Audit a larger data set.")
        other = random.Random(scout.records).choice(others)  # public: which record is tried
        pair = (largest, other) if len(others) > 1 else (largest,)
        outlier = {largest: Content(largest, OUTLIER)}
        plans = [_Plan("largest gradient", largest, scout.quiet, pair, {})]
        if len(pair) == 2:  # beside the first: both share the run with all records
            plans.append(_Plan("any record", other, scout.quiet, pair, {}))
        if scout.quiet:
            plans.append(_Plan("largest gradient", largest, False, pair, {}))
        if scout.scalable:
            name = f"outlier ({OUTLIER:g} times a record)"
            plans.append(_Plan(name, largest, scout.quiet, pair, outlier))
        if len(pair) == 2:
            double = {other: Content(largest)}
            plans.append(_Plan("duplicate of a record", other, scout.quiet, pair, double))
        return plans

    def _control(self, setting: LoopSetting, whole: LoopTrace) -> None:
        """Run once more on the same records: no record causes what differs then.

        Raises:
            CannotAudit: a script that is not reproducible.
        """
        again = self._run(setting, whole)
        steps = compare(whole, again, bound=0.0, unstable=0.0)
        self.unstable = max((step.moved for step in steps), default=0.0)
        same_length = again.steps == whole.steps
        if not same_length or not self.unstable <= REPEATABLE:
            raise self._cannot(
                "two runs on the same records that take the same steps",
                f"{whole.steps} and {again.steps} steps, with clipped sums that are "
                f"{self.unstable:.3g} C apart",
                "Let main() make all its randomness from torch, NumPy or random, which are "
                "seeded, with num_workers=0, and start from no checkpoint that it writes.",
            )
        self.changing = set(remembered_apart(whole, again) or ())
        if self.unstable > 0:
            self.notes.append(
                f"Two runs on the same records differ by {self.unstable:.3g} C: rounding that "
                "changes from run to run. Bounds are widened by twice that."
            )

    def _attack(self, plan: _Plan, setting: LoopSetting, whole: LoopTrace) -> None:
        name, bound = plan.name, 1.0
        try:
            other: LoopTrace | None = self._run(replace(setting, removed=plan.record), whole)
        except LoopError as error:
            other = None
            self.notes.append(
                f"Without record {plan.record} the script raises {error.got}: it was replaced by "
                "another record instead."
            )
        if other is not None and not aligned(whole, other):
            other = None
            self.notes.append(
                f"Without record {plan.record} the loop draws other random numbers for the other "
                "records: it was replaced by another one instead."
            )
        if other is None:
            name, bound = f"{name}, replaced", 2.0
            source = next(i for i in range(whole.records) if i not in plan.targets)
            contents = {**plan.contents, plan.record: Content(source)}
            other = self._run(replace(setting, contents=contents), whole)
        if other.refusal is not None and whole.refusal is None:
            self._note_refusal(plan, other)
        steps = compare(whole, other, bound=bound, unstable=self.unstable)
        remembered = remembered_apart(whole, other)
        attack = Attack(
            name=name,
            record=plan.record,
            noise=not whole.quiet,
            bound=bound,
            steps=steps,
            remembered=None
            if remembered is None
            else {k: v for k, v in remembered.items() if k not in self.changing},
        )
        self.attacks.append(attack)
        if not whole.quiet and bound == 1.0 and self.likelihood is None:
            self.likelihood = likelihood_ratio(whole, other, self.delta)

    def _note_refusal(self, plan: _Plan, trace: LoopTrace) -> None:
        self.refused = True
        self.notes.append(
            f"{_title(plan)}: the engine refused a run after {trace.steps} steps: {_named(trace)}"
        )

    def _checks(self, base: LoopTrace) -> tuple[Check, ...]:
        return (
            movement_check(self.attacks, held=True),
            movement_check(self.attacks, held=False),
            state_check(self.attacks),
            hand_out_check(base),
        )

    def _reached(self) -> bool:
        return any(step.held and step.moved > 0 for a in self.attacks for step in a.steps)

    def _found(self, base: LoopTrace, checks: tuple[Check, ...]) -> LoopFindings:
        variables = sorted(
            {
                name
                for attack in self.attacks
                for name, where in (attack.remembered or {}).items()
                if where == VARIABLE
            }
        )
        if variables:
            self.notes.append(
                f"Variables of the loop that remember a record: {listed(variables)}. They are "
                "not released by the engine; whatever is made of them (a log, a file) has no "
                "certificate."
            )
        sampling = {k: v for k, v in base.sampling.items() if v is not None}
        return LoopFindings(
            subject=self.setting.label,
            steps=base.steps,
            records=base.records,
            sampling=sampling,
            epsilon=self.epsilon,
            delta=self.delta,
            attacks=tuple(self.attacks),
            checks=checks,
            likelihood=self.likelihood,
            refusal=self.refusal,
            notes=tuple(dict.fromkeys(self.notes)),
            runs=self.runs,
            seconds=time.monotonic() - self.began,
        )

    def _run(self, setting: LoopSetting, base: LoopTrace | None, **options: Any) -> LoopTrace:
        self.runs += 1
        return run(setting, base, **options)

    def _cannot(self, expected: str, got: str, remedy: str) -> CannotAudit:
        return CannotAudit(self.setting.label, expected=expected, got=got, remedy=remedy)


def _named(trace: LoopTrace) -> str:
    """Return the engine's error with its type."""
    return f"{type(trace.refusal).__name__}: {trace.refusal}"


def _title(plan: _Plan) -> str:
    return f"{plan.name}, noise {'off' if plan.quiet else 'on'}"


__all__ = ["SECONDS", "STEPS", "audit_loop", "is_loop"]
