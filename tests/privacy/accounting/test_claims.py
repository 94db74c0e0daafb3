"""Claimed beside certified: claims without an event, calibration to a claim, and the report."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from dpkern.base.errors import InvalidInput, PrivacyError
from dpkern.privacy import accounting
from dpkern.privacy.accounting import Ledger, events
from dpkern.privacy.accounting.events import EventSpec
from dpkern.privacy.mechanisms import DPSGD, PartialNoiseMap
from tests.engine.released_cases import CONV, Made, gradients, make
from tests.privacy.accounting.accounting_cases import Event

RUN: dict[str, Any] = {"sample_rate": 0.01, "steps": 200, "delta": 1e-5}


@dataclass(frozen=True, kw_only=True)
class Boaster(Made):
    """Claims the multiplier of its configuration and certifies half of it."""

    mode: str = "published"

    def event_spec(self, dimension: int | None = None) -> EventSpec:
        return events.gaussian(self.noise_multiplier / 2)

    def claimed_event_spec(self, dimension: int | None = None) -> EventSpec:
        return events.gaussian(self.noise_multiplier)


def test_claims_follow_the_printed_event_as_if_poisson() -> None:
    honest = DPSGD(noise_multiplier=2.0, max_grad_norm=1.0)
    printed = accounting.epsilon(honest, **RUN)
    for more in ({}, {"sampling": "fixed", "dataset_size": 1000}):
        claimed = accounting.claimed_epsilon(Boaster(noise_multiplier=2.0), **RUN, **more)
        assert claimed == pytest.approx(printed, rel=1e-3)
    assert accounting.epsilon(Boaster(noise_multiplier=2.0), **RUN) > 1.5 * printed
    corrected = Boaster(noise_multiplier=2.0, mode="corrected")
    assert accounting.claimed_epsilon(corrected, **RUN) == accounting.epsilon(corrected, **RUN)


def test_a_claim_without_an_event_is_asked_for() -> None:
    asked: list[dict[str, Any]] = []

    class Asked(Boaster):
        def claim(self, **run: Any) -> float | None:
            asked.append(run)
            return 40.0 + 0.05 * run["steps"]

    mechanism = Asked()
    run = {**RUN, "dataset_size": 5000}
    assert accounting.claimed_epsilon(mechanism, **run) == 50.0
    assert asked == [{"steps": 200, "sample_rate": 0.01, "delta": 1e-5, "dataset_size": 5000}]
    assert accounting.claimed_epsilon(mechanism, **{**run, "steps": 0}) == 0
    corrected = replace(mechanism, mode="corrected")
    assert accounting.claimed_epsilon(corrected, **run) == accounting.epsilon(corrected, **run)
    with pytest.raises(InvalidInput, match="delta"):
        accounting.claimed_epsilon(mechanism, **{**run, "delta": 0.0})


def test_calibration_meets_the_claim_or_the_certificate() -> None:
    start = Boaster()
    run = {"sample_rate": 1.0, "steps": 10, "delta": 1e-5}
    claimed = accounting.calibrate(start, target_epsilon=1.0, to="claimed", **run)
    certified = accounting.calibrate(start, target_epsilon=1.0, **run)
    assert 0.99 < accounting.claimed_epsilon(claimed, **run) <= 1.0
    assert 0.99 < accounting.epsilon(certified, **run) <= 1.0
    assert certified.noise_multiplier == pytest.approx(2 * claimed.noise_multiplier, rel=2e-3)
    with pytest.raises(InvalidInput, match="to"):
        accounting.calibrate(start, target_epsilon=1.0, to="audited", **run)

    class Bare(Boaster):
        def event_spec(self, dimension: int | None = None) -> EventSpec:
            return events.non_private()

    assert accounting.calibrate(Bare(), target_epsilon=1.0, to="claimed", **run) == Bare(
        noise_multiplier=claimed.noise_multiplier
    )
    with pytest.raises(PrivacyError, match="claim only"):
        accounting.calibrate(Bare(), target_epsilon=1.0, **run)


def test_what_every_step_releases_of_all_records_is_not_amplified() -> None:
    both = Event(events.gaussian(2.0), unsampled=events.gaussian(30.0))
    found = accounting.certify(both, **RUN)
    by_hand = Ledger()
    by_hand.record(Event(events.gaussian(2.0)), sample_rate=0.01, count=200)
    by_hand.record(Event(events.gaussian(30.0)), sample_rate=1.0, count=200)
    assert found.epsilon == by_hand.epsilon(1e-5)
    amplified = events.composed([events.gaussian(2.0), events.gaussian(30.0)])
    assert found.epsilon > 2 * accounting.epsilon(Event(amplified), **RUN)
    inside = [leaf["count"] for leaf in json.loads(found.event)["events"]]
    assert inside == [200, 200]
    bare = Event(events.gaussian(2.0), unsampled=events.non_private())
    assert accounting.epsilon(bare, **RUN) == math.inf
    # Shuffled batches meet a record once per epoch, all of the data every time.
    shuffled = accounting.certify(both, **RUN, sampling="shuffled")
    assert [leaf["count"] for leaf in json.loads(shuffled.event)["events"]] == [2, 200]


def test_a_ledger_keeps_unsampled_events_and_remarks() -> None:
    step = make(Made(mode="published", unsampled_event=events.gaussian(50.0)), seed=None)
    for _ in range(3):
        step.finish()
    (entry,) = step.ledger.state_dict()["entries"]
    assert entry["unsampled"] == events.gaussian(50.0)
    assert entry["remarks"][0].startswith("G2: ")
    assert step.certify(1e-5).notes[0].startswith("G2: ")
    resumed = Ledger()
    resumed.load_state_dict(json.loads(json.dumps(step.ledger.state_dict())))
    assert resumed.certify(1e-5) == step.certify(1e-5)
    resumed.record(step.plan, sample_rate=0.01)
    assert resumed.steps == 4
    assert len(resumed.state_dict()["entries"]) == 1
    for bad in ({"remarks": "G2"}, {"remarks": [2]}, {"unsampled": {"event": 3}}):
        state = step.ledger.state_dict()
        state["entries"][0] |= bad
        with pytest.raises(InvalidInput):
            Ledger().load_state_dict(state)


def test_the_report_shows_claim_certificate_and_notes() -> None:
    step = make(Made(mode="published", claims=0.5), seed=None)
    step.calibrated_to = "claimed"
    step.add(gradients(3))
    step.finish()
    report = json.loads(json.dumps(step.report(1e-5)))
    assert report["epsilon_claimed"] == 0.5
    assert "source" in report["claim"]
    assert report["epsilon_certified"] == step.epsilon(1e-5)
    assert report["epsilon_audited"] is None
    assert report["non_private"] is None
    assert report["calibrated_to"] == "claimed"
    assert [note["id"] for note in report["notes"]] == ["G2"]
    assert [row["multiplier"] for row in report["blocks"]] == [1.0, 1.0, 1.0]
    assert [row["coordinates"] for row in report["blocks"]] == [800, 20, 63]
    corrected = make(Made(), seed=None)
    corrected.finish()
    report = corrected.report(1e-5)
    assert report["epsilon_claimed"] == report["epsilon_certified"]
    assert "certified" in report["claim"]
    assert report["notes"] == []


@pytest.mark.parametrize(
    ("mechanism", "seed", "says"),
    [
        (Made(silent=(1,)), None, "parameter 1 is released without noise"),
        (Made(noise_multiplier=0.0), None, "without noise"),
        (Made(max_grad_norm=math.inf, silent=(0, 1, 2)), None, "without noise"),
        (Made(noise_point="per_sample"), None, "number of samples"),
        (Made(stretches=(1.0, 100.0, 1.0)), None, "below 2^-4"),
        (
            Made(releases=(PartialNoiseMap(site=CONV, noise=np.eye(4)), None, None)),
            None,
            "directions without noise",
        ),
        (Made(), 7, "seed"),
    ],
    ids=["silent", "no noise", "no bound", "per sample", "too little", "open", "seed"],
)
def test_non_private_is_said_in_words(mechanism: Made, seed: int | None, says: str) -> None:
    step = make(mechanism, seed=seed)
    step.finish()
    report = step.report(1e-5)
    assert report["epsilon_certified"] == "inf"
    assert says in report["non_private"]
