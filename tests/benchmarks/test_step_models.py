"""The step benchmark: every model trains one private step, the tiny relatives included."""

from __future__ import annotations

import pytest
import torch

from benchmarks.step_cases import NOISE, finish_timer, private
from benchmarks.step_models import TASKS
from dpkern.engine.parameter import source_of

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", [name for name, task in TASKS.items() if task.small is not None])
def test_the_tiny_relative_of_every_model_trains(name: str) -> None:
    small = TASKS[name].small
    assert small is not None
    runner = private(small, lr=1e-3).begin(NOISE)
    before = [p.detach().clone() for p in runner.model.parameters()]
    runner.step()
    after = runner.model.parameters()
    assert any(not torch.equal(p, b) for p, b in zip(after, before, strict=True))


def test_sums_are_told_from_noise_and_update_in_replayed_steps_too() -> None:
    runner = private(TASKS["tiny"], lr=1e-3).begin(NOISE)
    with finish_timer(runner):
        steps = [runner.step() for _ in range(6)]
    for forward, backward, sums, update in steps:
        assert min(forward, backward, sums, update) > 0
    first = next(iter(runner.model.parameters()))
    assert source_of(first).capture.program.replays > 2
