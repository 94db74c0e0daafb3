"""The ledger, certificates as JSON, and what both refuse."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest

from dpkern.base.errors import DPKernError, InvalidInput, MissingDependency
from dpkern.privacy import accounting
from dpkern.privacy.accounting import Ledger, events
from tests.evidence.accounting_grid import Release
from tests.privacy.accounting.accounting_cases import RUN, Event, certify, dpsgd


def spent(ledger: Ledger) -> float:
    return ledger.epsilon(1e-5)


def test_ledger_equals_the_plan_of_the_same_run() -> None:
    ledger = Ledger()
    for _ in range(50):
        ledger.record(dpsgd().plan([(10,)]), sample_rate=0.01)
    ledger.record(dpsgd().plan([(10,)]), sample_rate=0.01, count=550)
    assert ledger.steps == 600
    assert len(ledger.state_dict()["entries"]) == 1
    assert spent(ledger) == accounting.epsilon(
        dpsgd(), sample_rate=0.01, steps=600, delta=1e-5, dimension=10
    )


def test_heterogeneous_history_composes() -> None:
    ledger = Ledger()
    ledger.record(dpsgd(1.1), sample_rate=0.01, count=300)
    first = spent(ledger)
    ledger.record(dpsgd(2.0), sample_rate=0.02, count=300)
    second = spent(ledger)
    noisiest = accounting.epsilon(dpsgd(1.1), sample_rate=0.02, steps=600, delta=1e-5)
    assert first < second < noisiest
    ledger.record(Event(events.laplace(100.0)), sample_rate=1.0)
    found = ledger.certify(1e-5)
    assert second < found.epsilon < second + 0.1
    assert set(found.bounds) == {"PLD"}
    assert len(json.loads(found.event)["events"]) == 3


@pytest.mark.parametrize("sampling", ["poisson", "fixed", "shuffled"])
def test_state_is_json_and_resume_continues(sampling: str) -> None:
    use = {"sample_rate": 0.01, "sampling": sampling, "dataset_size": 5000}
    ledger = Ledger()
    ledger.record(dpsgd(), count=250, **use)
    resumed = Ledger()
    resumed.load_state_dict(json.loads(json.dumps(ledger.state_dict())))
    assert resumed.state_dict() == ledger.state_dict()
    assert spent(resumed) == spent(ledger)
    ledger.record(dpsgd(), count=250, **use)
    resumed.record(dpsgd(), count=250, **use)
    assert resumed.steps == 500
    if sampling == "shuffled":
        # The interrupted epoch may show a record again after the resume.
        assert spent(resumed) > spent(ledger)
    else:
        assert resumed.state_dict() == ledger.state_dict()
        assert spent(resumed) == spent(ledger)


@pytest.mark.parametrize(
    ("uses", "epochs"),
    [
        ([(1.1, 1)], [1]),
        ([(1.1, 100)], [1]),
        ([(1.1, 101)], [2]),
        ([(1.1, 50), (1.1, 50)], [1]),
        ([(1.1, 50), (2.0, 100)], [1, 2]),
        ([(1.1, 100), (2.0, 1)], [1, 1]),
    ],
    ids=["one step", "one epoch", "one more step", "joined", "noise changed midway", "one after"],
)
def test_epochs_of_shuffled_batches(uses: list[tuple[float, int]], epochs: list[int]) -> None:
    ledger = Ledger()
    for sigma, count in uses:
        ledger.record(Release(sigma), sample_rate=0.01, sampling="shuffled", count=count)
    event = json.loads(ledger.certify(1e-5).event)
    parts = event.get("events", [event])
    assert [part["count"] for part in parts] == epochs


@pytest.mark.parametrize(
    ("samplings", "relation", "accountants"),
    [
        (("poisson", "shuffled"), "zero_out", {"PLD", "RDP"}),
        (("shuffled", "fixed"), "replace_one", {"PLD", "RDP"}),
        (("poisson", "fixed"), "replace_one", {"PLD", "RDP without amplification"}),
    ],
    ids=[
        "+".join(row)
        for row in (("poisson", "shuffled"), ("shuffled", "fixed"), ("poisson", "fixed"))
    ],
)
def test_mixed_samplings_share_the_strongest_relation(
    samplings: tuple[str, ...], relation: str, accountants: set[str]
) -> None:
    ledger = Ledger()
    parts = []
    for sampling in samplings:
        use = {"sample_rate": 0.01, "sampling": sampling, "dataset_size": 5000}
        ledger.record(Release(2.0), count=200, **use)
        parts.append(accounting.epsilon(Release(2.0), steps=200, delta=1e-5, **use))
    found = ledger.certify(1e-5)
    assert found.relation == relation
    assert set(found.bounds) == accountants
    assert max(parts) < found.epsilon < math.inf


def test_seeded_run_certifies_nothing() -> None:
    secret, known = Ledger(), Ledger(seeded=True)
    for ledger in (secret, known):
        ledger.record(dpsgd(), sample_rate=0.01, count=100)
    assert known.epsilon(1e-5) == known.certify(1e-5).epsilon == math.inf
    assert known.certify(1e-5).certified_for == "nothing"
    assert known.epsilon_if_seed_secret(1e-5) == secret.epsilon(1e-5) < 1
    # What was once seeded stays seeded, on either side of a resume.
    resumed = Ledger()
    resumed.load_state_dict(known.state_dict())
    assert resumed.seeded
    assert resumed.epsilon(1e-5) == math.inf
    known.load_state_dict(secret.state_dict())
    assert known.epsilon(1e-5) == math.inf


def test_ledger_records_without_dp_accounting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    ledger = Ledger()
    ledger.record(dpsgd().plan([(4,)]), sample_rate=0.5)
    assert ledger.steps == 1
    with pytest.raises(MissingDependency):
        ledger.epsilon(1e-5)


def test_certificate_is_json() -> None:
    plain = json.loads(
        json.dumps(certify(dpsgd(), steps=10, dataset_size=500, delta=3e-3).to_dict())
    )
    assert plain["event"]["event_of"]["sampling_probability"] == 0.01
    (note,) = plain["notes"]
    assert note.startswith("delta 0.003 is not below 1/n = 1/500")
    assert set(plain["bounds"]) == {"PLD", "RDP"}


CALLS: dict[str, Callable[..., Any]] = {
    "epsilon": lambda **kw: accounting.epsilon(kw.pop("mechanism", dpsgd()), **{**RUN, **kw}),
    "calibrate": lambda **kw: accounting.calibrate(dpsgd(), **{**RUN, "target_epsilon": 1.0, **kw}),
    "record": lambda **kw: Ledger().record(dpsgd(), **{"sample_rate": 0.1, **kw}),
    "spent": lambda **kw: Ledger().epsilon(**kw),
    "load": lambda **kw: Ledger().load_state_dict(**kw),
}


def broken_state(**changes: Any) -> dict[str, Any]:
    ledger = Ledger()
    ledger.record(dpsgd(), sample_rate=0.1)
    state = ledger.state_dict()
    state["entries"][0].update(changes)
    return state


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("epsilon", {"sample_rate": 0.0}, "sample_rate"),
    ("epsilon", {"sample_rate": 1.01}, "sample_rate"),
    ("epsilon", {"sample_rate": math.nan}, "sample_rate"),
    ("epsilon", {"steps": -1}, "steps"),
    ("epsilon", {"steps": 1.5}, "steps"),
    ("epsilon", {"steps": True}, "steps"),
    ("epsilon", {"delta": 0.0}, "delta"),
    ("epsilon", {"delta": 1.0}, "delta"),
    ("epsilon", {"delta": "1e-5"}, "delta"),
    ("epsilon", {"sampling": "uniform"}, "sampling"),
    ("epsilon", {"sampling": "fixed"}, "dataset_size"),
    ("epsilon", {"sampling": "with_replacement"}, "dataset_size"),
    ("epsilon", {"sampling": "fixed", "dataset_size": 150}, "sample_rate"),
    ("epsilon", {"sampling": "fixed", "dataset_size": 20}, "sample_rate"),
    ("epsilon", {"dataset_size": 0}, "dataset_size"),
    ("epsilon", {"dimension": 0}, "dimension"),
    ("epsilon", {"dimension": 1 << 41}, "dimension"),
    ("epsilon", {"mechanism": Event({"event": "GaussianDpEvent"})}, "event"),
    ("epsilon", {"mechanism": Event({"event": "NoSuchDpEvent"})}, "event"),
    ("epsilon", {"mechanism": Event({"event": "accountant"})}, "event"),
    ("epsilon", {"mechanism": Event({})}, "event"),
    ("epsilon", {"mechanism": Event(events.gaussian(1.0), "swap")}, "neighbouring"),
    ("calibrate", {"target_epsilon": 0.0}, "target_epsilon"),
    ("calibrate", {"target_epsilon": math.inf}, "target_epsilon"),
    ("calibrate", {"steps": 0}, "steps"),
    ("record", {"sample_rate": -0.1}, "sample_rate"),
    ("record", {"count": -1}, "steps"),
    ("spent", {"delta": 2.0}, "delta"),
    ("load", {"state": {}}, "state"),
    ("load", {"state": []}, "state"),
    ("load", {"state": {"version": 3, "seeded": False, "entries": []}}, "state"),
    ("load", {"state": {"version": 2, "seeded": 0, "entries": []}}, "state"),
    ("load", {"state": {"version": 1, "seeded": False, "entries": [{}]}}, "state"),
    ("load", {"state": broken_state(sampling="uniform")}, "sampling"),
    ("load", {"state": broken_state(sample_rate=2.0)}, "sample_rate"),
    ("load", {"state": broken_state(count=0)}, "count"),
    ("load", {"state": broken_state(event={"event": 3})}, "event"),
    ("load", {"state": broken_state(phase=-1)}, "phase"),
    ("load", {"state": broken_state(certified_for="everything")}, "certified_for"),
    ("load", {"state": broken_state(sampling="fixed")}, "dataset_size"),
]


@pytest.mark.parametrize(
    ("call", "arguments", "name"),
    BAD,
    ids=[f"{call}-{name}-{index}" for index, (call, _, name) in enumerate(BAD)],
)
def test_refuses_bad_input(call: str, arguments: dict[str, Any], name: str) -> None:
    with pytest.raises(DPKernError) as raised:
        CALLS[call](**arguments)
    assert type(raised.value) is InvalidInput
    assert raised.value.name == name


def test_failed_load_leaves_the_history() -> None:
    ledger = Ledger()
    ledger.record(dpsgd(), sample_rate=0.1)
    before = ledger.state_dict()
    with pytest.raises(InvalidInput):
        ledger.load_state_dict(broken_state(count=0))
    assert ledger.state_dict() == before


def test_a_tainted_history_certifies_nothing_and_stays_so() -> None:
    ledger = Ledger()
    ledger.record(dpsgd(1.0), sample_rate=0.01)
    assert "taints" not in ledger.state_dict()
    ledger.taint("samples mixed")
    ledger.taint("samples mixed")
    assert ledger.epsilon(1e-5) == math.inf == ledger.epsilon_if_seed_secret(1e-5)
    certificate = ledger.certify(1e-5)
    assert certificate.certified_for == "nothing"
    assert certificate.notes[0] == "samples mixed"
    again = Ledger()
    again.load_state_dict(json.loads(json.dumps(ledger.state_dict())))
    assert again.taints == ("samples mixed",)
    assert again.epsilon(1e-5) == math.inf
    with pytest.raises(InvalidInput, match="taints"):
        again.load_state_dict({**ledger.state_dict(), "taints": "no"})
