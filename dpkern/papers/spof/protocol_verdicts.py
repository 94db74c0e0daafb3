"""Verdicts on what SPOF's authors print of their own protocol: gains, stability, time.

Source: SPOF, section VII, tables of gains and times.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

from ...base import collapse
from ...privacy.accounting import shown_bound
from ..intervals import Interval, interval
from ..verdict import FAILS, HOLDS, LEAST_RUNS, UNDECIDED, Verdict, of_number
from .protocol_runs import (
    NO_NOISE,
    PRINTED,
    PRINTED_NO_NOISE,
    Protocol,
    ProtocolRuns,
    as_released,
    expansions_differ,
)
from .raw_results import EPSILONS, RawResults
from .released import DPSGD, SPOF, ReleasedMethod

GAINS = {0.0: 2.90, 5.0: 3.52}
TIME_SAVED = 57.2
COLLAPSED = collapse.SAME


def _gain(found: Mapping[ReleasedMethod, ProtocolRuns], sigma: float, runs: int) -> Interval:
    """Return SPOF's relative gain in percent, run by run, over the means of all epsilons."""
    ours, theirs = (found[as_released(name, sigma)] for name in (SPOF, DPSGD))
    gains = []
    for run in range(runs):
        means = []
        for of_it in (ours, theirs):
            values = [of_it.accuracy[e][run] for e in EPSILONS]
            means.append(statistics.fmean([v for v in values if math.isfinite(v)] or [math.nan]))
        gains.append(100 * (means[0] / means[1] - 1))
    return interval([gain for gain in gains if math.isfinite(gain)])


def verdicts(where: Protocol, found: Mapping[ReleasedMethod, ProtocolRuns]) -> list[Verdict]:
    made = []
    for sigma, printed in GAINS.items():
        what = "noisy" if sigma else "noiseless"
        made.append(
            of_number(
                f"SPOF is {printed} % more accurate than DP-SGD ({what})",
                printed,
                _gain(found, sigma, where.runs),
                where.runs,
                unit="% of the mean over epsilon",
                rounding=0.005,
                reason="SPOF's outputs are the same for every record (below), so this compares a "
                "constant with DP-SGD",
                hindrance="" if where.raw else f"measured on {where.data}, not as published",
            )
        )
        if where.raw is not None:
            gain = where.raw.gain(sigma)
            made.append(
                of_number(
                    f"the same from the authors' own runs ({what})",
                    printed,
                    Interval(gain, 0.0),
                    LEAST_RUNS,
                    unit="% of the mean over epsilon",
                    rounding=0.01,
                    reason="by epsilon " + ", ".join(f"{g:+.2f}" for g in where.raw.gains(sigma)),
                )
            )
    made += [_better_everywhere(where, found), _learns(where, found)]
    if where.raw is not None:
        made += [_published(where, where.raw, found), _time(where.raw)]
    return made


def _published(
    where: Protocol, raw: RawResults, found: Mapping[ReleasedMethod, ProtocolRuns]
) -> Verdict:
    """Judge whether the code gives the published means, each within two standard errors."""
    tables = expansions_differ(where)
    outside, count = [], 0
    for (name, sigma), runs in raw.accuracy.items():
        ours = found[as_released(name, sigma)].accuracy
        for epsilon, theirs in runs.items():
            # Without privacy all epsilons are the same runs.
            here = [a for a in ours.get(epsilon, next(iter(ours.values()))) if math.isfinite(a)]
            errors = [statistics.variance(of) / len(of) for of in (here, theirs) if len(of) > 1]
            error = math.sqrt(sum(errors) + tables**2)
            count += 1
            if len(here) < LEAST_RUNS or abs(statistics.fmean(here) - statistics.fmean(theirs)) > (
                2 * error
            ):
                condition = f", sensors' noise {sigma:g}" if sigma else ""
                outside.append(f"{name}{condition}, epsilon {shown_bound(epsilon)}")
    few = where.runs < LEAST_RUNS
    allowed = _by_chance(count)
    return Verdict(
        claim="the released code gives the published accuracies, each within two standard errors",
        verdict=UNDECIDED if few else HOLDS if len(outside) <= allowed else FAILS,
        unit="means within two standard errors",
        published=float(count),
        ours=float(count - len(outside)),
        low=float(count - len(outside)),
        high=float(count - len(outside)),
        reason=(f"{where.runs} runs are too few; " if few else "")
        + f"up to {allowed} may be outside by chance"
        + (f"; outside: {'; '.join(outside)}" if outside else ""),
    )


