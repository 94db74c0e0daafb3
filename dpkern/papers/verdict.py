"""Judge a printed claim by our numbers: it holds, it fails, or it cannot be decided here."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .intervals import Interval

HOLDS, FAILS, UNDECIDED = "holds", "fails", "not decidable here"
LEAST_RUNS = 5
"""Fewer runs than these decide nothing."""


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
        numbers = ""
        if self.ours is not None:
            numbers = f"; ours {self.ours:.4g}"
            if self.low != self.high:
                numbers += f" in [{self.low:.4g}, {self.high:.4g}]"
            numbers += f" {self.unit}" if self.unit else ""
        because = f": {self.reason}" if self.reason else ""
        return f"{self.verdict.upper()}: {self.claim}{numbers}{because}"


def of_number(
    claim: str,
    published: float,
    found: Interval,
    runs: int,
    *,
    unit: str,
    rounding: float = 0.0,
    reason: str = "",
) -> Verdict:
    """Judge a printed number by the interval of our mean.

    Args:
        claim: the claim in words.
        published: the printed number.
        found: our mean and half its 95 % interval.
        runs: number of runs behind it.
        unit: unit and aggregation of both.
        rounding: half the last digit that the source prints.
        reason: what explains the verdict.
    """
    low, high = found.mean - found.half, found.mean + found.half
    if runs < LEAST_RUNS or not math.isfinite(found.half):
        verdict, reason = UNDECIDED, f"{runs} runs are too few, {LEAST_RUNS} are needed"
    else:
        inside = low - rounding <= published <= high + rounding
        verdict = HOLDS if inside else FAILS
    return Verdict(
        claim=claim,
        verdict=verdict,
        unit=unit,
        published=published,
        ours=found.mean,
        low=low,
        high=high,
        reason=reason,
    )


__all__ = ["FAILS", "HOLDS", "LEAST_RUNS", "UNDECIDED", "Verdict", "of_number"]
