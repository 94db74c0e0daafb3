"""Replayed steps in exact arithmetic: integers that the record alone decides, as recorded ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpkern.engine.exact_sums import Aim
from dpkern.engine.program import arithmetic
from dpkern.ops import clip, direct, testing
from dpkern.ops.backends import cpu
from tests.engine.replayed_loops import Loop, Net, both, loop
from tests.engine.test_exact_sums import M, norm_square

SIGMA = 1.1
B = 8


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    """The loss of ``Loop.one``."""
    return F.cross_entropy(output, target) * 1


class Seen:
    """Keep the integers of each step before their noise."""

    def __init__(self) -> None:
        self.sums: list[Tensor] = []
        self.norms: list[Tensor] = []

    def added(self, result: clip.ClipResult) -> None:
        assert (result.arithmetic, result.bounded_by) == ("exact", "proved")
        self.norms.append(result.norms.clone())

    def summed(self, sums: list[Tensor]) -> None:
        assert all(total.dtype in (torch.int32, torch.int64) for total in sums)
        self.sums.append(torch.cat([total.long().flatten() for total in sums]))


class Flat(nn.Sequential):
    """Layers of one position, with a bias."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(20, 9), nn.Tanh(), nn.Linear(9, 3))


class Wide(nn.Module):
    """A layer over enough positions for operands that are rounded to integers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("grid", torch.linspace(-3.0, 3.0, 33 * 64).view(33, 64))
        self.inner, self.last = nn.Linear(64, 70), nn.Linear(70, 3)
        assert direct.rounds_operands(33, 64, 70) or testing.available_isas()[-1] == "amx"

    def forward(self, x: Tensor) -> Tensor:
        spread = torch.sin(x.flatten(1).sum(1)[:, None, None] * self.grid)
        return self.last(torch.tanh(self.inner(spread)).mean(1))


def exact(replayed: bool, **options: Any) -> tuple[Loop, Seen]:
    """A run whose weights stay, with a watched step."""
    options = {
        "arithmetic": "exact",
        "noise_multiplier": SIGMA,
        "loss_reduction": "sum",
        "numbers": {"lr": 0.0},
    } | options
    run, seen = loop(replayed, **options), Seen()
    run.engine.step.watch(seen)
    return run, seen


def one(run: Loop, weights: Tensor) -> None:
    """Take a step on the next batch, each of whose losses has its weight."""
    x, y = next(run.batches())
    run.optimizer.zero_grad()
    losses = F.cross_entropy(run.module(x), y, reduction="none")
    (losses * weights[: len(losses)]).sum().backward()
    run.optimizer.step()


ADVERSARIAL = torch.tensor([1e18, 1e-30, 0.0, 1.0, 1e6, -3.0, 1e-6, 0.5])


@pytest.mark.parametrize("make", [Net, Flat, Wide])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_record_changes_a_replayed_sum_by_its_own_integers(make: Any, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = {}
        for replayed in (True, False):
            # The data set is one batch: all steps are over the same records, in one order.
            run, seen = exact(replayed, make=make, rows=B, batch=B)
            for _ in range(4):
                one(run, ADVERSARIAL)
            for b in range(B):
                without, alone = ADVERSARIAL.clone(), torch.zeros(B)
                without[b], alone[b] = 0.0, ADVERSARIAL[b]
                one(run, without)
                one(run, alone)
            assert (run.replays > 16) is replayed, run.engine.capture.program.reason
            found[replayed] = seen.sums
            whole = seen.sums[3]
            for b in range(B):
                rest, mine = seen.sums[4 + 2 * b], seen.sums[5 + 2 * b]
                assert torch.equal(whole - rest, mine)
                assert norm_square(mine) <= M * M
            assert norm_square(seen.sums[5]) > (0.998 * M) ** 2  # the largest record is clipped
        assert all(map(torch.equal, found[True], found[False]))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("sizes", [(8,), (1,), (3,), (5,)])
def test_physical_batches_add_up_to_the_same_integers(sizes: Sequence[int]) -> None:
    # Gradients of these numbers are exact, whatever the batch: only the sums are looked at.
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(5, 4)
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.copy_((parameter * 8).round() / 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x)
            return out

    expected = None
    for size in (8, *sizes):
        run, seen = exact(True, make=Whole, rows=B, batch=B, max_physical_batch_size=size)
        for _ in range(7):
            for x, _ in run.loader:
                run.optimizer.zero_grad()
                run.module(x).sum().backward()
                run.optimizer.step()
        if size > 1:  # one sample has none to be apart from: no probe sees its uses
            assert run.replays > 0
            assert run.engine.capture.program.reason == ""
        expected = seen.sums[-1] if expected is None else expected
        assert all(torch.equal(sums, expected) for sums in seen.sums)


class Twice(Net):
    """A layer that is used twice, whose gradients are joined."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = True


