"""Loops whose whole step, or whose optimizer's step, is compiled, as torch's recipes do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.engine.replayed_loops import Loop, loop

# The compiler makes an object of every autograd function and looks at .grad of the taps: torch
# warns of both.
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]
STEPS = 6


class Small(nn.Module):
    """Two layers over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(F.relu(self.first(x))).mean(1)
        return out


def train(run: Loop, compiled: str) -> Loop:
    def update() -> None:
        run.optimizer.step()

    def step(x: Tensor, y: Tensor) -> None:
        run.optimizer.zero_grad()
        F.cross_entropy(run.module(x), y).backward()
        changed()

    changed: Any = torch.compile(update, backend="aot_eager") if compiled == "update" else update
    called: Any = torch.compile(step, backend="aot_eager") if compiled == "step" else step
    batches = run.batches()
    for _ in range(STEPS):
        called(*next(batches))
    return run


@pytest.mark.parametrize("arithmetic", ["exact", "float"])
@pytest.mark.parametrize("compiled", ["update", "step"])
def test_they_train_as_loops_that_are_not_compiled(compiled: str, arithmetic: str) -> None:
    torch.compiler.reset()
    runs = [
        train(loop(True, make=Small, arithmetic=arithmetic), kind) for kind in (compiled, "nothing")
    ]
    assert runs[0].engine.step.steps == STEPS
    for one, other in zip(runs[0].weights, runs[1].weights, strict=True):
        assert torch.allclose(one, other, atol=1e-4)
    assert runs[0].engine.get_epsilon(1e-5) == runs[1].engine.get_epsilon(1e-5)
    graphs = runs[0].engine.capture.graphs
    assert (graphs.inside > 0) == (compiled == "step")
