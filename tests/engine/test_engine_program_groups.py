"""Replayed steps with several clip groups: each group has its norm, its factors and its sums."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.replayed_loops import Loop, Net, both
from tests.engine.test_engine_program_exact import ADVERSARIAL, SIGMA, B, exact, one
from tests.engine.test_engine_program_joined import MODELS as JOINED
from tests.engine.test_engine_program_recurrent import LAYERS as RECURRENT
from tests.engine.test_exact_sums import norm_square

PER_LAYER: dict[str, Any] = {"clipping": "per_layer", "max_grad_norm": 1.0}


def halves(make: Any) -> dict[str, Any]:
    """Options by which the parameters are in two groups in turns: none is a layer."""
    count = len(list(make().parameters()))
    return {"clipping": "group", "clip_groups": [i % 2 for i in range(count)], "max_grad_norm": 1.0}


@pytest.mark.parametrize("groups", ["per layer", "in turns"])
@pytest.mark.parametrize("loop", ["plain", "Poisson", "parts", "nan"])
def test_the_same_bits_as_recorded(groups: str, loop: str) -> None:
    options = {
        "plain": {},
        "Poisson": {"sampling": "poisson", "steps": 24},
        "parts": {"max_physical_batch_size": 3, "steps": 24},
        "nan": {"nan": True, "steps": 16},
    }[loop]
    run = both(**(PER_LAYER if groups == "per layer" else halves(Net)), **options)
    assert run.engine.step.plan.arithmetic == "exact"
    assert run.replays > 1


@pytest.mark.parametrize("make", [*JOINED.values(), *RECURRENT.values()], ids=[*JOINED, *RECURRENT])
def test_shared_parameters_and_recurrences(make: Any) -> None:
    # Both weights of a recurrent layer have one norm only where they are in one group.
    run = both(make=make, keep_budget=0, **halves(make))
    assert run.replays > 1


def test_a_record_changes_each_group_by_its_own_bounded_integers() -> None:
    found = {}
    for replayed in (True, False):
        run, seen = exact(replayed, make=Net, rows=B, batch=B, **PER_LAYER)
        for _ in range(4):
            one(run, ADVERSARIAL)
        for b in range(B):
            alone = torch.zeros(B)
            alone[b] = ADVERSARIAL[b]
            one(run, ADVERSARIAL - alone)
            one(run, alone)
        assert (run.replays > 8) is replayed, run.engine.capture.program.reason
        found[replayed] = seen.sums
        plan, sizes = run.engine.step.plan, [w.numel() for w in run.weights]
        for b in range(B):
            mine = seen.sums[5 + 2 * b]
            assert torch.equal(seen.sums[3] - seen.sums[4 + 2 * b], mine)
            for block, part in zip(plan.blocks, mine.split(sizes), strict=True):
                assert norm_square(part) <= block.integer_bound**2
                # Each parameter of the largest record reaches its own bound.
                assert b > 0 or norm_square(part) > (0.99 * block.integer_bound) ** 2
    assert all(map(torch.equal, found[True], found[False]))


class HalfFinite(nn.Module):
    """The gradients of ``other`` are 0 / 0 for some samples, those of ``one`` never."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(20, 3), nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        out: Tensor = self.one(x) + (torch.relu(x[:, :1] + 8) * (1 + self.other(x) ** 2)).sqrt()
        return out


def test_one_group_that_is_not_finite_drops_the_sample_from_all() -> None:
    sums, dropped = {}, {}
    for replayed in (True, False):
        run, seen = exact(replayed, make=HalfFinite, **PER_LAYER)
        run.loader.dataset.tensors[0][7, 0, 0] = -9
        run.train(24)
        assert (run.replays > 1) is replayed
        sums[replayed], dropped[replayed] = seen.sums, run.engine.step.nonfinite
    assert all(map(torch.equal, sums[True], sums[False]))
    assert dropped[True] == dropped[False] > 0


def test_other_groups_in_the_middle_are_recorded_anew() -> None:
    def bounds(run: Loop) -> None:
        step = run.engine.step
        wider = tuple(2 * bound for bound in step.plan.group_bounds)
        step.mechanism = replace(step.mechanism, max_grad_norm=wider)

    run = both(bounds, steps=12, **PER_LAYER)
    assert run.replays > 5


def test_groups_of_floats_are_recorded() -> None:
    run = both(replays=False, arithmetic="float", noise_multiplier=SIGMA, **PER_LAYER)
    assert "several clip groups of floats" in run.reasons[-1]