def _by_chance(count: int) -> int:
    """Return the number of means that lie outside of two standard errors in 19 of 20 cases."""
    p = math.erfc(math.sqrt(2))
    left, number = 1.0, 0
    while True:
        left -= math.comb(count, number) * p**number * (1 - p) ** (count - number)
        if left < 0.05:
            return number
        number += 1


def _better_everywhere(where: Protocol, found: Mapping[ReleasedMethod, ProtocolRuns]) -> Verdict:
    spof, sgd = (found[ReleasedMethod(name=name)] for name in (SPOF, DPSGD))
    below = [e for e in EPSILONS if interval(spof.finite(e)).mean < interval(sgd.finite(e)).mean]
    few = f"{where.runs} runs are too few" if where.runs < LEAST_RUNS else ""
    missing = few or ("" if where.raw else f"measured on {where.data}, not as published")
    larger = float(len(EPSILONS) - len(below))
    return Verdict(
        claim="SPOF is more accurate than DP-SGD at every epsilon (noiseless)",
        verdict=UNDECIDED if missing else FAILS if below else HOLDS,
        unit="epsilons at which SPOF's mean is larger",
        published=float(len(EPSILONS)),
        ours=larger,
        low=larger,
        high=larger,
        reason=missing
        or (f"DP-SGD is better at epsilon {', '.join(map(shown_bound, below))}" if below else ""),
    )


def _learns(where: Protocol, found: Mapping[ReleasedMethod, ProtocolRuns]) -> Verdict:
    spof = found[ReleasedMethod(name=SPOF)]
    spreads = [s for e in EPSILONS for s in spof.spread[e]]
    finite = [s for s in spreads if math.isfinite(s)]
    collapsed = sum(s < COLLAPSED for s in finite)
    return Verdict(
        claim="SPOF's accuracy does not depend on epsilon because its loss is stable",
        verdict=FAILS if collapsed == len(finite) and where.runs >= LEAST_RUNS else UNDECIDED,
        unit="largest spread of an output over the records",
        ours=max(finite),
        low=max(finite),
        high=max(finite),
        reason=f"the decoder gives every record the same output in {collapsed} of {len(finite)} "
        "runs: with its own output as target the loss falls without limit as the outputs go to 0; "
        f"without any noise accuracy is {interval(found[NO_NOISE].finite(1.0)).mean:.4f} as well. "
        "With the record as target and the gradient of the loss it is "
        f"{interval(found[PRINTED_NO_NOISE].finite(1.0)).mean:.4f} without noise and "
        + ", ".join(
            f"{interval(found[PRINTED].finite(e)).mean:.3f} at epsilon {shown_bound(e)}"
            for e in EPSILONS
        ),
    )


def _time(raw: RawResults) -> Verdict:
    ours, theirs = (raw.seconds[name, 0.0] for name in (SPOF, DPSGD))
    printed = raw.time_saved(ours, theirs)
    usual = raw.time_saved(raw.seconds[SPOF, 5.0], raw.usual_conditions())
    return Verdict(
        claim=f"SPOF saves {TIME_SAVED} % of DP-SGD's training time",
        verdict=UNDECIDED,
        unit="% of the mean over epsilon, from the authors' runs",
        published=TIME_SAVED,
        ours=printed,
        low=printed,
        high=printed,
        reason="the noiseless files of DP-SGD mix two numbers of rows and unequal conditions; the "
        "same work in the noisy condition took half the time, and against the median of those runs "
        f"SPOF saves {usual:.1f} %. Only runs in turns on one machine would decide",
    )
