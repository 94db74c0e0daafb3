"""A private step's closed form, its counted execution and its time, side by side."""

from __future__ import annotations

import math
from typing import Any

import pytest

from dpkern.base.counts import EVIDENCE, EXECUTED
from dpkern.base.errors import InvalidInput
from dpkern.cost.counted import KERNELS
from dpkern.cost.forms import FORMS
from dpkern.cost.step_systems import systems
from dpkern.privacy.mechanisms import AdaClip
from dpkern.reports import three_ways


@pytest.mark.parametrize("name", systems())
def test_all_mechanisms_agree(name: str) -> None:
    report = three_ways.report(name, size=(9, 4))
    facts = report.facts["execution"]
    assert facts["agrees"]
    assert "agrees with the closed form" in report.summary
    assert facts["seconds"] > 0
    assert facts["ops"]
    for entry in (*facts["ops"], *facts["phases"]):
        assert entry["closed"] == entry["counted"]
    phases, ops = report.tables[-2:]
    assert phases.rows[-1][2] == phases.rows[-1][3] == sum(row[2] for row in phases.rows[:-1])
    assert [row[-1] is not None for row in ops.rows] == [True] * len(facts["ops"])
    for entry in facts["ops"]:
        assert (entry["evidence"] == EXECUTED) == (entry["op"] in KERNELS)
    assert {entry["evidence"] for entry in facts["phases"]} <= set(EVIDENCE)


def test_a_wrong_form_of_an_op_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    form = FORMS["update.step"]
    monkeypatch.setitem(FORMS, "update.step", lambda *a, **k: form(*a, **k) + form(*a, **k))
    report = three_ways.report("dpsgd")
    assert not report.facts["execution"]["agrees"]
    assert "DIFFERS" in report.summary


def test_an_added_operation_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    learn = AdaClip.learn

    def more(self: AdaClip, memory: Any, gradients: Any) -> None:
        learn(self, memory, gradients)
        gradients[0].neg_()

    monkeypatch.setattr(AdaClip, "learn", more)
    assert not three_ways.report("adaclip").facts["execution"]["agrees"]


def test_what_appendix_g_counts_is_reported_as_before() -> None:
    report = three_ways.report("spof")
    assert report.facts["cost"] == 364
    assert report.facts["execution"]["agrees"]
    assert "seconds" not in report.facts["execution"]


@pytest.mark.parametrize("noise", ["cdt", "table"])
def test_other_sources_of_noise_are_counted_and_run(noise: str) -> None:
    report = three_ways.report("dpsgd", size=(6, 3), noise=noise)
    assert report.facts["noise"] == noise
    assert report.facts["execution"]["agrees"]
    assert math.isinf(report.facts["epsilon"]["certified"]) == (noise == "table")


def test_a_ring_is_counted_in_closed_form() -> None:
    report = three_ways.report("dpsgd", size=(6, 3), noise="ring")
    assert report.facts["execution"] is None
    assert "update: made ahead" in {item["item"] for item in report.facts["items"]}


def test_a_convolution_is_counted_in_closed_form() -> None:
    report = three_ways.report("gredp-published", size=(6, 3), layer="conv")
    lines = {item["item"]: item["kind"] for item in report.facts["items"]}
    assert lines["clip and sum: transforms"] == "modelled"
    assert report.facts["execution"] is None
    with pytest.raises(InvalidInput, match="no parameter is in the frequency domain"):
        three_ways.report("gredp", size=(6, 3), layer="dense")
    with pytest.raises(InvalidInput, match="layer: expected none with the steps"):
        three_ways.report("spof", size=(6, 3), layer="conv")
