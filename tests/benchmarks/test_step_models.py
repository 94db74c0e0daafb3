"""The step benchmark: every model trains one private step, the tiny relatives included."""

from __future__ import annotations

import pytest
import torch

from benchmarks.step_cases import NOISE, private
from benchmarks.step_models import TASKS

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
