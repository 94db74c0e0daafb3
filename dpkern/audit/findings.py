"""What an audit found, and its verdict in one sentence."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from .claims import Claim

LAYERS = ("covariance", "canary", "likelihood", "bits", "sensitivity", "plan")


@dataclass(frozen=True, kw_only=True)
class Check:
    """A yes-or-no question.

    Attributes:
        layer: one of ``LAYERS``.
        name: of the question.
        passed: None: it could not be asked, and ``text`` says why.
        text: what was seen.
        numbers: what was measured.
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
        layer: which layer's score.
        score: name of the score.
        runs: counted of each side.
        false_positives, false_negatives: counts.
        fpr_upper, fnr_upper: upper bounds of the rates; all those of an audit hold together with
            the audit's confidence.
        mu_lower: ``Phi^-1(1 - fpr_upper) - Phi^-1(fnr_upper)``, at least 0.
        epsilon_lower: at the audit's delta, at least 0.
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


@dataclass(frozen=True, kw_only=True)
class Findings:
    """The result of an audit.

    Attributes:
        subject: its name.
        claimed, certified: what was tested.
        delta: of ``epsilon_lower``.
        confidence: of all statistical statements together.
        runs: fresh runs counted of each side of each pair.
        total_runs: all of them, also those that were learnt from.
        seconds: wall time.
        evidence: the tests.
        checks: the questions.
        spectrum: eigenvalues of the noise's covariance, in units of the certified variance where
            there is one, ascending; empty if it was not looked at.
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
        """The largest lower bound on mu: the audited number of a Gaussian mechanism."""
        return max((found.mu_lower for found in self.evidence), default=0.0)

    @property
    def epsilon_lower(self) -> float:
        """The largest lower bound on epsilon at ``delta``: the audited number."""
        return max((found.epsilon_lower for found in self.evidence), default=0.0)

    def against(self, claim: Claim) -> tuple[Evidence, ...]:
        """The tests that contradict a claim."""
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

    @property
    def sentence(self) -> str:
        """The verdict."""
        sure = f"with confidence {self.confidence:g}"
        best = _best(self.against(self.claimed)) or _best(self.against(self.certified))
        if best is not None:
            whose = "certificate" if self.contradicts_certificate else "claim"
            text = f"The {whose} of {self.subject} is contradicted {sure}"
            text += (
                f": {self.claimed.text} is claimed, {self.certified.text} certified, and "
                f"{_bound(best, self.delta)} is shown by canary {best.pair!r}"
            )
        elif self.failed:
            text = f"{self.subject} fails: " + "; ".join(
                f"{check.name}: {check.text}" for check in self.failed
            )
            return text if text.endswith(".") else text + "."
        else:
            text = f"Nothing contradicts {self.claimed.text} of {self.subject} {sure}"
            if self.evidence:
                text += f": at least {self._lower} is shown"
        if self.failed:
            text += "; failed besides: " + ", ".join(check.name for check in self.failed)
        return text + "."

    @property
    def _lower(self) -> str:
        return f"mu {self.mu_lower:.4g}, epsilon {self.epsilon_lower:.4g} at delta {self.delta:g}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; ``train.report.plain`` spells infinities."""
        return {
            "subject": self.subject,
            "verdict": self.sentence,
            "passed": self.passed,
            "contradicts_claim": self.contradicts_claim,
            "contradicts_certificate": self.contradicts_certificate,
            "claimed": described(self.claimed, self.delta),
            "certified": described(self.certified, self.delta),
            "audited": {"mu_lower": self.mu_lower, "epsilon_lower": self.epsilon_lower},
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
    """A claim as plain values."""
    return {"text": claim.text, "mu": claim.mu, "epsilon": claim.epsilon(delta)}


def _best(evidence: Sequence[Evidence]) -> Evidence | None:
    return max(evidence, key=lambda found: (found.mu_lower, found.epsilon_lower), default=None)


def _bound(found: Evidence, delta: float) -> str:
    epsilon = f"epsilon {found.epsilon_lower:.4g} at delta {delta:g}"
    return f"mu {found.mu_lower:.4g}, {epsilon}" if math.isfinite(found.mu_lower) else epsilon
