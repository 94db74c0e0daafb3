"""Verdicts on SPOF's figures 2 and 3 and its tables of gains, under our reading of its protocol.

Source: SPOF, section VII.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from ...privacy.accounting import shown_bound
from ..intervals import Interval, interval
from ..verdict import Verdict, of_epsilon, of_number, of_order, spoiled, undecided
from .items import CLIP, SOURCE_ROWS
from .setting import (
    BASELINE,
    CORRECTED,
    FUNCTIONAL,
    OURS,
    Cell,
    Found,
    SpofExperiment,
    condition,
)

GAINS = (2.90, 3.52)
"""Printed gains of SPOF over DP-SGD, per cent of the mean over epsilon: noiseless, noisy."""

Trained = Mapping[Cell, Found]


def hindrance(where: SpofExperiment, found: Trained, sigma: float, *names: str) -> str:
    """Return why our runs of these methods decide nothing; empty where they do."""
    for name in names:
        own = _own(found, name, sigma)
        stopped, collapsed, runs = (
            sum(values)
            for values in zip(
                *((one.diverged, one.collapsed, len(one.accuracy)) for one in own), strict=True
            )
        )
        wrong = spoiled(stopped, collapsed, runs)
        if wrong:
            return f"{name}: {wrong}"
    if not where.of_the_source:
        return (
            f"measured on {where.data}; the authors' protocol is `dpkern reproduce spof released`"
        )
    if where.rows < SOURCE_ROWS:
        return f"{where.rows} records of each user, {SOURCE_ROWS} in the source"
    return f"clip {where.clip:g} instead of {CLIP:g}" if where.clip != CLIP else ""


def _own(found: Trained, name: str, sigma: float) -> list[Found]:
    """Return a method's cells at the usual constant and rate, one for each epsilon."""
    return [
        one
        for cell, one in found.items()
        if cell == Cell(name=name, epsilon=cell.epsilon, sigma=sigma)
    ]


def _means(found: Trained, name: str, sigma: float) -> list[float]:
    """Return each run's mean accuracy over epsilon."""
    own = [one.accuracy for one in _own(found, name, sigma)]
    return [statistics.fmean(values) for values in zip(*own, strict=True)]


def relative_gain(found: Trained, first: str, second: str, sigma: float) -> Interval:
    """Return the gain in per cent of the second's mean over epsilon, run by run."""
    means = []
    for name in (first, second):
        means.append(_means(found, name, sigma))
    return interval([100 * (a / b - 1) for a, b in zip(*means, strict=True)])


def of_gains(where: SpofExperiment, found: Trained) -> list[Verdict]:
    """Judge the printed gains, in their own unit."""
    return [
        of_number(
            f"SPOF is {printed:g} % more accurate than DP-SGD ({condition(sigma)})",
            printed,
            relative_gain(found, OURS, BASELINE, sigma),
            where.runs,
            unit="% of DP-SGD's mean over epsilon",
            rounding=0.005,
            hindrance=hindrance(where, found, sigma, OURS, BASELINE),
        )
        for sigma, printed in zip(where.sigmas, GAINS, strict=True)
    ]


def of_orders(where: SpofExperiment, found: Trained) -> list[Verdict]:
    """Judge what the text says of the methods' order, at every run's mean over epsilon."""
    noisy = where.sensor_noise
    claims = (
        ("FM is less accurate than SPOF (noiseless)", (OURS, 0.0), (FUNCTIONAL, 0.0)),
        ("FM is less accurate than DP-SGD (noiseless)", (BASELINE, 0.0), (FUNCTIONAL, 0.0)),
        ("FM gains from noise of the environment", (FUNCTIONAL, noisy), (FUNCTIONAL, 0.0)),
        ("DP-SGD loses by noise of the environment", (BASELINE, 0.0), (BASELINE, noisy)),
    )
    verdicts = []
    for claim, better, worse in claims:
        wrong = [hindrance(where, found, sigma, name) for name, sigma in (better, worse)]
        verdicts.append(
            of_order(
                claim,
                _means(found, *better),
                _means(found, *worse),
                unit="points, mean over the runs and epsilon",
                hindrance=next(filter(None, wrong), ""),
            )
        )
    for sigma in where.sigmas:
        pair = OURS + CORRECTED, BASELINE + CORRECTED
        verdicts.append(
            of_order(
                f"corrected SPOF is more accurate than corrected DP-SGD ({condition(sigma)}), "
                "equal certified epsilon",
                *(_means(found, name, sigma) for name in pair),
                unit="points, mean over the runs and epsilon",
                hindrance=hindrance(where, found, sigma, *pair)
                or (
                    f"nothing is certified: {where.records.unproved}" * bool(where.records.unproved)
                ),
            )
        )
    return verdicts


def of_claims(where: SpofExperiment, found: Trained) -> list[Verdict]:
    """Judge the claimed epsilon of every method at epsilon 1, or at the first of others."""
    judged = 1.0 if 1.0 in where.epsilons else where.epsilons[0]
    verdicts = []
    for cell, one in found.items():
        if cell.epsilon != judged or cell.sigma or one.claimed is None or one.certified is None:
            continue
        verdicts.append(
            of_epsilon(
                f"{cell.name}: a record spends epsilon {shown_bound(one.claimed)}",
                one.claimed,
                one.certified,
                where.records.unproved
                if CORRECTED in cell.name
                else "S6, S7: codes and inputs have no noise",
                # The lattice's rounding of a scale.
                rounding=1e-4 * one.claimed,
            )
        )
    return verdicts


def of_plateau(
    where: SpofExperiment, found: Trained, begins: Sequence[tuple[Cell, float | str]]
) -> list[Verdict]:
    """Judge that accuracy over the constant is flat near 2.5."""
    del found
    wrong = "" if where.of_the_source else f"measured on {where.data}"
    verdicts = []
    for cell, place in begins:
        if cell.name != OURS:
            continue
        reason = wrong or "epsilon and the flatness that is meant are not printed (S13)"
        shown = place if isinstance(place, str) else f"from c {place:g} on"
        verdicts.append(
            undecided(
                f"accuracy over the constant is flat near 2.5 (epsilon "
                f"{shown_bound(cell.epsilon)}, {condition(cell.sigma)})",
                f"ours: {shown}; {reason}",
            )
        )
    return verdicts


def of_rates() -> list[Verdict]:
    """Return what the learning rate leaves open."""
    return [
        undecided(
            "the printed accuracies belong to some learning rate",
            "S13: it is not printed, and accuracies move with it by more than the printed gains",
        )
    ]


__all__ = [
    "GAINS",
    "hindrance",
    "of_claims",
    "of_gains",
    "of_orders",
    "of_plateau",
    "of_rates",
    "relative_gain",
]
