"""The findings of an audit, and its verdict in one sentence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ..privacy.accounting.shown import shown_exactly, shown_lower_bound
from .claims import ApproximateDP, Claim, NoClaim

LAYERS = ("covariance", "canary", "likelihood", "bits", "sensitivity", "plan")
ROUNDING = 1e-9
"""Relative error of an epsilon that was found by bisection."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """A yes-or-no question and its answer.

    Attributes:
        layer: one of ``LAYERS``.
        name: the question's name.
        passed: the answer. None means that the question could not be asked; ``text`` says why.
        text: the observation in words.
        numbers: measured values by name.
    """

    layer: str
    name: str
    passed: bool | None
    text: str
    numbers: Mapping[str, float | int | str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """One test on fresh runs: "present" is said where the score exceeds the threshold.

    Attributes:
        pair: name of the neighbours.
        layer: layer of the score.
        score: name of the score.
        runs: counted of each side.
        false_positives, false_negatives: counts.
        fpr_upper, fnr_upper: upper bounds of the rates; all those of an audit hold together with
            the audit's confidence.
        mu_lower: ``Phi^-1(1 - fpr_upper) - Phi^-1(fnr_upper)``, at least 0.
        epsilon_lower: lower bound of epsilon at the audit's delta, at least 0.
    """

    pair: str
    layer: str
    score: str
    runs: int
    false_positives: int
    false_negatives: int
    fpr_upper: float
    fnr_upper: float
    mu_lower: float
    epsilon_lower: float

    def contradicts(self, claim: Claim) -> bool:
        """Whether no release that keeps the claim has a test this good."""
        return self.fnr_upper < claim.tradeoff(self.fpr_upper)

    def shows(self, claim: Claim, delta: float) -> Claim:
        """Return the largest claim of the family of ``claim`` that this test leaves standing.

        Beside an empty claim it is an (epsilon, delta) at this ``delta``.
        """
        found = claim.refuted_below(self.fpr_upper, self.fnr_upper)
        return ApproximateDP(self.epsilon_lower, delta) if found is None else found

    def shown_text(self, claim: Claim, delta: float) -> str:
        """Return ``shows`` in words, with the epsilon of a Gaussian claim."""
        shown = self.shows(claim, delta)
        epsilon = lower_epsilon(shown, delta)
        if shown.mu is None or epsilon is None:
            return shown.lower_text
        at = f"epsilon {shown_lower_bound(epsilon)} at delta {shown_exactly(delta)}"
        return f"{shown.lower_text} ({at})"


@dataclass(frozen=True, kw_only=True)
class Findings:
    """The result of an audit.

    Attributes:
        subject: its name.
        claimed, certified: the two claims that were tested.
        delta: delta of ``epsilon_lower``.
        confidence: probability that all statistical statements hold together.
        runs: fresh runs counted of each side of each pair.
        total_runs: all of them, also those that were learnt from.
        seconds: wall time.
        evidence: the tests.
        checks: the questions.
        spectrum: eigenvalues of the noise's covariance, in units of the certified variance where
            there is one, ascending; empty if it was not examined.
        settings: workers, seed and the like.
    """

    subject: str
    claimed: Claim
    certified: Claim
    delta: float
    confidence: float
    runs: int
    total_runs: int
    seconds: float
    evidence: tuple[Evidence, ...]
    checks: tuple[Check, ...]
    spectrum: tuple[float, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def mu_lower(self) -> float:
        """The largest lower bound on mu of any test: the number of a Gaussian mechanism."""
        return max((found.mu_lower for found in self.evidence), default=0.0)

    @property
    def epsilon_lower(self) -> float:
        """The largest lower bound on epsilon at ``delta`` of any test, whatever was claimed.

        It follows from counts alone. The epsilon of a Gaussian claim comes from mu: ``strongest``.
        """
        return max((found.epsilon_lower for found in self.evidence), default=0.0)

    def against(self, claim: Claim) -> tuple[Evidence, ...]:
        """Return the tests that contradict a claim."""
        return tuple(found for found in self.evidence if found.contradicts(claim))

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if check.passed is False)

    @property
    def contradicts_claim(self) -> bool:
        """Whether a test contradicts what is claimed."""
        return bool(self.against(self.claimed))

    @property
    def contradicts_certificate(self) -> bool:
        """Whether a test contradicts what is certified: an error of the proof or of the program."""
        return bool(self.against(self.certified))

    @property
    def passed(self) -> bool:
        """Whether nothing speaks against the claim, the certificate or the program."""
        return not (self.failed or self.contradicts_claim or self.contradicts_certificate)

    def strongest(self, claim: Claim) -> Evidence | None:
        """Return the test that shows most against a claim; None without tests."""

        def strength(found: Evidence) -> tuple[float, float]:
            return found.shows(claim, self.delta).number, found.epsilon_lower

        return max(self.evidence, key=strength, default=None)

    @property
    def sentence(self) -> str:
        """The verdict in one sentence."""
        sure = f"with confidence {self.confidence:g}"
        whose = "certificate" if self.contradicts_certificate else "claim"
        promise = self.certified if self.contradicts_certificate else self._tested
        best = self.strongest(promise)
        if self.contradicts_claim or self.contradicts_certificate:
            assert best is not None
            text = f"The {whose} of {self.subject} is contradicted {sure}"
            text += (
                f": {self.claimed.text} is claimed, {self.certified.text} certified, and at least "
                f"{best.shown_text(promise, self.delta)} is shown by canary {best.pair!r}"
            )
        elif self.failed:
            text = f"{self.subject} fails: " + "; ".join(
                f"{check.name}: {check.text}" for check in self.failed
            )
            return text if text.endswith(".") else text + "."
        else:
            text = f"Nothing contradicts {promise.text} of {self.subject} {sure}"
            if isinstance(promise, NoClaim):
                text = f"Nothing is claimed of {self.subject}"
            if best is not None:
                text += f": at least {best.shown_text(promise, self.delta)} is shown"
        if self.failed:
            text += "; failed besides: " + ", ".join(check.name for check in self.failed)
        return text + "."

    @property
    def _tested(self) -> Claim:
        """The claim that is tested first: the subject's own, or if it has none the certificate."""
        return self.certified if isinstance(self.claimed, NoClaim) else self.claimed

    def _beside(self, claim: Claim) -> dict[str, Any] | None:
        """Return the strongest test against a claim and what it shows; None without tests."""
        best = self.strongest(claim)
        if best is None:
            return None
        shown = best.shows(claim, self.delta)
        return {
            "contradicts": best.contradicts(claim),
            "pair": best.pair,
            "layer": best.layer,
            "fpr_upper": best.fpr_upper,
            "fnr_upper": best.fnr_upper,
            "text": shown.lower_text,
            "mu": shown.mu,
            "epsilon": lower_epsilon(shown, self.delta),
        }

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON; ``base.json.plain`` spells infinities."""
        return {
            "subject": self.subject,
            "verdict": self.sentence,
            "passed": self.passed,
            "contradicts_claim": self.contradicts_claim,
            "contradicts_certificate": self.contradicts_certificate,
            "claimed": described(self.claimed, self.delta),
            "certified": described(self.certified, self.delta),
            "audited": {"mu_lower": self.mu_lower, "epsilon_lower": self.epsilon_lower},
            "against_claimed": self._beside(self.claimed),
            "against_certified": self._beside(self.certified),
            "delta": self.delta,
            "confidence": self.confidence,
            "runs": self.runs,
            "total_runs": self.total_runs,
            "seconds": self.seconds,
            "evidence": [asdict(found) for found in self.evidence],
            "checks": [asdict(check) | {"numbers": dict(check.numbers)} for check in self.checks],
            "spectrum": list(self.spectrum),
            "settings": dict(self.settings),
        }


def described(claim: Claim, delta: float) -> dict[str, Any]:
    """Return a claim as plain values."""
    return {"text": claim.text, "mu": claim.mu, "epsilon": claim.epsilon(delta)}


def lower_epsilon(shown: Claim, delta: float) -> float | None:
    """Return the epsilon at ``delta`` that a test has shown; None if it shows none.

    It is converted by the claim's own ``epsilon``, less the error of its bisection.
    """
    epsilon = shown.epsilon(delta)
    return epsilon * (1 - ROUNDING) if math.isfinite(epsilon) else None
