"""Every false claim of the corpus is caught by the layer that must see it; every control passes."""

from __future__ import annotations

import math
import pickle

import pytest

from dpkern.audit.auditing import run
from dpkern.audit.claims import Claim, GaussianDP, NoClaim, PureDP
from dpkern.audit.findings import LAYERS, Findings
from tests.audit.audit_corpus import BROKEN, SOUND, Case

pytestmark = pytest.mark.usefixtures("one_thread")


def ids(case: Case) -> str:
    return case.id


def shown(found: Findings) -> float:
    """The lower bound in the unit of the claim."""
    return found.epsilon_lower if found.claimed.mu is None else found.mu_lower


def truth(case: Case) -> Claim:
    """Return the claim that the release really keeps."""
    if case.truth == math.inf:
        return NoClaim()
    return PureDP(case.truth) if case.subject.claimed.mu is None else GaussianDP(case.truth)


@pytest.mark.parametrize("case", BROKEN, ids=ids)
def test_a_false_claim_is_caught(case: Case) -> None:
    found = run(case.subject, runs=case.runs, seed=0)
    speaking = {check.layer for check in found.failed}
    speaking |= {test.layer for test in found.against(found.claimed)}
    assert set(case.layers) <= speaking
    assert set(case.fails) <= {check.name for check in found.failed}
    assert not found.passed
    assert shown(found) <= case.truth
    assert not found.against(truth(case))


@pytest.mark.parametrize("case", SOUND, ids=ids)
def test_a_sound_claim_passes(case: Case) -> None:
    found = run(case.subject, runs=case.runs, seed=0)
    assert found.passed, found.sentence
    assert shown(found) <= case.truth
    # The audit looks: what it shows is a good part of what there is to be shown.
    assert shown(found) >= case.sharp * case.truth


def test_names_are_unique_and_every_layer_has_work() -> None:
    names = [case.id for case in (*BROKEN, *SOUND)]
    assert len(set(names)) == len(names)
    assert {layer for case in BROKEN for layer in case.layers} == set(LAYERS)


def test_processes_can_take_every_subject() -> None:
    for case in (*BROKEN, *SOUND):
        assert pickle.loads(pickle.dumps(case.subject)).name == case.subject.name