@pytest.mark.parametrize("make", [Net, Twice, Flat])
@pytest.mark.parametrize("most", [1, 3, 5, 7, 8])
def test_sums_that_may_exceed_32_bits_become_wider(
    make: type[nn.Module], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arithmetic, "most_samples", lambda plan: most)
    assert both(make=make, arithmetic="exact").reasons[-1] == ""
    for size in (4, 3):  # physical batches, of which 32 bits hold one or none, or the last alone
        run = both(make=make, arithmetic="exact", max_physical_batch_size=size, steps=24)
        assert run.reasons[-1] == ""


@pytest.mark.parametrize("cuts", [(2, 8), (6, 8), (2, 7, 8), (5, 8)])
def test_wide_sums_leave_those_of_other_pieces_alone(
    cuts: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arithmetic, "most_samples", lambda plan: 3)
    found = {}
    for replayed in (True, False):
        run = loop(replayed, arithmetic="exact", loss_reduction="sum")
        batches = run.batches()
        for _ in range(6):
            x, y = next(batches)
            for first, last in zip((0, *cuts), cuts, strict=False):
                F.cross_entropy(
                    run.module(x[first:last]), y[first:last], reduction="sum"
                ).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
        assert (run.replays > 0) is replayed, run.engine.capture.program.reason
        found[replayed] = run.weights
    assert all(map(torch.equal, found[True], found[False]))


MANY = 2**31 // M + 60
"""Samples whose sum 32 bits cannot hold if each has its whole norm in one entry."""


