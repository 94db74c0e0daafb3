"""Audits of whole training loops: right ones move their sums by C at most, others are named.

The loops stand in ``tests/audit/audited_loops.py``. Some of the wrong ones the engine refuses by
its own guards: then nothing was released, which is as good. Those that must be contradicted are
wrong where no guard can look.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

from dpkern import cli
from dpkern.audit.loop import LoopFindings
from dpkern.audit.subjects.loop import audit_loop, is_loop
from dpkern.audit.subjects.loop_compare import hand_out_check
from dpkern.audit.subjects.loop_draws import AlignedDraws
from dpkern.audit.subjects.loop_records import AuditedRecords, Content, ForcedMasks
from dpkern.audit.subjects.loop_run import LoopObserver, LoopSetting, LoopTrace
from dpkern.audit.subjects.loop_state import (
    MODEL,
    MODULE,
    OPTIMIZER,
    VARIABLE,
    differences,
    snapshot,
)
from dpkern.base.errors import InvalidInput, PrivacyError
from dpkern.engine.observing import current, observed_by
from dpkern.privacy.mechanisms import DPSGD
from dpkern.step.step import DPStep
from tests.audit import audited_loops

LOOPS = Path(audited_loops.__file__)
RIGHT = (
    *("plain", "dropout", "recurrent_dropout", "attention_dropout", "noise_on_the_batch"),
    *("random_records", "workers", "physical_batches", "exact", "per_layer", "automatic"),
    *("fixed_size", "shuffled", "adaptive", "keeps_losses", "averaged_weights", "evaluates"),
    *("exits", "needs_nothing"),
)

LONG = ("plain", "dropout", "random_records", "physical_batches")
QUICK = (*LONG, "exact", "shuffled", "needs_nothing")
"""Loops of the gate; the others are audited by ``make test-slow``."""


def audited(name: str, **options: Any) -> LoopFindings:
    return audit_loop(f"{LOOPS}:{name}", **{"steps": 4, "seconds": 600.0} | options)


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in RIGHT]
)
def test_right_loops_are_not_contradicted(name: str) -> None:
    steps = 4 if name in LONG else 2
    found = audited(name, steps=steps)
    assert found.verdict == "not contradicted", found.sentence
    assert all(check.passed for check in found.checks), found.checks
    assert len(found.attacks) >= 4
    for attack in found.attacks:
        assert attack.bound == 1
        assert [step.held for step in attack.steps] == [True, False] * (steps // 2)
        for step in attack.steps:
            assert step.moved <= (1 + 2.0**-12 * step.size if step.held else 0)
    assert found.largest is not None
    assert found.largest[1].moved > 0.3


def test_noise_shows_what_the_movements_say() -> None:
    found = audited("plain")
    ratio = found.likelihood
    assert ratio is not None
    assert ratio.steps == 2
    assert ratio.certified == pytest.approx(2**0.5 / 1.1, rel=1e-6)
    (noisy,) = [attack for attack in found.attacks if attack.noise]
    moved = sum(step.moved**2 for step in noisy.steps) ** 0.5
    assert ratio.shown == pytest.approx(moved / 1.1, rel=1e-3)
    assert found.epsilon is not None
    assert 1 < found.epsilon < ratio.to_dict()["epsilon_certified"]


def test_a_clip_that_is_wrong_is_contradicted_with_step_and_parameter() -> None:
    found = audited("three_times")
    assert found.verdict == "contradicted"
    (failed,) = found.failed
    assert failed.name == "movement"
    assert 2.5 < failed.numbers["moved"] < 3.01
    assert "weight" in failed.text
    assert "1 C is certified" in failed.text
    assert found.likelihood is not None
    assert found.likelihood.shown > 2 * found.likelihood.certified


def test_weights_that_losses_change_are_named_and_move_steps_without_the_record() -> None:
    found = audited("rate_from_losses")
    failed = {check.name: check for check in found.failed}
    assert {"state", "steps without the record"} <= failed.keys()
    assert "the model remembers the record in model.0.weight" in failed["state"].text
    assert found.attacks[0].remembered is not None
    assert found.attacks[0].remembered["model.0.weight"] == MODEL


@pytest.mark.parametrize(
    ("name", "check", "text"),
    [
        ("standardised", "movement", "outlier"),
        ("mixup", "movement", "clipped sum"),
        ("bank", "steps without the record", "does not hold it"),
        ("buffer", "state", "the model remembers the record in model.seen"),
        ("temperature", "state", "another module remembers the record in scale (temperature)"),
        ("original_loader", "hand-outs", "4 of 4 steps took samples that the loader"),
    ],
)
def test_wrong_loops_are_contradicted_or_refused(name: str, check: str, text: str) -> None:
    found = audited(name)
    if found.refusal:  # what was released until then has kept its bound
        assert found.verdict in ("refused", "not contradicted"), found.sentence
        assert found.steps < 4
        return
    assert found.verdict == "contradicted"
    assert any(text in c.text for c in found.failed if c.name == check), found.sentence


def test_samples_of_another_loader_are_named() -> None:
    trace = LoopTrace(fresh=[True, False, False, False], elsewhere=[False, False, False, True])
    trace.sums, trace.sampling, trace.strays = [[]] * 4, {"sampling": "poisson"}, 2
    found = hand_out_check(trace)
    assert found.passed is False
    assert "2 of 4 steps took samples that the loader of make_private did not yield" in found.text
    assert "1 steps were accounted as samples from elsewhere" in found.text
    assert "2 forward passes in training mode" in found.text


def test_a_record_is_replaced_where_the_loop_draws_by_the_size_of_the_batch() -> None:
    found = audited("numpy_noise")
    assert found.passed
    assert {attack.bound for attack in found.attacks} == {2.0}
    assert any("draws other random numbers" in note for note in found.notes)
    assert max(step.moved for a in found.attacks for step in a.steps) > 1


def test_refusals_before_and_after_releases() -> None:
    found = audited("batch_norm")
    assert (found.verdict, found.passed, found.steps, found.runs) == ("refused", True, 0, 1)
    assert "UnsupportedModule" in found.sentence
    found = audited("refused_later", steps=20)
    assert (found.verdict, found.steps) == ("not contradicted", 4)
    assert "Then the engine refused to go on: PrivacyError: loop" in found.sentence


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", r"ValueError: mine \(audited_loops\.py:\d+\)"),
        ("no_engine", "called no make_private"),
        ("no_step", "at least one private step"),
        ("no_loader", "nothing says what a record is"),
        ("from_elsewhere", "samples from elsewhere in every step"),
        ("two_engines", "a second one"),
        ("not_clipped", "nothing bounds a record"),
        ("no_gradient", "a record that moves a clipped sum"),
        ("changes_by_itself", "two runs on the same records"),
    ],
)
def test_loops_that_cannot_be_audited(name: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as caught:
        audited(name, steps=20)
    assert type(caught.value) is InvalidInput
    assert caught.value.name == f"audited_loops.py:{name}"


@pytest.mark.parametrize("options", [{"steps": 0}, {"seconds": 0.0}, {"delta": 1.0}])
def test_numbers_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=next(iter(options))):
        audited("plain", **options)


def test_one_step_leaves_questions_open() -> None:
    found = audited("plain", steps=1)
    answers = {check.name: check.passed for check in found.checks}
    assert answers["movement"] is True
    assert answers["state"] is None
    assert answers["steps without the record"] is None


def test_a_budget_of_time_leaves_attacks_out_and_says_so() -> None:
    found = audited("plain", seconds=1e-3)
    assert [attack.name for attack in found.attacks] == ["largest gradient"]
    assert any("Not tried" in note and "noise on" in note for note in found.notes)


def test_loops_are_told_apart_from_releases_without_being_run(tmp_path: Path) -> None:
    for name in ("plain", "needs_nothing", "no_engine"):
        assert is_loop(f"{LOOPS}:{name}")
    for name in ("needs_records", "needs_a_keyword", "LOOPS", "Loop", "nobody"):
        assert not is_loop(f"{LOOPS}:{name}")
    broken = tmp_path / "broken.py"
    broken.write_text("def main(:\n")
    for reference in (f"{broken}:main", f"{tmp_path}/none.py:main", "dpsgd", str(LOOPS)):
        assert not is_loop(reference)


def test_the_caller_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "helper.py").write_text("COUNT = []\n")
    (tmp_path / "mine.py").write_text(
        "import os, sys, torch, helper\n"
        "from tests.audit.audited_loops import Loop\n\n\ndef main():\n"
        "    assert sys.argv == [__file__]\n    helper.COUNT.append(1)\n"
        "    assert len(helper.COUNT) == 1\n"
        "    os.chdir('/')\n    torch.set_default_dtype(torch.float64)\n"
        "    torch.set_default_dtype(torch.float32)\n    Loop().train()\n"
    )
    torch.manual_seed(3)
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    before = list(sys.argv), list(sys.path)
    assert audit_loop(f"{tmp_path}/mine.py:main", steps=2).passed
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.random.get_state()[1].tolist() == states[1]
    assert random.getstate() == states[2]
    assert (list(sys.argv), list(sys.path)) == before
    assert Path.cwd() == tmp_path
    assert not {"helper", "dpkern_loop_mine"} & set(sys.modules)
    assert sorted(os.listdir(tmp_path)) in (
        ["helper.py", "mine.py"],
        ["__pycache__", "helper.py", "mine.py"],
    )


# The seam.


def test_nobody_observes_outside_of_a_block() -> None:
    assert current() is None
    observer = LoopObserver(LoopSetting(path=LOOPS, symbol="plain", steps=1), None)
    with observed_by(observer):
        assert current() is observer
        with pytest.raises(PrivacyError, match="one observer at a time"), observed_by(observer):
            pass
    assert current() is None


def test_a_step_with_a_secret_key_is_not_watched() -> None:
    mechanism = DPSGD(noise_multiplier=1.0, max_grad_norm=1.0)
    step = DPStep(mechanism, [torch.zeros(3)], expected_batch_size=2.0, sample_rate=0.5)
    observer = LoopObserver(LoopSetting(path=LOOPS, symbol="plain", steps=1), None)
    with pytest.raises(PrivacyError, match="certifies nothing"):
        step.watch(observer)
    assert not step.watched


def test_an_observed_run_certifies_nothing_and_says_why() -> None:
    class Kept(LoopObserver):
        def made(self, capture: Any, step: DPStep, *parts: Any) -> None:
            super().made(capture, step, *parts)
            steps.append(step)

    steps: list[DPStep] = []
    setting = LoopSetting(path=LOOPS, symbol="plain", steps=100, quiet=False)
    with observed_by(Kept(setting, None)):
        audited_loops.plain()
    (step,) = steps
    assert step.watched
    assert step.steps == 12
    assert step.epsilon(1e-5) == math.inf
    certificate = step.certify(1e-5)
    assert certificate.epsilon == math.inf
    assert "an audit sees the sums of this run without noise" in certificate.notes[0]
    assert "an audit sees the sums" in step.report(1e-5)["non_private"]
    assert 0 < step.epsilon_if_seed_secret(1e-5) < 10


# The parts.


def _others(draw: Any, place: int, rows: int = 1, batch: int = 6) -> tuple[Tensor, Tensor]:
    """Return the draws for the others with a record, and without it."""
    torch.manual_seed(4)
    noting = AlignedDraws(lambda: 0, None, lambda: None)
    with noting:
        whole = draw(batch * rows)
        following = torch.rand(2)
    torch.manual_seed(4)
    with AlignedDraws(lambda: 0, noting.sizes, lambda: place):
        without = draw((batch - 1) * rows)
        assert torch.equal(torch.rand(2), following)
    kept = [i for i in range(batch * rows) if i // rows != place]
    return whole[kept], without


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("place", [0, 2, 5])
@pytest.mark.parametrize(
    "draw",
    [
        lambda n: dropout(torch.ones(n, 5), 0.5),
        lambda n: torch.rand(n, 3),
        lambda n: torch.randn(n, 3),
        lambda n: torch.randint(0, 9, (n,)),
        lambda n: torch.randn_like(torch.ones(n, 40)),
        lambda n: torch.empty(n, 7).normal_(),
        lambda n: torch.bernoulli(torch.full((n, 2), 0.5)),
        lambda n: torch.multinomial(torch.ones(n, 4), 2),
        lambda n: torch.rand(3, n, 2).transpose(0, 1),
    ],
    ids=(
        *("dropout", "rand", "randn", "randint", "randn_like", "normal_", "bernoulli"),
        *("multinomial", "second dimension"),
    ),
)
def test_the_others_draw_what_they_drew(draw: Any, place: int, rows: int) -> None:
    whole, without = _others(draw, place, rows)
    assert torch.equal(whole, without)


def test_a_pass_that_only_one_run_makes_leaves_its_draws_alike() -> None:
    torch.manual_seed(4)
    noting = AlignedDraws(lambda: 0, None, lambda: None)
    with noting:
        whole = torch.rand(6, 3)
    with AlignedDraws(lambda: 0, noting.sizes, lambda: 2):
        torch.rand(5, 3)
        torch.manual_seed(4)
        without = torch.rand(5, 3)
    assert torch.equal(without, whole[[0, 1, 3, 4, 5]])


def test_a_permutation_without_a_record_keeps_the_order_of_the_others() -> None:
    torch.manual_seed(4)
    noting = AlignedDraws(lambda: 0, None, lambda: None)
    with noting:
        whole = torch.randperm(6)
    torch.manual_seed(4)
    with AlignedDraws(lambda: 0, noting.sizes, lambda: 2):
        without = torch.randperm(5)
    names = torch.tensor([0, 1, 3, 4, 5])
    assert torch.equal(names[without], whole[whole != 2])


def test_masks_hold_the_targets_in_even_batches_and_keep_the_others() -> None:
    drawn = torch.tensor([1, 4, 7, 9])
    for poisson in (True, False):
        whole = ForcedMasks((4, 5), None, 10, poisson=poisson)
        without = ForcedMasks((4, 5), 5, 10, poisson=poisson)
        for number in range(4):
            one = whole.kept(number, whole.drawn(number, drawn)).tolist()
            two = without.kept(number, without.drawn(number, drawn)).tolist()
            assert [i for i in one if i != 5] == two
            assert {4, 5} <= set(one) if number % 2 == 0 else not {4, 5} & set(one)
            assert poisson or len(one) == 4
            assert without.places.get(number) == (one.index(5) if number % 2 == 0 else None)
    alone = ForcedMasks((4,), None, 10, poisson=True)
    for number in range(2):
        batch = alone.drawn(number, torch.tensor([4])).tolist()
        assert set(batch) - {4}  # never the target alone, and never nothing


def test_records_share_no_random_numbers() -> None:
    x, y = audited_loops.records(4)
    one = AuditedRecords(audited_loops.Noisy(x, y), {})
    two = AuditedRecords(audited_loops.Noisy(x, y), {3: Content(1, 1000.0)})
    first = torch.get_rng_state()
    drawn = [one[i][0] for i in (0, 1, 2, 0)]
    assert torch.equal(torch.get_rng_state(), first)
    assert not torch.equal(drawn[0], drawn[3])  # every visit draws anew
    other = [two[i][0] for i in (0, 2, 0)]
    assert all(
        torch.equal(a, b) for a, b in zip(other, (drawn[0], drawn[2], drawn[3]), strict=True)
    )
    moved, label = two[3]
    assert moved.abs().max() > 100
    assert label == y[1]
    assert two.x is x
    assert len(two) == 4


def test_what_is_remembered_is_told_apart_by_who_holds_it() -> None:
    def holders(value: float) -> Any:
        module = nn.Linear(2, 2)
        module.register_buffer("seen", torch.full((2,), value))
        module.bank = [torch.full((3,), value)]
        module.scale = value
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        optimizer.state[module.weight]["momentum_buffer"] = torch.full((2, 2), value)
        head, metric = nn.Linear(2, 2), nn.Module()
        nn.init.constant_(head.bias, value)
        metric.register_buffer("total", torch.full((1,), value))
        for part in (module, head):
            nn.init.ones_(part.weight)
        nn.init.zeros_(module.bias)
        local = {"losses": [value], "array": np.full(2, value), "text": "same"}
        assert local
        return snapshot(module, optimizer, [sys._getframe()])

    assert differences(holders(1.0), holders(1.0)) == {}
    found = differences(holders(1.0), holders(2.0))
    assert found["model.seen"] == MODEL
    assert found["model.bank[0]"] == MODEL
    assert found["model.scale"] == VARIABLE
    assert found["optimizer.state[0]['momentum_buffer']"] == OPTIMIZER
    assert found["head (holders).bias"] == MODULE
    assert found["metric (holders).total"] == VARIABLE
    assert found["local (holders)"] == VARIABLE
    assert "model.weight" not in found


# The command line.


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["audit", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(
    ("name", "code", "verdict"),
    [
        ("keeps_losses", 0, "Nothing contradicts the certificate"),
        ("three_times", 1, "is contradicted in 2 steps"),
        ("batch_norm", 0, "refused audited_loops.py:batch_norm before any release"),
    ],
)
def test_verdicts_and_exit_codes(
    capsys: pytest.CaptureFixture[str], name: str, code: int, verdict: str
) -> None:
    found, out, _ = command(capsys, f"{LOOPS}:{name}", "--steps", "2", "--json")
    assert found == code
    assert out.count("\n") == 1
    facts = json.loads(out, parse_constant=pytest.fail)
    assert verdict in facts["verdict"]
    assert facts["passed"] is (code == 0)
    assert facts["result"] in ("not contradicted", "contradicted", "refused")


def test_the_verdict_comes_first_and_prints_stay_out(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    reference = f"{LOOPS}:keeps_losses"
    code, out, err = command(capsys, reference, "--steps", "2", "--html", str(page))
    assert code == 0
    assert out.startswith(
        "Audit of the training loop audited_loops.py:keeps_losses\nNothing contradicts"
    )
    for part in ("in units of C", "Step by step", "State that differs", "likelihood", "Checks"):
        assert part in out
    assert "losses (keeps_losses)" in out
    assert "Wrote" in err
    assert "dpkern · audit report" in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((f"{LOOPS}:raises",), "audited_loops.py:raises"),
        ((f"{LOOPS}:no_engine",), "audited_loops.py:no_engine"),
        ((f"{LOOPS}:plain", "--steps", "0"), "steps"),
        ((f"{LOOPS}:plain", "--seconds", "-1"), "seconds"),
        ((f"{LOOPS}:plain", "--runs", "100"), "runs"),
        ((f"{LOOPS}:plain", "--claim", "1"), "claim"),
        ((f"{LOOPS}:plain", "--workers", "2"), "workers"),
        ((f"{LOOPS}:plain", "--backend", "cpu"), "backend"),
        ((f"{LOOPS}:needs_records", "--seconds", "5"), "seconds"),
        (("dpsgd", "--seconds", "5"), "seconds"),
    ],
)
def test_refused(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], name: str) -> None:
    code, out, _ = command(capsys, *arguments, "--json")
    assert code == 2
    error = json.loads(out)["error"]
    assert error["name"] == name
    assert error["type"] == "InvalidInput"
    assert error["remedy"]
