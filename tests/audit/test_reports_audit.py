"""An audit's findings as a report, and how its figures are drawn."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dpkern.audit import report as audit
from dpkern.audit.bounds import epsilon_lower, mu_lower
from dpkern.audit.claims import ApproximateDP, Claim, GaussianDP, Laplace, NoClaim, PureDP
from dpkern.audit.findings import Findings
from dpkern.base.report import Figure, Report, Series
from dpkern.drawing import canvas, number_format
from dpkern.privacy.accounting import shown_lower_bound
from dpkern.reports import curves, figures, files
from tests.audit.audit_samples import BROKEN, FAILED, PURE, SOUND, evidence, findings

ALL = {"sound": SOUND, "broken": BROKEN, "pure": PURE}


def figure(report: Report, name: str) -> Figure:
    found = [each for each in report.figures if each.name == name]
    assert len(found) == 1
    return found[0]


def curves_of(given: Figure) -> dict[str, Series]:
    return {series.label: series for series in given.series if not series.points}


def test_a_promise_a_row_with_its_verdict_and_one_test() -> None:
    report = audit.report(SOUND)
    assert report.summary == SOUND.sentence
    stated = GaussianDP(1.0).epsilon(1e-5)
    shown = GaussianDP(SOUND.evidence[2].shows(GaussianDP(1.0), 1e-5).number).epsilon(1e-5)
    assert report.tables[0].rows == [
        ["consistent", name, "mu 1", stated, "mu 0.9367", pytest.approx(shown), "weakest"]
        for name in ("claimed", "certified")
    ]
    assert report.facts["passed"] is True
    assert report.facts["against_claimed"]["pair"] == "weakest"
    assert report.facts["against_claimed"]["contradicts"] is False


CLAIMS = [
    GaussianDP(1.0),
    Laplace(1.5),
    PureDP(1.0),
    ApproximateDP(1.0, 1e-5),
    ApproximateDP(1.0, 1e-3),
]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.text)
@given(st.floats(1e-6, 1 - 1e-6), st.floats(1e-6, 1 - 1e-6))
def test_the_numbers_beside_each_other_agree_with_the_verdict(
    claim: Claim, a: float, b: float
) -> None:
    """A test shows more than a promise states if and only if it contradicts it: mu and epsilon."""
    test = evidence("p", (1, 1), (a, b), (mu_lower(a, b), epsilon_lower(a, b, 1e-5)))
    shown = test.shows(claim, 1e-5)
    assume(abs(shown.number - claim.number) > 1e-9)
    assert test.contradicts(claim) == (shown.number > claim.number)
    more = shown.epsilon(1e-5) > claim.epsilon(1e-5)
    assert test.contradicts(claim) == more or claim.epsilon(1e-5) == shown.epsilon(1e-5)
    # Every smaller promise of the family is contradicted, no larger one is.
    if shown.number > 1e-3:
        kind, rest = type(claim), (claim.delta,) if type(claim) is ApproximateDP else ()
        assert test.contradicts(kind(shown.number * (1 - 1e-6), *rest))
        assert not test.contradicts(kind(shown.number * (1 + 1e-6), *rest))


def test_a_contradicted_claim_stands_beside_a_larger_number() -> None:
    """Counts alone show an epsilon of 1.855 where mu is 1.27, and mu 1 is epsilon 4.377."""
    strong = evidence("p", (1, 1), (0.2625, 0.2625), (1.27, 1.855))
    found = replace(SOUND, certified=GaussianDP(2.0), evidence=(strong,))
    assert found.contradicts_claim
    claimed, certified = audit.report(found).tables[0].rows
    assert claimed[0] == "CONTRADICTED"
    assert certified[0] == "consistent"
    assert claimed[5] > claimed[3] == GaussianDP(1.0).epsilon(1e-5)
    assert claimed[5] < certified[3]
    assert "at least mu 1.2713 (epsilon 5.7938 at delta 1e-05)" in found.sentence
    assert "1.855" not in found.sentence
    text = " ".join(files.render(audit.report(found), "text").split())
    assert "CONTRADICTED claimed mu 1 4.3772 mu 1.2713 5.7938 p" in text
    assert "Counted without a promise it is at least 1.855 at delta 1e-05." in text


def test_a_promise_of_another_kind_has_numbers_of_its_own() -> None:
    """A claim of (epsilon, delta) beside a Gaussian certificate: each against its own number."""
    found = replace(SOUND, claimed=ApproximateDP(2.0, 1e-5))
    claimed, certified = audit.report(found).tables[0].rows
    assert claimed[4] == shown_lower_bound_text(found)
    assert certified[4] == "mu 0.9367"


def shown_lower_bound_text(found: Findings) -> str:
    best = max(epsilon_lower(one.fpr_upper, one.fnr_upper, 1e-5) for one in found.evidence)
    return f"({shown_lower_bound(best)}, 1e-05)"


def test_nothing_promised_is_no_verdict() -> None:
    found = replace(SOUND, claimed=NoClaim(), certified=NoClaim())
    rows = audit.report(found).tables[0].rows
    assert {row[0] for row in rows} == {"nothing promised"}
    assert found.sentence.startswith("Nothing is claimed of a release: at least (3.3, 1e-05)")


def test_without_tests_nothing_is_audited() -> None:
    report = audit.report(findings(GaussianDP(1.0), GaussianDP(1.0), ()))
    assert [row[0] for row in report.tables[0].rows] == ["not tested", "not tested"]
    assert "tradeoff" not in {each.name for each in report.figures}
    assert not any(table.title.startswith("The strongest test") for table in report.tables)


@pytest.mark.parametrize(
    ("claimed", "certified", "verdict"),
    [
        (GaussianDP(1.0), GaussianDP(1.0), "consistent"),
        (GaussianDP(0.5), GaussianDP(1.0), "above claim"),
        (GaussianDP(0.5), GaussianDP(0.5), "above certificate"),
        (GaussianDP(1.0), GaussianDP(0.5), "above certificate"),
        (NoClaim(), NoClaim(), "consistent"),
    ],
)
def test_what_a_test_contradicts(claimed: Claim, certified: Claim, verdict: str) -> None:
    report = audit.report(replace(SOUND, claimed=claimed, certified=certified))
    table = report.tables[1]
    assert {row[0] for row in table.rows} == {verdict}
    # The strongest of each pair, not all of them.
    assert [row[1] for row in table.rows] == ["weakest", "uniform", "coordinate"]
    if not isinstance(claimed, NoClaim):
        assert table.rows[0][5] == pytest.approx(SOUND.mu_lower, abs=1e-3)


def test_failed_checks_come_first_and_unasked_layers_are_named() -> None:
    report = audit.report(BROKEN)
    checks = next(table for table in report.tables if table.title == "Checks")
    assert list(checks.rows[0]) == ["bits", "repeats", "FAILED", FAILED.text]
    notes = " ".join(report.notes)
    assert "nothing was asked: covariance, likelihood, sensitivity, plan." in notes
    assert "Nothing is certified" in notes
    # A question that could not be asked is no answer of its layer.
    assert "covariance, likelihood, sensitivity" in " ".join(audit.report(SOUND).notes)
    assert "Could not be asked: norms." in " ".join(audit.report(SOUND).notes)


def test_promises_are_curves() -> None:
    tradeoff = figure(audit.report(SOUND), "tradeoff")
    assert list(curves_of(tradeoff)) == ["claimed and certified: mu 1"]
    both = replace(SOUND, claimed=GaussianDP(0.7))
    assert list(curves_of(figure(audit.report(both), "tradeoff"))) == [
        "claimed: mu 0.7",
        "certified: mu 1",
    ]
    assert list(curves_of(figure(audit.report(BROKEN), "tradeoff"))) == ["claimed: mu 0.9"]


@pytest.mark.parametrize("claim", [GaussianDP(1.0), Laplace(1.5), PureDP(1.0)])
def test_a_curve_is_the_promise(claim: Claim) -> None:
    series = curves_of(figure(audit.report(replace(SOUND, claimed=claim)), "tradeoff"))
    (curve,) = (each for label, each in series.items() if label.startswith("claimed"))
    drawn = [(x, y) for x, y in zip(curve.x, curve.y, strict=True) if y is not None]
    assert len(drawn) > 100
    assert all(y == claim.tradeoff(float(x)) for x, y in drawn)


def test_boxes_reach_from_the_counts_to_the_upper_ends() -> None:
    tradeoff = figure(audit.report(SOUND), "tradeoff")
    tests = sorted(SOUND.evidence, key=lambda one: -mu_lower(one.fpr_upper, one.fnr_upper))
    for box, test in zip(tradeoff.boxes, tests, strict=True):
        rates = (test.false_positives / test.runs, test.false_negatives / test.runs)
        assert box == (*rates, test.fpr_upper, test.fnr_upper)
    assert tradeoff.marks[0].text == "weakest: mu ≥ 0.9367"


def test_a_pure_promise_is_marked_with_epsilon() -> None:
    assert figure(audit.report(PURE), "tradeoff").marks[0].text == "one-hot: epsilon ≥ 0.98259"


@pytest.mark.parametrize("name", ALL)
def test_every_rate_has_a_place_on_the_axes(name: str) -> None:
    tradeoff = figure(audit.report(ALL[name]), "tradeoff")
    places = [float(v) for s in tradeoff.series for v in (*s.x, *s.y) if v is not None]
    places += [v for box in tradeoff.boxes for v in box]
    assert all(math.isfinite(curves.probit(v)) for v in places)


def test_directions_without_noise_are_drawn_and_counted() -> None:
    spectrum = figure(audit.report(BROKEN), "spectrum")
    assert list(spectrum.series[0].y) == list(BROKEN.spectrum)
    assert "7 of 16 directions carry no noise" in spectrum.caption
    assert not spectrum.log_y
    assert [series.label for series in spectrum.series] == ["measured"]


def test_a_spectrum_in_certified_units_shows_the_unit() -> None:
    spectrum = figure(audit.report(SOUND), "spectrum")
    assert curves_of(spectrum)["certified"].y == [1.0, 1.0]
    assert "no noise" not in spectrum.caption
    wide = replace(SOUND, spectrum=(0.01, 1.0, 2.0))
    assert figure(audit.report(wide), "spectrum").log_y
    for few in ((), (1.0,)):
        names = {each.name for each in audit.report(replace(SOUND, spectrum=few)).figures}
        assert names == {"tradeoff"}


def test_a_gaussian_promise_is_a_straight_line() -> None:
    tradeoff = figure(audit.report(SOUND), "tradeoff")
    with canvas.styled(canvas.WIDE):
        drawn = figures.draw(tradeoff, canvas.WIDE)
    line = next(each for each in drawn.axes[0].lines if "claimed" in each.get_label())
    x, y = np.asarray(line.get_xdata()), np.asarray(line.get_ydata())
    kept = np.isfinite(y)
    np.testing.assert_allclose(x[kept] + y[kept], -1.0, atol=1e-9)  # z-scores add up to -mu
    assert len(drawn.axes[0].patches) == len(SOUND.evidence)


@pytest.mark.parametrize(
    ("value", "text"),
    [(1e-6, "10⁻⁶"), (0.001, "0.001"), (0.2, "0.2"), (0.999, "0.999"), (1 - 1e-5, "1 − 10⁻⁵")],
)
def test_probabilities_on_an_axis(value: float, text: str) -> None:
    assert number_format.probability(value) == text


@pytest.mark.parametrize("name", ALL)
def test_every_format(name: str, tmp_path: Path) -> None:
    found: Findings = ALL[name]
    report = audit.report(found)
    facts = json.loads(files.render(report, "json"), parse_constant=pytest.fail)
    assert facts["verdict"] == found.sentence
    assert facts["passed"] is found.passed
    assert " ".join(found.sentence.split()) in " ".join(files.render(report, "text").split())
    page = files.render(report, "html")
    assert "dpkern · audit report" in page
    assert not re.search(r"(?:src|href)=\"(?!#)", page)
    stems = {path.name for path in files.write_figures(report, tmp_path)}
    assert stems == {f"audit-{f.name}.{kind}" for f in report.figures for kind in ("png", "svg")}
