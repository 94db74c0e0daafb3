"""``dpkern train --audit``: the lower bound of a run, what is shown of it, what is refused.

Keys come from the operating system. The one real audit has confidence 0.999 and may fail with less
than that chance where the code is right; it therefore asks for what holds with 1 - 1e-6: see there.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dpkern.audit.bounds import NORMAL
from dpkern.audit.claims import GaussianDP
from dpkern.audit.findings import Check, Evidence, Findings
from dpkern.audit.subjects.model import ModelStep
from dpkern.audit.subjects.step import PrivateStep
from dpkern.base.errors import InvalidInput, PrivacyError
from dpkern.base.outputs import FIGURE, REPORT
from dpkern.commands import audited
from dpkern.privacy import accounting
from dpkern.privacy.accounting import shown_lower_bound
from dpkern.privacy.mechanisms import DPSGD
from dpkern.step.step import DPStep
from dpkern.train import Session
from dpkern.train.session_factory import make_session

DELTA = 1e-5


def evidence(a: float, b: float) -> Evidence:
    mu = NORMAL.inv_cdf(1 - a) - NORMAL.inv_cdf(b)
    return Evidence(
        pair="canary",
        layer="canary",
        score="linear",
        runs=1000,
        false_positives=0,
        false_negatives=0,
        fpr_upper=a,
        fnr_upper=b,
        mu_lower=mu,
        epsilon_lower=1.0,
    )


def findings(mu: float = 1.0, **changed: Any) -> Findings:
    """Return findings as if a Gaussian step of this mu had been measured without error."""
    rate = NORMAL.cdf(-mu / 2)
    given: dict[str, Any] = {
        "subject": "step",
        "claimed": GaussianDP(mu),
        "certified": GaussianDP(mu),
        "delta": DELTA,
        "confidence": 0.999,
        "runs": 1000,
        "total_runs": 3000,
        "seconds": 1.0,
        "evidence": (evidence(rate, rate),),
        "checks": (),
    }
    return Findings(**given | changed)


def taken(sampling: str, steps: int, multiplier: float = 1.0) -> DPStep:
    """A step object with a history of so many steps."""
    mechanism = DPSGD(noise_multiplier=multiplier, max_grad_norm=1.0, arithmetic="float")
    params, rule = [torch.zeros(3)], {"sampling": sampling, "dataset_size": 40}
    step = DPStep(mechanism, params, expected_batch_size=10.0, sample_rate=0.25, **rule)
    for _ in range(steps):
        step.finish()
    return step


@pytest.mark.parametrize("sampling", ["poisson", "fixed", "shuffled"])
def test_a_run_is_bounded_below_its_certificate_and_not_far(sampling: str) -> None:
    """One bit of a step keeps a part of its information only, less where steps are sampled."""
    step = taken(sampling, 8)
    made = audited.Audited(found=findings(1.0), radius=1.0)
    facts = made.facts(step, steps_per_epoch=4, delta=DELTA)
    certified = step.epsilon(DELTA)
    gaussian = facts["audit"]["epsilon_if_gaussian"]
    # Without replacement a certificate speaks of a record replaced by its opposite; here it is 0.
    share = 0.05 if sampling == "fixed" else 0.15
    assert share * certified < facts["epsilon_audited"] < gaussian <= certified
    if sampling == "poisson":
        assert gaussian > 0.97 * certified


def test_opposite_records_are_twice_as_far_as_one_from_none() -> None:
    """mu 2 between opposite records is mu 1 of one record, by which a multiplier is meant."""
    step = taken("fixed", 4)
    replaced = audited.Audited(found=findings(2.0), radius=2.0)._if_gaussian(step, 4, DELTA)
    alone = audited.Audited(found=findings(1.0), radius=1.0)._if_gaussian(step, 4, DELTA)
    assert replaced == pytest.approx(alone, rel=1e-3)


def test_more_steps_and_less_sampling_cost_more() -> None:
    made = audited.Audited(found=findings(1.0), radius=1.0)

    def bound(sampling: str, steps: int) -> float:
        found = made.facts(taken(sampling, steps), steps_per_epoch=4, delta=DELTA)
        return float(found["epsilon_audited"])

    assert bound("poisson", 0) == 0
    assert bound("poisson", 4) < bound("poisson", 8)


def test_the_law_of_an_epochs_bits() -> None:
    found = audited._sums(5, 0.3)
    exact = [math.comb(5, k) * 0.3**k * 0.7 ** (5 - k) for k in range(6)]
    assert np.allclose(found, exact, rtol=1e-12)
    assert np.allclose(audited._sums(3, 0.0), [1, 0, 0, 0])


def test_a_test_that_sees_nothing_bounds_nothing() -> None:
    made = audited.Audited(found=findings(evidence=(evidence(0.5, 0.5),)), radius=1.0)
    facts = made.facts(taken("poisson", 4), steps_per_epoch=4, delta=DELTA)
    assert facts["epsilon_audited"] == 0
    assert facts["audit"]["epsilon_if_gaussian"] == 0


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "points.npz"
    draw = np.random.default_rng(0)
    y = np.arange(60) % 3
    x = (draw.normal(size=(60, 6)) + 2 * np.eye(3, 6)[y]).astype(np.float32)
    np.savez(path, x=x, y=y)
    return {
        "data": str(path),
        "model": "linear",
        "noise_multiplier": 0.25,
        "batch_size": 12,
        "epochs": 2,
        "out": tmp_path / "out",
        "figure": False,
    }


def test_a_run_with_a_real_audit(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["dpkern.audit.auditing"], "LEAST_LEARNING", 100)
    summary = Session(options | {"audit": 100}, audited).run()
    audit = summary["audit"]
    assert audit["runs"] == 100
    assert audit["per_step"]["mu_certified"] == pytest.approx(4.0, abs=1e-4)
    # mu 4: a score errs with probability 0.023 on either side, so that 100 runs show mu 1 but
    # for more than 20 errors, whose probability is below 1e-12.
    assert audit["per_step"]["mu_lower"] > 1
    assert 0 < summary["epsilon_audited"] < summary["epsilon_certified"]
    written = json.loads((options["out"] / REPORT).read_text())
    assert written["epsilon_audited"] == summary["epsilon_audited"]
    assert "adversary" in written["audit"]["assumptions"]


def test_without_audit_the_report_says_so(options: dict[str, Any]) -> None:
    summary = Session(options).run()
    assert summary["epsilon_audited"] is None
    assert summary["audit"] == "not audited"


def test_table_and_figure(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rich.console import Console

    monkeypatch.setattr(audited, "run", lambda *_, **__: findings(4.0))
    session = make_session(options | {"audit": 100, "figure": True}, audited)
    summary = session.run()
    session.show(Console(width=200), summary)
    shown = capsys.readouterr().out
    gaussian = shown_lower_bound(summary["audit"]["epsilon_if_gaussian"])
    counted = shown_lower_bound(summary["epsilon_audited"])
    assert f"audited {gaussian} if Gaussian, else {counted}" in shown
    assert "contradicted)" not in shown
    assert "a step has mu 4 at least, 4 at most" in shown
    assert (options["out"] / FIGURE).stat().st_size > 0
    levels = session._drawn(summary).levels
    assert levels == {"certified epsilon": {"audited": summary["audit"]["epsilon_if_gaussian"]}}


@pytest.mark.parametrize(
    "found",
    [
        findings(1.0, certified=GaussianDP(0.5)),
        findings(1.0, checks=(Check(layer="covariance", name="c", passed=False, text="less"),)),
    ],
    ids=["certificate", "check"],
)
def test_nothing_is_trained_by_a_step_that_fails(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, found: Findings
) -> None:
    monkeypatch.setattr(audited, "run", lambda *_, **__: found)
    session = Session(options | {"audit": 100}, audited)
    with pytest.raises(PrivacyError, match="Do not train"):
        session.run()
    assert session.steps_done == 0
    assert not options["out"].exists()


def test_which_step_is_audited(options: dict[str, Any]) -> None:
    def subject(**more: Any) -> Any:
        return Session(options | {"audit": 100} | more, audited).subject

    assert isinstance(subject(), ModelStep)
    assert isinstance(subject(mechanism="adaclip"), PrivateStep)
    notes = {"sampling": "fixed", "batch_size": 1, "optimizer": "sgd", "epochs": 1}
    assert isinstance(subject(mechanism="projected_sgd", **notes), PrivateStep)


def test_refused(options: dict[str, Any]) -> None:
    for given in (
        {"audit": 99},
        {"audit": 100, "noise_multiplier": 0.0},
        {"audit": 100, "mechanism": "randomized_response", "noise_multiplier": None, "epsilon": 1},
    ):
        chosen = {k: v for k, v in (options | given).items() if v is not None}
        with pytest.raises(InvalidInput, match="audit"):
            Session(chosen, audited)
    with pytest.raises(InvalidInput, match="audit"):
        make_session({"mechanism": "spof", "epsilon": 1.0, "audit": 100}, audited)


def test_an_audit_without_an_auditor_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=r"Pass auditor=dpkern\.commands\.audited"):
        Session(options | {"audit": 100})


def test_the_gaussian_composition_is_a_lower_bound() -> None:
    """For a step that is Gaussian it comes near the certificate, and never above it."""
    for steps in (1, 4, 16):
        step = taken("poisson", steps, 2.0)
        made = audited.Audited(found=replace(findings(0.5)), radius=1.0)
        lower = made._if_gaussian(step, 4, DELTA)
        upper = accounting.epsilon(step.plan, steps=steps, delta=DELTA, sample_rate=0.25)
        assert lower is not None
        assert 0.95 * upper < lower <= upper
