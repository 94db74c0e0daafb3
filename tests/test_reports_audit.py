"""An audit's findings as a report, and how its figures are drawn."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dpkern.audit.claims import Claim, Gaussian, Laplace, Nothing, Pure
from dpkern.audit.findings import Findings
from dpkern.cost.report import Figure, Report, Series
from dpkern.reports import audit, canvas, curves, figures, files, ink
from tests.audit_samples import BROKEN, FAILED, PURE, SOUND, findings

ALL = {"sound": SOUND, "broken": BROKEN, "pure": PURE}


def figure(report: Report, name: str) -> Figure:
    found = [each for each in report.figures if each.name == name]
    assert len(found) == 1
    return found[0]


def curves_of(given: Figure) -> dict[str, Series]:
    return {series.label: series for series in given.series if not series.points}


def test_the_three_numbers_and_the_verdict() -> None:
    report = audit.report(SOUND)
    assert report.summary == SOUND.sentence
    assert [row[0] for row in report.tables[0].rows] == ["claimed", "certified", "audited"]
    claimed, certified, audited = report.tables[0].rows
    assert claimed[3:] == certified[3:] == [1.0, Gaussian(1.0).epsilon(1e-5)]
    assert audited[1] == "at least"
    assert audited[3:] == [SOUND.mu_lower, SOUND.epsilon_lower]
    assert report.facts["passed"] is True


def test_without_tests_nothing_is_audited() -> None:
    report = audit.report(findings(Gaussian(1.0), Gaussian(1.0), ()))
    assert [row[0] for row in report.tables[0].rows] == ["claimed", "certified"]
    assert "tradeoff" not in {each.name for each in report.figures}
    assert not any("strongest test" in table.title for table in report.tables)


@pytest.mark.parametrize(
    ("claimed", "certified", "verdict"),
    [
        (Gaussian(1.0), Gaussian(1.0), "consistent"),
        (Gaussian(0.5), Gaussian(1.0), "above claim"),
        (Gaussian(0.5), Gaussian(0.5), "above certificate"),
        (Gaussian(1.0), Gaussian(0.5), "above certificate"),
        (Nothing(), Nothing(), "consistent"),
    ],
)
def test_what_a_test_contradicts(claimed: Claim, certified: Claim, verdict: str) -> None:
    report = audit.report(replace(SOUND, claimed=claimed, certified=certified))
    table = report.tables[1]
    assert {row[-1] for row in table.rows} == {verdict}
    # The strongest of each pair, not all of them.
    assert [row[0] for row in table.rows] == ["weakest", "uniform", "coordinate"]
    assert table.rows[0][4] == SOUND.mu_lower


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
    both = replace(SOUND, claimed=Gaussian(0.7))
    assert list(curves_of(figure(audit.report(both), "tradeoff"))) == [
        "claimed: mu 0.7",
        "certified: mu 1",
    ]
    assert list(curves_of(figure(audit.report(BROKEN), "tradeoff"))) == ["claimed: mu 0.9"]


@pytest.mark.parametrize("claim", [Gaussian(1.0), Laplace(1.5), Pure(1.0)])
def test_a_curve_is_the_promise(claim: Claim) -> None:
    series = curves_of(figure(audit.report(replace(SOUND, claimed=claim)), "tradeoff"))
    (curve,) = (each for label, each in series.items() if label.startswith("claimed"))
    drawn = [(x, y) for x, y in zip(curve.x, curve.y, strict=True) if y is not None]
    assert len(drawn) > 100
    assert all(y == claim.tradeoff(float(x)) for x, y in drawn)


def test_boxes_reach_from_the_counts_to_the_upper_ends() -> None:
    tradeoff = figure(audit.report(SOUND), "tradeoff")
    tests = sorted(SOUND.evidence, key=lambda test: -test.mu_lower)
    for box, test in zip(tradeoff.boxes, tests, strict=True):
        rates = (test.false_positives / test.runs, test.false_negatives / test.runs)
        assert box == (*rates, test.fpr_upper, test.fnr_upper)
    assert tradeoff.marks[0].text == "weakest: mu ≥ 0.937"


def test_a_pure_promise_is_marked_with_epsilon() -> None:
    assert figure(audit.report(PURE), "tradeoff").marks[0].text == "one-hot: epsilon ≥ 0.96"


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
    assert ink.probability(value) == text


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
