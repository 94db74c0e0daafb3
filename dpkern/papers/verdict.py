"""Judge a printed claim by our numbers: it holds, it fails, or it cannot be decided here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..privacy.accounting import shown_bound
from .intervals import Interval, interval

HOLDS, FAILS, UNDECIDED = "holds", "fails", "not decidable here"
CERTIFIED = "certified epsilon"
"""Unit of verdicts on an epsilon."""
LEAST_RUNS = 5
"""Fewer runs than these decide nothing."""
TOO_QUICK = "quick runs decide no accuracy"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A claim that a source prints, and what our numbers say of it.

    Attributes:
        claim: the claim in words.
        verdict: ``holds``, ``fails`` or ``not decidable here``.
        unit: unit of ``published`` and ``ours``, with their aggregation.
        published: the printed number; None where the claim has none.
        ours: our number, the mean of the interval.
        low, high: our 95 % interval; equal to ``ours`` where nothing is random.
        reason: why it is so, or what is missing.
    """

    claim: str
    verdict: str
    unit: str = ""
    published: float | None = None
    ours: float | None = None
    low: float | None = None
    high: float | None = None
    reason: str = ""

    @property
    def sentence(self) -> str:
        """The verdict as a line of text."""
        numbers = f"; ours {self.number}" if self.ours is not None else ""
        because = f": {self.reason}" if self.reason else ""
        return f"{self.verdict.upper()}: {self.claim}{numbers}{because}"

    @property
    def number(self) -> str:
        """Our number with its interval and unit; empty where there is none."""
        if self.ours is None:
            return ""
        text = f"{self.ours:.4g}"
        if self.low is not None and self.high is not None and self.low != self.high:
            known = math.isfinite(self.high - self.low)
            text += f" in [{self.low:.4g}, {self.high:.4g}]" if known else " (one run)"
        return f"{text} {self.unit}" if self.unit else text


def of_number(
    claim: str,
    published: float,
    found: Interval,
    runs: int,
    *,
    unit: str,
    rounding: float = 0.0,
    at_least: bool = False,
    reason: str = "",
    hindrance: str = "",
) -> Verdict:
    """Judge a printed number by the interval of our mean.

    Args:
        claim: the claim in words.
        published: the printed number.
        found: our mean and half its 95 % interval.
        runs: number of runs behind it.
        unit: unit and aggregation of both.
        rounding: half the last digit that the source prints.
        at_least: whether the claim is that the number is reached, so that a larger one holds too.
        reason: what explains the verdict.
        hindrance: why our runs cannot decide, such as other data; empty where they can.
    """
    low, high = found.mean - found.half, found.mean + found.half
    missing = hindrance or _too_few(runs, found)
    above = low - rounding > published
    inside = not above and published <= high + rounding
    said = (
        "the interval is above the printed number"
        if at_least and above
        else f"the interval {'contains' if inside else 'does not contain'} the printed number"
    )
    return Verdict(
        claim=claim,
        verdict=UNDECIDED if missing else HOLDS if inside or (at_least and above) else FAILS,
        unit=unit,
        published=published,
        ours=found.mean,
        low=low,
        high=high,
        reason=missing or reason or said,
    )


def of_order(
    claim: str,
    better: Sequence[float],
    worse: Sequence[float],
    *,
    unit: str,
    published: float | None = None,
    reason: str = "",
    hindrance: str = "",
) -> Verdict:
    """Judge whether the first numbers are larger, by the interval of their paired differences.

    Args:
        claim: the claim in words.
        better, worse: numbers of the same seeds, in order.
        unit: unit and aggregation of the difference.
        published: the printed difference; None where only the order is printed.
        reason: what explains the verdict.
        hindrance: why our runs cannot decide, such as other data; empty where they can.
    """
    found = interval([a - b for a, b in zip(better, worse, strict=True)])
    low, high = found.mean - found.half, found.mean + found.half
    missing = hindrance or _too_few(len(better), found)
    if not missing and low <= 0 <= high:
        missing = "the interval of the difference contains 0"
    side = f"the interval of the difference is {'above' if low > 0 else 'below'} 0"
    return Verdict(
        claim=claim,
        verdict=UNDECIDED if missing else HOLDS if low > 0 else FAILS,
        unit=unit,
        published=published,
        ours=found.mean,
        low=low,
        high=high,
        reason=missing or reason or side,
    )


