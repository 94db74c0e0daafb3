"""Verdicts on what AdLM prints: accuracies, gains over other methods, its epsilon, its lemmas.

Source: AdLM, figures 3 to 5, lemmas 1 to 7, theorem 1.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...privacy.accounting import shown_bound
from ..intervals import interval
from ..result import ComparisonRow
from ..verdict import Verdict, exact, of_epsilon, of_number, spoiled
from . import loss as adlm_loss
from .published import GAINS, MEANS, PLAIN, PRINTED, PSGD
from .setup import AdlmExperiment

Numbers = Mapping[tuple[str, float], Mapping[str, Any]]
PRINTED_METHODS = ("AdLM", "ILM", PSGD)
DIFFERENCE = "points held out, mean over the seeds and epsilon"


@dataclass(frozen=True, kw_only=True)
class JudgedFigure:
    """The runs of a figure: by method and epsilon, with the epsilons that means are over.

    ``departure`` says which sizes of the request are not the source's.
    """

    experiment: AdlmExperiment
    same_data: bool
    data: str
    epochs: int
    departure: str
    numbers: Numbers
    epsilons: Sequence[float]
    averaged: Sequence[float]

    def last(self, method: str, epsilon: float) -> list[float]:
        """Return accuracies after the last epoch, by seed."""
        return [run[-1] for run in self.numbers[method, epsilon]["accuracy"]]

    def means(self, method: str) -> list[float]:
        """Return each seed's mean over the averaged epsilons."""
        each = [self.last(method, epsilon) for epsilon in self.averaged]
        return [statistics.fmean(one) for one in zip(*each, strict=True)]

    def hindrance(self, *methods: str) -> str:
        """Return why runs of these methods decide nothing; empty where they do."""
        if not self.same_data:
            return f"measured on {self.data}, not on all of {self.experiment.name}"
        if self.departure:
            return self.departure
        if self.epochs < self.experiment.source_epochs:
            return f"{self.epochs} epochs, {self.experiment.source_epochs} in the source"
        control = statistics.fmean(self.last(PLAIN, float("inf")))
        if control < self.experiment.control:
            return (
                f"the control without noise has {control:.1f} %, less than the "
                f"{self.experiment.control:g} % that are possible"
            )
        for (method, _), of_it in self.numbers.items():
            if method in methods and hindered(of_it):
                return f"{method}: {hindered(of_it)}"
        return ""


def hindered(numbers: Mapping[str, Any]) -> str:
    """Return why a setting's runs tell nothing of its method; empty where they do."""
    return spoiled(numbers["diverged"], numbers["collapsed"], len(numbers["accuracy"]))


def of_figure(figure: JudgedFigure) -> list[Verdict]:
    """Judge the printed accuracies and gains, and what each method claims."""
    return [*_claims(figure), *_gains(figure), *_accuracies(figure)]


def _claims(figure: JudgedFigure) -> list[Verdict]:
    reasons = {
        "AdLM": "A2: relevances come from a network that was trained on the same records without "
        "noise; A1: noise is divided by |L| although a record is read by itself",
        "ILM": "A1: noise is divided by |L| although a record is read by itself",
        "AdLM, one draw shared by all": "A1: differences of records are released exactly",
    }
    # A network that was trained on the records: no pair is known that spends more.
    return [
        of_epsilon(
            f"{figure.experiment.name}, {method}: a record spends epsilon {shown_bound(epsilon)}",
            float(of_it["claimed"]),
            float(of_it["certified"]),
            reasons.get(method, ""),
            attained=method != "AdLM",
        )
        for (method, epsilon), of_it in figure.numbers.items()
        if epsilon == figure.epsilons[0]
    ]


def _gains(figure: JudgedFigure) -> list[Verdict]:
    name = figure.experiment.name
    over = "mean over epsilon " + ", ".join(map(shown_bound, figure.averaged))
    verdicts = []
    for other, (gain, level) in GAINS[name].items():
        pairs = zip(figure.means("AdLM"), figure.means(other), strict=True)
        gained = [ours - theirs for ours, theirs in pairs]
        verdicts.append(
            of_number(
                f"{name}: AdLM is {gain:g} points more accurate than {other} ({over}; {level})",
                gain,
                interval(gained),
                len(gained),
                unit=DIFFERENCE,
                rounding=0.5 if gain.is_integer() else 0.05,
                hindrance=figure.hindrance("AdLM", other),
            )
        )
    for method, printed in MEANS[name].items():
        values = figure.means(method)
        verdicts.append(
            of_number(
                f"{name}, {method}: {printed:g} % ({over})",
                printed,
                interval(values),
                len(values),
                unit="% held out, mean over the runs and epsilon",
                rounding=0.005,
                hindrance=figure.hindrance(method),
            )
        )
    return verdicts


