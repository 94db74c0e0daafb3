"""A whole engine step as a subject: what it reads, what is caught, what is refused.

Keys come from the operating system. Audits of sound steps ask for confidence 1 - 1e-7, so that a
false alarm has at most that chance; what is broken is broken by so much that it is always seen.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from dpkern.audit.auditing import run
from dpkern.audit.claims import GaussianDP, NoClaim
from dpkern.audit.subjects.model import ModelStep, within_bound
from dpkern.base.errors import InvalidInput, PrivacyError
from dpkern.base.rng import Purpose
from dpkern.ops import direct
from dpkern.ops.backends import cpu
from dpkern.privacy.mechanisms import DPSGD, AdaClip
from dpkern.step import noise as _step_noise
from dpkern.step import step

SURE = 1 - 1e-7
LAYERS = 4


@pytest.fixture
def own_products() -> Iterator[None]:
    """Products of dpkern's: those of libraries round by the place in memory on some processors."""
    with cpu.use_own_products(True) if direct.look("quick") is not None else nullcontext():
        yield


def mixing(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss in which every record's gradient depends on the others."""
    return nn.functional.cross_entropy(outputs * outputs.sum(0), targets)


def subject(**changed: Any) -> ModelStep:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        x, y = torch.randn(4, 6), torch.arange(4) % 3
    bound: Any = changed.pop("bound", 1.0)
    numbers = {"noise_multiplier": changed.pop("noise", 1.0), "max_grad_norm": bound}
    plan = {"clipping": changed.pop("clipping", "flat"), "arithmetic": changed.pop("as_", "float")}
    given: dict[str, Any] = {
        "module": module,
        "loss": nn.CrossEntropyLoss(),
        "batch": (x[:3], y[:3]),
        "canary": (x[3:], y[3:]),
        "mechanism": DPSGD(**numbers, **plan),
        "magnified": 1000.0,
        "coordinates": 8,
    }
    return ModelStep(**given | changed)


@pytest.mark.usefixtures("own_products")
@pytest.mark.parametrize(("clipping", "as_"), [("flat", "float"), ("per_layer", "exact")])
def test_readings_hold_the_whole_signal_with_noise_1(clipping: str, as_: str) -> None:
    made = subject(clipping=clipping, as_=as_, bound=1.0 if clipping == "flat" else [0.5] * LAYERS)
    assert made.certified.mu == pytest.approx(1.0, abs=1e-4)
    assert made.noise_sd() == 1.0
    shift = torch.from_numpy(made._rig.shift)
    assert float(shift.norm()) == pytest.approx(1.0, abs=1e-3)  # at the bounds, in every group
    assert all(check.passed for check in made.checks(quick=True))
    without, present = made.release(False, 200, 0), made.release(True, 200, 0)
    assert without.unique(dim=0).shape == without.shape
    # 400 draws per coordinate: the deviations below are 8 standard errors.
    spread = torch.cat([without - without.mean(0), present - present.mean(0)]).std(0)
    assert float((spread - 1).abs().max()) < 8 / (2 * 400) ** 0.5
    moved = present.mean(0) - without.mean(0)
    assert float((moved - shift).abs().max()) < 8 * (2 / 200) ** 0.5


def test_a_certificate_stands_where_groups_accounted_as_one_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four groups of bound 1 and noise 1/2 each: mu 4, of which one group has 2."""
    monkeypatch.setattr(sys.modules["dpkern.audit.auditing"], "LEAST_LEARNING", 100)
    made = subject(clipping="per_layer", bound=[1.0] * LAYERS, noise=0.25, claim=GaussianDP(2.0))
    assert made.certified.mu == pytest.approx(4.0, abs=1e-4)
    layers = ("covariance", "canary", "sensitivity")
    found = run(made, runs=300, confidence=SURE, quick=True, layers=layers)
    assert found.contradicts_claim, found.sentence
    assert not found.contradicts_certificate, found.sentence
    assert not found.failed
    for now, before in zip(made._rig.parameters, made.module.parameters(), strict=True):
        assert torch.equal(now.detach(), before.detach())


def test_noise_used_twice_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_of(make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda plan, key, steps, *rest, **more: make(plan, key, 1, *rest, **more)

    monkeypatch.setattr(sys.modules["dpkern.audit.auditing"], "LEAST_LEARNING", 100)
    monkeypatch.setattr(step, "noise_of", first_of(_step_noise.noise_of))
    monkeypatch.setattr(step, "streams_of", first_of(_step_noise.streams_of))
    found = run(subject(), runs=200, quick=True, layers=("covariance",))
    assert "noise in every direction" in {check.name for check in found.failed}


def test_a_loss_that_mixes_records_fails_the_difference() -> None:
    checks = {check.name: check for check in subject(loss=mixing).checks(quick=True)}
    assert checks["remove one"].passed is False
    assert checks["bound"].passed


@pytest.mark.parametrize("as_", ["float", "exact"])
def test_a_contribution_above_its_bound_is_seen(as_: str) -> None:
    made = subject(as_=as_)
    plan = made._rig.plan
    unit = plan.units[0] or 0.0
    exact = [torch.zeros(block.shape, dtype=torch.float64) for block in plan.blocks]
    most = plan.blocks[0].integer_bound or 0
    exact[0][0, 0] = most * unit
    assert within_bound(plan, exact).passed
    exact[0][0, 0] = (most + 1) * unit if as_ == "exact" else 1.001
    assert within_bound(plan, exact).passed is False


@pytest.mark.parametrize("as_", ["float", "exact"])
def test_a_second_backward_pass_adds_before_the_clip(as_: str) -> None:
    made = subject(as_=as_)
    found = made._rig.given_twice()
    assert found.passed
    assert 0.99 < found.numbers["largest"] <= 1
    # What a trainer gives that clips each pass by itself.
    made._rig.twice = [2 * part for part in made._rig.alone]
    assert made._rig.given_twice().passed is False
    made._rig.twice = PrivacyError("loop", expected="one pass", got="two", remedy="Stop.")
    assert made._rig.given_twice().text == "refused: one pass"


@pytest.mark.usefixtures("own_products")
def test_exact_audits_say_what_is_certified_of_the_bits() -> None:
    made = subject(as_="exact")
    checks = {check.name: check for check in made.checks(quick=True)}
    assert checks["batch invariance"].passed
    assert "certified for released bits, batch invariance tested: " in (
        checks["batch invariance"].text
    )
    made.release(True, 1, 0)
    assert made._rig.engine.step.certify(1e-5).certified_for == (
        "released bits, batch invariance tested"
    )
    masked = nn.Sequential(nn.Linear(6, 8), nn.Dropout(), nn.Linear(8, 3))
    other = {c.name: c for c in subject(as_="exact", module=masked).checks(quick=True)}
    assert other["batch invariance"].passed is None
    assert "if a record's gradient depends on it alone" in other["batch invariance"].text
    assert "batch invariance" not in {c.name for c in subject().checks(quick=True)}


def test_engines_and_keys_stay_in_their_process() -> None:
    made = subject()
    made.release(True, 1, 0)
    other = pickle.loads(pickle.dumps(made))
    assert "_rig" not in vars(other)
    ours, theirs = made._rig.engine.step.key, other._rig.engine.step.key
    assert ours.stream(Purpose.NOISE, 1).key != theirs.stream(Purpose.NOISE, 1).key


def test_an_empty_draw_and_a_mean_over_it() -> None:
    empty = (torch.zeros(0, 6), torch.zeros(0, dtype=torch.int64))
    made = subject(batch=empty, loss=nn.CrossEntropyLoss(reduction="sum"), loss_reduction="sum")
    assert made.release(False, 3, 0).isfinite().all()
    assert all(check.passed for check in made.checks(quick=True))


def test_without_noise_nothing_is_certified() -> None:
    made = subject(mechanism=DPSGD(noise_multiplier=0.0, max_grad_norm=1.0, arithmetic="float"))
    assert isinstance(made.certified, NoClaim)
    assert made.noise_sd() is None


def test_refused() -> None:
    made = subject()
    with pytest.raises(InvalidInput, match="canary"):
        replace(made, canary=(made.batch[0], made.batch[1]))
    with pytest.raises(InvalidInput, match="does not adapt"):
        replace(made, mechanism=AdaClip(noise_multiplier=1.0, expected_batch_size=4.0))
    with pytest.raises(InvalidInput, match="gradient"):
        replace(made, magnified=0.0).release(False, 1, 0)