def of_epsilon(
    claim: str,
    claimed: float,
    certified: float,
    reason: str = "",
    *,
    rounding: float = 0.0,
    attained: bool = True,
) -> Verdict:
    """Judge a printed epsilon by the certified one, which nothing random enters.

    Where the certificate is larger, the claim fails: our certificates of Gaussian and of pure
    mechanisms are attained by some pair of neighbours, up to the accountant's rounding.

    Args:
        claim: the claim in words.
        claimed: the printed epsilon.
        certified: ours; infinite where nothing can be certified.
        reason: what explains the verdict.
        rounding: half the last digit that the source prints.
        attained: whether some pair of neighbours is known to spend what is certified. Without one
            a larger certificate decides nothing.
    """
    holds = certified <= claimed * (1 + 1e-9) + rounding
    verdict = HOLDS if holds else FAILS if attained else UNDECIDED
    shown = "nothing can be certified" if math.isinf(certified) else ""
    slack = f"by slack: {shown_bound(certified)} is enough" if certified < 0.999 * claimed else ""
    said = [text for text in (slack if holds else shown, reason) if text]
    if not said:
        said = ["the certificate is as large" if holds else "some pair of neighbours spends more"]
    return Verdict(
        claim=claim,
        verdict=verdict,
        unit=CERTIFIED,
        published=claimed,
        ours=certified,
        low=certified,
        high=certified,
        reason="; ".join(said),
    )


def exact(
    claim: str,
    holds: bool,
    *,
    unit: str = "",
    published: float | None = None,
    ours: float | None = None,
    half: float = 0.0,
    reason: str = "",
) -> Verdict:
    """Return the verdict on a formula, or on draws so many that none of it hangs on them.

    Args:
        claim: the claim in words.
        holds: whether it does.
        unit: unit and aggregation of both numbers.
        published: the printed number.
        ours: our number.
        half: half its 95 % interval, where it was simulated.
        reason: what explains the verdict; empty where the numbers do.
    """
    return Verdict(
        claim=claim,
        verdict=HOLDS if holds else FAILS,
        unit=unit,
        published=published,
        ours=ours,
        low=None if ours is None else ours - half,
        high=None if ours is None else ours + half,
        reason=reason or ("simulated here" if half else "computed here"),
    )


def undecided(claim: str, reason: str, *, unit: str = "", ours: float | None = None) -> Verdict:
    """Return the verdict on a claim that nothing here can decide."""
    return Verdict(claim=claim, verdict=UNDECIDED, unit=unit, ours=ours, reason=reason)


def other_numbers(found: Verdict, said: str) -> Verdict:
    """Return the verdict where numbers of the protocol were replaced: of an epsilon it stays."""
    if found.unit == CERTIFIED:
        return found
    return replace(found, verdict=UNDECIDED, reason=said)


def spoiled(stopped: int, collapsed: int, runs: int) -> str:
    """Return why runs decide nothing about a method; empty where most of them learned something.

    Args:
        stopped: number of runs that the guard stopped.
        collapsed: number of runs whose outputs are the same for every record.
        runs: number of runs.
    """
    if 2 * max(stopped, collapsed) <= runs:
        return ""
    return f"{stopped} of {runs} runs were stopped by the guard, {collapsed} collapsed"


def _too_few(runs: int, found: Interval) -> str:
    if runs < LEAST_RUNS:
        return f"{runs} runs are too few, {LEAST_RUNS} are needed"
    return "" if math.isfinite(found.half) else "a run has no number"


__all__ = [
    "FAILS",
    "HOLDS",
    "LEAST_RUNS",
    "TOO_QUICK",
    "UNDECIDED",
    "Verdict",
    "exact",
    "of_epsilon",
    "of_number",
    "of_order",
    "other_numbers",
    "spoiled",
    "undecided",
]