def _accuracies(figure: JudgedFigure) -> list[Verdict]:
    name = figure.experiment.name
    return [
        of_number(
            f"{name}, {method}, epsilon {shown_bound(epsilon)}: {printed:g} %",
            printed,
            interval(figure.last(method, epsilon)),
            len(figure.last(method, epsilon)),
            unit="% held out, mean over the runs",
            rounding=0.005,
            hindrance=figure.hindrance(method),
        )
        for (which, method, epsilon), printed in PRINTED.items()
        if which == name and (method, epsilon) in figure.numbers
    ]


def of_readings(numbers: Numbers, epsilon: float) -> list[Verdict]:
    """Judge every reading's epsilon: of what a record pays, relevances apart."""
    verdicts = []
    for (method, of_it), found in numbers.items():
        if method == PLAIN:
            continue
        shared = "all records" in method
        verdicts.append(
            of_epsilon(
                f"{method}: a record spends epsilon {shown_bound(epsilon)}",
                of_it,
                float(found["certified"]),
                "A1: differences of records are released exactly"
                if shared
                else "A1: |L| divides the noise although a record is read by itself",
            )
        )
    return verdicts


def of_sensitivity(rows: Sequence[ComparisonRow]) -> list[Verdict]:
    """Judge what a record pays for inputs, labels and relevances, by reading."""
    verdicts = []
    for row in rows:
        if row.epsilon_claimed is None or row.setting.endswith("unit_l2"):
            continue
        verdicts.append(
            of_epsilon(
                f"{row.setting} ({row.quantity}): a record spends epsilon "
                f"{shown_bound(row.epsilon_claimed)}",
                row.epsilon_claimed,
                row.epsilon_certified or 0.0,
                row.note,
                attained=not row.note.startswith("A2"),
            )
        )
    return verdicts


def of_lemma() -> list[Verdict]:
    """Judge the bound on the error of the polynomial loss."""
    inside, outside = (-adlm_loss.remainder(s) for s in (1.0, 5.0))
    return [
        exact(
            "the error of a class is at most 0.3147 where |s| <= 1",
            inside <= adlm_loss.LEMMA_7,
            unit="largest error",
            published=adlm_loss.LEMMA_7,
            ours=inside,
            reason="by slack: 1/192 is enough; the third derivative is not the function's (A4)",
        ),
        exact(
            "the error of a class is at most 0.3147 for the scores that occur",
            outside <= adlm_loss.LEMMA_7,
            unit="error at |s| = 5",
            published=adlm_loss.LEMMA_7,
            ours=outside,
            reason="|s| <= 1 is assumed of a sum over 25 hidden units, which reaches 25",
        ),
    ]


def of_relevance(kept: Sequence[float]) -> list[Verdict]:
    """Judge conservation (9): relevances of the inputs sum to the score."""
    worst = max(kept, key=lambda share: abs(share - 1))
    return [
        exact(
            "the relevances of the inputs sum to the score",
            abs(worst - 1) < 0.05,
            unit="sum of the inputs' relevances over the score, the farthest record",
            published=1.0,
            ours=worst,
            reason="exact without biases and without mu only",
        )
    ]


def of_noisy_relevance(rows: Sequence[ComparisonRow], public: float) -> list[Verdict]:
    """Judge the epsilon of the relevances, with a public network and with the printed one."""
    claimed = rows[0].epsilon_claimed or 0.0
    return [
        of_epsilon(
            f"D_R as printed spends epsilon1 {shown_bound(claimed)}, with a public network",
            claimed,
            public,
        ),
        of_epsilon(
            f"D_R as printed spends epsilon1 {shown_bound(claimed)}, with the printed network",
            claimed,
            rows[0].epsilon_certified or 0.0,
            "A2: the network was trained on the same records without noise",
            attained=False,
        ),
    ]


__all__ = [
    "JudgedFigure",
    "hindered",
    "of_figure",
    "of_lemma",
    "of_noisy_relevance",
    "of_readings",
    "of_relevance",
    "of_sensitivity",
]
