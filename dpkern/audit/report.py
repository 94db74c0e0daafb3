"""Report an audit's findings: verdicts, the tests behind them, the checks, two figures.

The trade-off figure has both error rates on the scale of the normal quantile, where a Gaussian
claim is a straight line of slope -1 and its distance from the origin is mu / sqrt(2).
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist

from ..base.report import Figure, Mark, Report, ReportTable, Series
from ..privacy.accounting import shown_lower_bound
from ..privacy.accounting.shown import LowerBound, UpperBound, shown_exactly
from .claims import Claim, NoClaim
from .findings import LAYERS, Evidence, Findings, lower_epsilon

NORMAL = NormalDist()
POINTS = 161
"""Places at which a claim is drawn."""
SMALLEST = 1e-7
"""Rates below this are drawn at it."""
BOXES = 60
"""Maximum of tests, strongest first, that are drawn with their intervals."""
ROOM = 10.0
"""The figure ends at this part of the smallest rate that a test bounds."""
NO_NOISE = 1e-9
"""Parts of the largest variance that count as none: rounding of the eigenvalues."""
FLAT = 3.0
"""A spectrum within this ratio has a linear axis."""


def report(findings: Findings) -> Report:
    """Build the report of an audit.

    Args:
        findings: result of ``audit.run``.
    """
    return Report(
        name="audit",
        title=f"Audit of {findings.subject}",
        summary=findings.sentence,
        facts=findings.to_dict(),
        tables=tuple(
            table
            for table in (_numbers(findings), _tests(findings), _checks(findings))
            if table.rows
        ),
        figures=tuple(
            figure for figure in (_tradeoff(findings), _spectrum(findings)) if figure is not None
        ),
        notes=_notes(findings),
        kind="audit",
    )


def _numbers(findings: Findings) -> ReportTable:
    """Build one row per claim, with the one test that says most against it."""
    rows: list[list[str | float | None]] = []
    for name, claim in (("claimed", findings.claimed), ("certified", findings.certified)):
        stated = UpperBound(claim.epsilon(findings.delta))
        best = findings.strongest(claim)
        if best is None:
            rows.append(["not tested", name, claim.text, stated, None, None, None])
            continue
        verdict = "CONTRADICTED" if best.contradicts(claim) else "consistent"
        shown = best.shows(claim, findings.delta)
        rows.append(
            [
                "nothing promised" if isinstance(claim, NoClaim) else verdict,
                *(name, claim.text, stated),
                *(shown.lower_text, _lower(shown, findings.delta), best.pair),
            ]
        )
    return ReportTable(
        title="Each promise and the strongest test against it",
        columns=("verdict", "promise", "at most", "epsilon ≤", "at least", "epsilon ≥", "test"),
        rows=rows,
        note="Nothing was run: what is asked here shows in no output."
        if not findings.total_runs
        else "A test contradicts a promise if it shows more. What it shows is written in the "
        "promise's own terms; both become the epsilon at delta "
        f"{shown_exactly(findings.delta)} by the same formula. "
        f"{findings.runs:,} fresh runs of each side of each pair, "
        f"{findings.total_runs:,} runs in {findings.seconds:.3g} s; all statistical statements "
        f"hold together with confidence {findings.confidence:g}.",
    )


def _lower(shown: Claim, delta: float) -> LowerBound | None:
    epsilon = lower_epsilon(shown, delta)
    return None if epsilon is None else LowerBound(epsilon)


def _tests(findings: Findings) -> ReportTable:
    best: dict[str, Evidence] = {}
    for found in _strongest_first(findings):
        best.setdefault(found.pair, found)
    rows: list[list[str | float | None]] = []
    for found in best.values():
        shown = found.shows(_judged(found, findings), findings.delta)
        mu = None if shown.mu is None else LowerBound(shown.mu)
        rows.append(
            [
                *(_verdict(found, findings), found.pair, found.layer),
                *(found.false_positives, found.false_negatives),
                *(mu, _lower(shown, findings.delta)),
            ]
        )
    columns = ["verdict", "neighbours", "layer", "false pos.", "false neg.", "mu ≥", "epsilon ≥"]
    if all(row[5] is None for row in rows):
        del columns[5]
        rows = [[*row[:5], row[6]] for row in rows]
    return ReportTable(
        title="The strongest test of each pair of neighbours",
        columns=columns,
        rows=rows,
        note=f"{len(findings.evidence)} tests share the confidence, each counted in "
        f"{findings.runs:,} runs without and as many with the record. A false positive says that "
        "the record was there when it was not."
        + (
            f" Epsilon is that of mu. Counted without a promise it is at least "
            f"{shown_lower_bound(findings.epsilon_lower)} at delta {shown_exactly(findings.delta)}."
            if len(columns) == 7
            else ""
        ),
    )


def _strongest_first(findings: Findings) -> list[Evidence]:
    """Sort tests: those that contradict a claim, then the others, each by the number they show."""

    def strength(found: Evidence) -> tuple[bool, bool, float, float]:
        shown = found.shows(_judged(found, findings), findings.delta)
        contradicted = (
            found.contradicts(promise) for promise in (findings.certified, findings.claimed)
        )
        return (*contradicted, shown.number, found.epsilon_lower)  # type: ignore[return-value]

    return sorted(findings.evidence, key=strength, reverse=True)


def _judged(found: Evidence, findings: Findings) -> Claim:
    """Return the claim in whose terms a test is written: one it contradicts, else the first."""
    claimed, certified = findings.claimed, findings.certified
    if found.contradicts(certified) or isinstance(claimed, NoClaim):
        return certified
    return claimed


def _verdict(found: Evidence, findings: Findings) -> str:
    if found.contradicts(findings.certified):
        return "above certificate"
    return "above claim" if found.contradicts(findings.claimed) else "consistent"


def _checks(findings: Findings) -> ReportTable:
    words = {True: "passed", False: "FAILED", None: "not asked"}
    failed_first = sorted(findings.checks, key=lambda check: check.passed is not False)
    return ReportTable(
        title="Checks",
        columns=("layer", "question", "answer", "what was seen"),
        rows=[[c.layer, c.name, words[c.passed], c.text] for c in failed_first],
    )


def _notes(findings: Findings) -> tuple[str, ...]:
    asked = {found.layer for found in findings.evidence}
    asked |= {check.layer for check in findings.checks if check.passed is not None}
    silent = [layer for layer in LAYERS if layer not in asked]
    notes = [
        "An audit bounds from below: that nothing was found above a promise is no proof of it.",
        "It speaks of one call on the neighbours that were tried. Relation, sampling and the "
        "composition of a run are the accountant's.",
    ]
    if silent:
        notes.append(f"Layers in which nothing was asked: {', '.join(silent)}.")
    if isinstance(findings.certified, NoClaim):
        notes.append("Nothing is certified of this release.")
    unasked = [check for check in findings.checks if check.passed is None]
    if unasked:
        names = "; ".join(check.name for check in unasked)  # which have commas
        notes.append(f"Could not be asked: {names}.")
    return tuple(notes)


def _tradeoff(findings: Findings) -> Figure | None:
    """Draw the claims as curves and the tests as points with their intervals."""
    tests = _strongest_first(findings)[:BOXES]
    if not tests:
        return None
    floor = _floor(tests)
    best = tests[0]
    shown = best.shows(_judged(best, findings), findings.delta)
    corners = [(_drawn(t.fpr_upper, floor), _drawn(t.fnr_upper, floor), t) for t in tests]
    series = [_curve(name, claim, floor) for name, claim in _promises(findings)]
    points = [
        Series(
            label="canaries, upper ends of the intervals" if layer == "canary" else layer,
            x=[x for x, _, test in corners if test.layer == layer],
            y=[y for _, y, test in corners if test.layer == layer],
            points=True,
        )
        for layer in dict.fromkeys(test.layer for test in tests)
    ]
    return Figure(
        name="tradeoff",
        title=f"Error rates of tests on {findings.subject}",
        caption="No test of a release that keeps a promise comes below its curve. A box reaches "
        "from the rates that were counted to the upper ends of their confidence intervals; a box "
        "below a curve contradicts it. Both axes are on the scale of the normal quantile: the "
        "diagonal through one half is guessing.",
        kind="lines",
        x_label="false positive rate",
        y_label="false negative rate",
        series=[*series, *points],
        marks=[
            Mark(
                x=_drawn(best.fpr_upper, floor),
                y=_drawn(best.fnr_upper, floor),
                text=f"{best.pair}: {shown.written(_at_least)}",
            )
        ],
        probit=True,
        boxes=[
            (
                _drawn(test.false_positives / test.runs, floor),
                _drawn(test.false_negatives / test.runs, floor),
                x,
                y,
            )
            for x, y, test in corners
        ],
    )


def _at_least(value: float) -> str:
    return f"≥ {shown_lower_bound(value)}"


def _promises(findings: Findings) -> list[tuple[str, Claim]]:
    """Return the claims with a curve; one curve where both read the same."""
    claimed, certified = findings.claimed, findings.certified
    if claimed.text == certified.text:
        named = [("claimed and certified", claimed)]
    else:
        named = [("claimed", claimed), ("certified", certified)]
    promises = [(f"{name}: {claim.text}", claim) for name, claim in named]
    return [(name, claim) for name, claim in promises if not isinstance(claim, NoClaim)]


def _floor(tests: Sequence[Evidence]) -> float:
    """Return the least rate of the axes."""
    rates = [rate for test in tests for rate in (test.fpr_upper, test.fnr_upper)]
    least = min((min(rate, 1 - rate) for rate in rates if 0 < rate < 1), default=0.01)
    return max(SMALLEST, min(0.01, least / ROOM))


def _drawn(rate: float, floor: float) -> float:
    return min(max(rate, floor), 1 - floor)


def _curve(label: str, claim: Claim, floor: float) -> Series:
    """Draw a claim at places that are even on the axis, as far as it is within the axes."""
    edge = NORMAL.inv_cdf(floor)
    places = [NORMAL.cdf(edge - 2 * edge * i / (POINTS - 1)) for i in range(POINTS)]
    rates = [claim.tradeoff(place) for place in places]
    y = [rate if floor <= rate <= 1 - floor else None for rate in rates]
    return Series(label=label, x=places, y=y)


def _spectrum(findings: Findings) -> Figure | None:
    """Draw eigenvalues of the noise's covariance, beside the certified variance."""
    values = findings.spectrum
    if len(values) < 2:
        return None
    none = sum(value <= NO_NOISE * max(values) for value in values)
    scaled = bool(findings.settings.get("spectrum_in_certified_variances"))
    order = list(range(1, len(values) + 1))
    series = [Series(label="measured", x=order, y=values, points=True)]
    if scaled:
        series.append(Series(label="certified", x=[1, len(values)], y=[1.0, 1.0]))
    caption = "Variance of the noise along the directions of its covariance, least first. With "
    caption += "finitely many runs the values of equal directions spread a little."
    if none:
        caption += f" {none} of {len(values)} directions carry no noise."
    return Figure(
        name="spectrum",
        title=f"Noise of {findings.subject}",
        caption=caption,
        kind="lines",
        x_label="direction, by rank",
        y_label=f"variance{', in units of the certified one' if scaled else ''}",
        series=series,
        log_y=not none and values[-1] > FLAT * values[0],
    )


__all__ = ["report"]
