"""Audit a release: learn a test on some runs, count on fresh ones, compare with the claim.

For each neighbour pair one part of the runs gives scores (``scores.learnt``), a second one
thresholds, and fresh runs are counted. Two tests of every pair are counted: the one that predicts
the largest lower bound on mu, and the one for epsilon. Clopper-Pearson bounds of all rates hold
together (Bonferroni): alpha = (1 - confidence) / number of bounds.

Source: the split of a learnt test from its evaluation is that of Jagielski et al., Auditing
differentially private machine learning, 2020, section 4, and of Nasr et al. 2023, section 4.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from ..base import validate as check
from .bits import LAYER as BITS
from .bits import Precision, precision_pairs
from .bounds import Rates, epsilon_lower, mu_lower, rate_upper
from .claims import Claim
from .covariance import Moments, Vector, selection, spectrum
from .findings import LAYERS, Check, Evidence, Findings
from .running import Runner, runner
from .scores import NotFinite, learnt
from .subject import Pair, Score, Subject

Progress = Callable[[str, float], None]
"""A callback that takes a stage's description and the share of the audit that is done."""

LEARNING = 0.2
"""Runs that scores are learnt from, and as many for thresholds, per counted run."""
LEAST_LEARNING, MOST_LEARNING = 500, 40_000
PER_COORDINATE = 4
"""Minimum of runs per coordinate of a covariance."""
THRESHOLDS = 256
DOUBT = 0.01
"""Chance that a rate exceeds the value assumed where a threshold is chosen."""
STATISTICAL = ("covariance", "canary", "likelihood", BITS)
"""Layers that need many runs."""
OWN = ("bits", "sensitivity", "plan")
"""Layers with checks that the subject itself provides."""


@dataclass(frozen=True)
class Test:
    """A score and the threshold from which on it says "present"."""

    score: Score
    threshold: float


def run(
    subject: Subject,
    *,
    runs: int | None = None,
    confidence: float = 0.999,
    delta: float = 1e-5,
    workers: int = 1,
    seed: int | None = None,
    quick: bool = False,
    claim: Claim | None = None,
    layers: Collection[str] = LAYERS,
    progress: Progress | None = None,
) -> Findings:
    """Audit a subject.

    Args:
        subject: subject to audit.
        runs: counted runs on each side of each pair; about two fifths as many more are learnt from.
            None selects the subject's usual number.
        confidence: probability that all statistical statements of the audit hold together.
        delta: delta of the lower bound on epsilon.
        workers: processes; with more than one the subject must be picklable.
        seed: seed of the runs that draw seeded noise.
        quick: leave out the subject's slow checks.
        claim: tested instead of the subject's own.
        layers: names of the layers to run.
        progress: told what is being done.

    Raises:
        InvalidInput: numbers out of their range, or an unknown layer.
    """
    runs = subject.usual_runs if runs is None else check.integer(100, runs=runs)
    check.integer(1, workers=workers)
    check.open_unit(confidence=confidence)
    check.open_unit(delta=delta)
    for layer in layers:
        check.choice(LAYERS, layer=layer)
    seed = secrets.randbits(63) if seed is None else check.integer(0, seed=seed)
    tell = progress or (lambda stage, share: None)
    began = time.perf_counter()
    with runner(subject, seed=seed, workers=workers) as running:
        evidence, checks, values = _statistics(
            subject, running, runs, 1 - confidence, delta, layers, tell
        )
        total = running.runs
    tell("checks", 0.95)
    if set(layers) & set(OWN):
        checks += [found for found in subject.checks(quick=quick) if found.layer in layers]
    tell("done", 1.0)
    return Findings(
        subject=subject.name,
        claimed=subject.claimed if claim is None else claim,
        certified=subject.certified,
        delta=delta,
        confidence=confidence,
        runs=runs,
        total_runs=total,
        seconds=time.perf_counter() - began,
        evidence=tuple(evidence),
        checks=tuple(checks),
        spectrum=values,
        settings={
            "workers": workers,
            "seed": seed,
            "layers": list(layers),
            "spectrum_in_certified_variances": subject.noise_sd() is not None,
        },
    )


def _statistics(
    subject: Subject,
    running: Runner,
    runs: int,
    alpha: float,
    delta: float,
    layers: Collection[str],
    tell: Progress,
) -> tuple[list[Evidence], list[Check], tuple[float, ...]]:
    """Run the layers that need many runs; every bound gets an equal share of ``alpha``."""
    if not set(layers) & set(STATISTICAL):
        return [], [], ()
    if not subject.pairs(None):
        return [], [], ()
    tell("covariance of the noise", 0.0)
    width = running.first(subject.null(), 2).shape[1]
    learning = min(max(int(LEARNING * runs), LEAST_LEARNING), MOST_LEARNING)
    found = running.moments(subject.null(), max(learning, PER_COORDINATE * min(width, 512)))
    seen = spectrum(found, _scale(subject, width), width, alpha / 2)
    pairs = _pairs(subject, seen.weakest, layers)
    evidence: list[Evidence] = []
    for k, pair in enumerate(pairs):
        tell(f"canary {pair.name}", 0.1 + 0.85 * k / len(pairs))
        # Half for the covariance's check; two tests of two rates for each pair.
        share = alpha / 2 / (4 * len(pairs))
        tests = _chosen(running, pair, width, learning, runs, share, delta)
        evidence += _counted(running, pair, tests, runs, share, delta)
    judged = [seen.check] if "covariance" in layers else []
    return evidence, judged, seen.values