class OneEntry(nn.Module):
    """A layer of one weight, to which all samples have large gradients of one sign."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(1e3 + x[:, 0, :1])
        return out


def test_samples_of_recorded_batches_between_replayed_ones_count() -> None:
    found = {}
    for replayed in (True, False):
        options: dict[str, Any] = {"rows": MANY, "batch": MANY, "arithmetic": "exact"}
        options |= {"max_physical_batch_size": MANY // 3 + 1, "noise_multiplier": SIGMA}
        run = loop(replayed, make=OneEntry, loss_reduction="sum", **options)
        program = run.engine.capture.program
        for step in range(5):
            for piece, (x, _) in enumerate(run.loader):
                program.enabled = replayed and (step < 3 or piece != 1)
                run.optimizer.zero_grad()
                run.module(x).sum().backward()
                run.optimizer.step()
                if step == 4:
                    assert (program.reason == "") is (replayed and piece != 1)
        found[replayed] = run.weights
    assert all(map(torch.equal, found[True], found[False]))


@pytest.mark.parametrize("size", [MANY, MANY - 40, MANY // 2])
def test_sums_beyond_32_bits_are_right(size: int) -> None:
    run, seen = exact(True, make=OneEntry, rows=MANY, batch=MANY, max_physical_batch_size=size)
    for _ in range(4):
        for x, _ in run.loader:
            run.optimizer.zero_grad()
            run.module(x).sum().backward()
            run.optimizer.step()
    assert run.replays > 0
    (total,) = seen.sums[-1].tolist()
    assert total > 2**31
    assert MANY * 0.999 * M < total <= MANY * M


def test_a_program_that_aims_beyond_the_bound_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class One(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Flatten(), nn.Linear(20, 1, bias=False))

    def largest() -> float:
        run, seen = exact(True, make=One, rows=2, batch=2)
        for _ in range(7):
            x, _ = next(run.batches())
            run.optimizer.zero_grad()
            (run.module(x)[:, 0] * torch.tensor([1e3, 0.0])).sum().backward()
            run.optimizer.step()
        assert run.replays > 0
        return math.sqrt(norm_square(seen.sums[-1]))

    assert largest() <= M
    monkeypatch.setattr(
        arithmetic.SumArithmetic, "aims", lambda *_: (Aim(SIGMA / 2**20, 1.01 * M, True),)
    )
    assert largest() > M


@pytest.mark.skipif(direct.look("quick") is None, reason="no compiled module")
def test_what_was_tested_stays_tested_in_replayed_steps() -> None:
    with cpu.use_own_products(True):  # libraries round by the place in memory on some processors
        _stays_tested()


def _stays_tested() -> None:
    words = {}
    for replayed in (True, False):
        run, _ = exact(replayed, make=Flat, loss_reduction="mean", max_physical_batch_size=B)
        x, y = torch.randn(B, 4, 5), torch.randint(3, (B,))
        found = run.engine.validate(None, x, targets=y, loss=mean_loss)
        assert found is not None
        assert found.word != "not invariant"
        assert not {"arange", "floor_divide"} & {each.operation for each in found.operations}
        run.train(6)
        assert (run.replays > 0) is replayed
        run.engine.step.ledger._seeded = False
        words[replayed] = run.engine.step.certify(1e-5).notes
        assert any("tested" in note for note in words[replayed])
        assert not any("other steps" in note for note in words[replayed])
    assert words[True] == words[False]


@pytest.mark.parametrize("change", ["another loss", "another shape", "other modes", "products"])
def test_replayed_steps_that_are_no_longer_what_was_tested_say_so(change: str) -> None:
    notes = {}
    for replayed in (True, False):
        run, _ = exact(replayed, make=Net, loss_reduction="mean", max_physical_batch_size=B)
        x, y = torch.randn(B, 4, 5), torch.randint(3, (B,))
        run.engine.validate(None, x, targets=y, loss=mean_loss)
        run.train(5)
        if change == "another loss":
            run.losses = 2
        elif change == "another shape":
            run.module.skips = True
        elif change == "other modes":
            run.module.eval()
        with cpu.use_own_products(False) if change == "products" else nullcontext():
            run.train(1)
        notes[replayed] = run.engine.step.certify(1e-5).notes
        assert any("other steps" in note for note in notes[replayed])
    assert notes[True] == notes[False]


def test_padded_rows_are_no_samples() -> None:
    run, seen = exact(True, make=Flat, loss_reduction="mean", max_physical_batch_size=B)
    x, y = torch.randn(B, 4, 5), torch.randint(3, (B,))
    run.engine.validate(None, x, targets=y, loss=mean_loss)
    run.train(6)
    assert run.replays > 0
    assert {len(norms) for norms in seen.norms} == {B}
    assert run.engine.step.nonfinite == 0


def test_an_audit_sees_the_norms_of_the_gradients() -> None:
    found = []
    for replayed in (True, False):
        run, seen = exact(replayed, make=Net)
        run.train(6)
        found.append(seen.norms)
        assert all(0 < float(norm) < math.inf for norms in seen.norms for norm in norms)
    assert all(map(torch.equal, *found))


def test_batches_after_a_test_that_ended_are_counted_whole() -> None:
    # Rows that filled the last tested batch up are none of the next one's.
    run, seen = exact(False, make=Flat, loss_reduction="mean", max_physical_batch_size=B)
    x, y = torch.randn(B, 4, 5), torch.randint(3, (B,))
    run.engine.validate(None, x, targets=y, loss=F.cross_entropy)  # not the loss of the loop
    run.train(3)
    assert {len(norms) for norms in seen.norms} == {B}
