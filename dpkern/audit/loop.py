"""The findings of an audit of a whole training loop, and its verdict.

    m_t = max over clip groups of ||S_t(D) - S_t(D')|| / C

``S_t`` is the clipped sum of step t, of two runs that have released the same before. Without one
record ``m_t`` is at most 1 where the step's batch holds the record, and 0 where it does not; with
another record in its place at most 2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..privacy.accounting.shown import shown_lower_bound
from .claims import GaussianDP
from .findings import Check


@dataclass(frozen=True, kw_only=True)
class StepMovement:
    """One step of two runs.

    Attributes:
        step: its number, from 1.
        held: whether the batch held the record.
        size: its samples, in the run with all records.
        moved: distance that the clipped sum moved, in units of C.
        allowed: distance that it may move, rounding included.
        parameter: the one that moved most.
    """

    step: int
    held: bool
    size: int
    moved: float
    allowed: float
    parameter: str

    @property
    def kept(self) -> bool:
        """Whether the movement is within its bound; NaN is not."""
        return self.moved <= self.allowed


@dataclass(frozen=True, kw_only=True)
class Attack:
    """Two runs that differ in one record.

    Attributes:
        name: the attack in words.
        record: its index in the data set.
        noise: whether the engine's noise was on.
        bound: largest movement that the certificate allows, in units of C: 1 or 2.
        steps: steps that can be compared.
        remembered: state other than the releases that differed after a step: names and what holds
            them. None means that the state could not be examined.
    """

    name: str
    record: int
    noise: bool
    bound: float
    steps: tuple[StepMovement, ...]
    remembered: Mapping[str, str] | None = None

    def largest(self, *, held: bool) -> StepMovement | None:
        """Return the step that moved most, among those whose batch held the record or not."""
        return max(
            (step for step in self.steps if step.held is held),
            key=lambda step: math.inf if math.isnan(step.moved) else step.moved,
            default=None,
        )


@dataclass(frozen=True, kw_only=True)
class LikelihoodRatio:
    """The visibility of one record's presence to an adversary who knows which batches held it.

    ``mu^2 = sum over steps of ||(S_t(D) - S_t(D')) / sd||^2`` along one run: computed from the
    movements and the law of the noise, not counted.

    Attributes:
        shown: mu of the run that was audited.
        certified: mu that the plan certifies for as many steps that hold the record.
        steps: number of steps that held the record.
        delta: delta of the epsilons.
    """

    shown: float
    certified: float
    steps: int
    delta: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, with epsilons without amplification by sampling."""
        return asdict(self) | {
            "epsilon_shown": GaussianDP(self.shown).epsilon(self.delta),
            "epsilon_certified": GaussianDP(self.certified).epsilon(self.delta),
        }


@dataclass(frozen=True, kw_only=True)
class LoopFindings:
    """The result of an audit of a loop.

    Attributes:
        subject: the loop's name.
        steps: releases that were compared.
        records: size of the data set.
        sampling: sampling of the batches, as the engine accounts for it.
        epsilon: epsilon at ``delta`` that these steps would certify in an unobserved run. None
            means that there was no step.
        delta: delta of all epsilons.
        attacks: attacks that were tried.
        checks: the questions; one that failed contradicts the certificate.
        likelihood: likelihood ratio of the first attack with noise. None means that it was not
            computed.
        refusal: the engine's error; empty: it refused nothing.
        notes: notes that a reader needs.
        runs: number of runs of the whole script.
        seconds: wall time.
    """

    subject: str
    steps: int
    records: int
    sampling: Mapping[str, Any]
    epsilon: float | None
    delta: float
    attacks: tuple[Attack, ...] = ()
    checks: tuple[Check, ...] = ()
    likelihood: LikelihoodRatio | None = None
    refusal: str = ""
    notes: tuple[str, ...] = ()
    runs: int = 1
    seconds: float = 0.0

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if check.passed is False)

    @property
    def passed(self) -> bool:
        """Whether nothing contradicts the certificate."""
        return not self.failed

    @property
    def verdict(self) -> str:
        """The verdict: ``contradicted``, ``refused`` before a release, or ``not contradicted``."""
        if self.failed:
            return "contradicted"
        return "refused" if self.refusal and not self.steps else "not contradicted"

    @property
    def largest(self) -> tuple[Attack, StepMovement] | None:
        """The largest movement of all attacks relative to its bound, with its attack."""
        found = [
            (attack, step)
            for attack in self.attacks
            if (step := attack.largest(held=True)) is not None
        ]
        return max(found, key=lambda pair: pair[1].moved / pair[0].bound, default=None)

    @property
    def sentence(self) -> str:
        """The verdict in words."""
        if self.verdict == "refused":
            return f"The engine refused {self.subject} before any release: {self.refusal}"
        after = f" Then the engine refused to go on: {self.refusal}" if self.refusal else ""
        count = f"{self.steps} step{'s' if self.steps != 1 else ''}"
        if self.failed:
            found = "; ".join(check.text for check in self.failed)
            return f"The certificate of {self.subject} is contradicted in {count}: {found}.{after}"
        moved = ""
        if self.largest is not None:
            attack, step = self.largest
            most = shown_lower_bound(step.moved, 3)
            moved = f": one record moved a clipped sum by {most} C of {attack.bound:g} C"
        return f"Nothing contradicts the certificate of {self.subject} in {count}{moved}.{after}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            "subject": self.subject,
            "verdict": self.sentence,
            "result": self.verdict,
            "passed": self.passed,
            "refused": self.refusal or None,
            "steps": self.steps,
            "records": self.records,
            "sampling": dict(self.sampling),
            "epsilon_certified": self.epsilon,
            "delta": self.delta,
            "largest_movement": None
            if self.largest is None
            else {"attack": self.largest[0].name, "bound": self.largest[0].bound}
            | asdict(self.largest[1]),
            "attacks": [asdict(attack) for attack in self.attacks],
            "checks": [asdict(check) | {"numbers": dict(check.numbers)} for check in self.checks],
            "likelihood_ratio": None if self.likelihood is None else self.likelihood.to_dict(),
            "notes": list(self.notes),
            "runs": self.runs,
            "seconds": self.seconds,
        }


__all__ = ["Attack", "LikelihoodRatio", "LoopFindings", "StepMovement"]