def _pairs(subject: Subject, weakest: torch.Tensor | None, layers: Collection[str]) -> list[Pair]:
    """Return the subject's neighbour pairs, and the first again for the bits of released values."""
    found = list(subject.pairs(weakest))
    first = found[0]
    found += precision_pairs(first.without, first.present)
    return [pair for pair in found if pair.layer in layers]


def _scale(subject: Subject, width: int) -> Vector | None:
    """Return the certified standard deviations of the examined coordinates."""
    sd = subject.noise_sd()
    if sd is None:
        return None
    every = torch.as_tensor(sd, dtype=torch.float64).expand(width)
    return every[selection(width)].numpy()


def _chosen(
    running: Runner,
    pair: Pair,
    width: int,
    learning: int,
    runs: int,
    alpha: float,
    delta: float,
) -> list[Test]:
    """Choose the two tests that will be counted."""
    scores: list[Score] = [] if pair.score is None else [pair.score]
    moments = [running.moments(data, learning) for data in (pair.without, pair.present)]
    if pair.layer == BITS:
        scores.append(Precision((_most_moved(moments[0], moments[1], width),)))
    else:
        scores += [*learnt(moments[0], moments[1]), NotFinite()]
    sides = [running.scores(data, scores, learning) for data in (pair.without, pair.present)]
    tests: list[Test] = []
    for bound in (mu_lower, partial(epsilon_lower, delta=delta)):
        best = max(
            (
                (*_best_threshold(a, b, runs, alpha, bound), score)
                for score, a, b in zip(scores, *sides, strict=True)
            ),
            key=lambda found: found[0],
        )
        tests.append(Test(best[2], best[1]))
    return tests


def _most_moved(without: Moments, present: Moments, width: int) -> int:
    """Return the coordinate on which the two samples differ most, in units of its noise."""
    spread = np.diagonal(without.scatter + present.scatter)
    gap = np.square(present.mean - without.mean)
    ratio = gap / (spread + np.finfo(np.float64).tiny)
    return int(np.arange(width)[selection(width)][np.argmax(ratio)])


def _best_threshold(
    without: Rates,
    present: Rates,
    runs: int,
    alpha: float,
    bound: Callable[[float, float], float],
) -> tuple[float, float]:
    """Return ``(predicted bound, threshold)``: what so many fresh runs at these rates show."""
    steps = np.unique(
        np.quantile(np.concatenate([without, present]), np.linspace(0, 1, THRESHOLDS))
    )
    limits = (steps[1:] + steps[:-1]) / 2 if len(steps) > 1 else steps
    positives = 1 - np.searchsorted(np.sort(without), limits, side="right") / len(without)
    negatives = np.searchsorted(np.sort(present), limits, side="right") / len(present)
    uppers = [
        # A threshold is not chosen for its luck: the rates may be as large as the few runs allow.
        rate_upper(rate_upper(rates * len(without), len(without), DOUBT) * runs, runs, alpha)
        for rates in (positives, negatives)
    ]
    promised = [bound(float(a), float(b)) for a, b in zip(*uppers, strict=True)]
    best = int(np.argmax(promised))
    return promised[best], float(limits[best])


def _counted(
    running: Runner, pair: Pair, tests: Sequence[Test], runs: int, alpha: float, delta: float
) -> list[Evidence]:
    asked: list[tuple[Any, float]] = [(test.score, test.threshold) for test in tests]
    positives = running.exceeding(pair.without, asked, runs)
    negatives = [runs - count for count in running.exceeding(pair.present, asked, runs)]
    evidence = []
    for test, false_positives, false_negatives in zip(tests, positives, negatives, strict=True):
        a, b = (float(rate_upper(k, runs, alpha)) for k in (false_positives, false_negatives))
        evidence.append(
            Evidence(
                pair=pair.name,
                layer=pair.layer,
                score=getattr(test.score, "name", type(test.score).__name__),
                runs=runs,
                false_positives=false_positives,
                false_negatives=false_negatives,
                fpr_upper=a,
                fnr_upper=b,
                mu_lower=mu_lower(a, b),
                epsilon_lower=epsilon_lower(a, b, delta),
            )
        )
    return evidence
