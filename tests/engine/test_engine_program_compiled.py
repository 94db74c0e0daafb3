"""Replay of uses inside compiled graphs: the same bits as the recorded path makes of their taps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .replayed_loops import Loop, both
from .test_engine_compiled import Net, Tied, Whole

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


def compiled(build: Callable[[], Any], **attributes: Any) -> Callable[[], nn.Module]:
    """Makes a compiled module."""

    def make() -> nn.Module:
        torch._dynamo.reset()
        module = build()
        for name, value in attributes.items():
            setattr(module, name, value)
        module.compile(backend="aot_eager")
        return module  # type: ignore[no-any-return]

    return make


class Pooled(nn.Module):
    """Images of one channel, and a layer of one position."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.groups = nn.Conv1d(4, 6, 3), nn.GroupNorm(2, 6)
        self.head, self.last = nn.Linear(6, 5), nn.Linear(5, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.groups(self.conv(x)))
        return self.last(self.head(y.mean(2)).tanh())


def inside(run: Loop) -> tuple[int, int]:
    """Uses inside and outside of graphs in the last pass."""
    graphs = run.engine.capture.graphs
    return graphs.inside, graphs.outside


@pytest.mark.parametrize("arithmetic", ["exact", "float"])
@pytest.mark.parametrize("build", [Whole, Tied, Pooled])
def test_replayed_graphs_make_the_recorded_bits(build: Any, arithmetic: Any) -> None:
    run = both(make=compiled(build), arithmetic=arithmetic)
    assert run.reasons[-1] == ""
    assert inside(run)[1] == 0


def test_parameters_of_several_uses_are_joined() -> None:
    run = both(make=compiled(Net, twice=True))
    assert run.reasons[-1] == ""


def test_uses_outside_of_graphs_are_replayed_in_front_of_those_inside() -> None:
    """A checkpointed layer and a recurrent one break the graph."""

    class Broken(Net):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.LSTM(6, 6, batch_first=True)

        def inner(self, x: Tensor) -> Tensor:
            return super().inner(x) + self.cell(super().inner(x))[0]

    run = both(make=compiled(Broken, again=False))
    assert min(inside(run)) > 0
    assert run.reasons[-1] == ""


def freeze(run: Loop) -> None:
    """Train one layer no more."""
    for parameter in run.module.extra.parameters():
        parameter.requires_grad_(False)


def thaw_norm(run: Loop) -> None:
    """Train a scale alone."""
    run.module.norm.bias.requires_grad_(False)


def another_branch(run: Loop) -> None:
    """One use more."""
    run.module.twice = True


def evaluate(run: Loop) -> None:
    """A pass of other samples, without gradients."""
    run.module.eval()
    with torch.no_grad():
        run.module(torch.ones(5, 4, 5))
    run.module.train()


def uncompile(run: Loop) -> None:
    """The same module without a graph."""
    run.module._compiled_call_impl = None


def replace(run: Loop) -> None:
    """Another tensor in place of a weight's."""
    run.module.head.weight.data = run.module.head.weight.data.clone()


def two_losses(run: Loop) -> None:
    """Two backward passes of each forward pass."""
    run.losses = 2


@pytest.mark.parametrize(
    "change", [freeze, thaw_norm, another_branch, evaluate, uncompile, replace, two_losses]
)
def test_changes_in_the_middle_lose_nothing(change: Callable[[Loop], None]) -> None:
    both(change, make=compiled(Net), steps=11)


def test_batches_of_any_size() -> None:
    run = both(make=compiled(Net), sampling="poisson", steps=14)
    assert run.replays > 5, run.reasons


def test_two_passes_over_one_batch() -> None:
    """The second pass adds gradients that no program expects."""

    def twice(run: Loop) -> None:
        one = run.one

        def again(x: Tensor, y: Tensor) -> None:
            F.cross_entropy(run.module(x.flip(1)), y).backward()
            one(x, y)

        run.one = again  # type: ignore[method-assign]

    both(twice, make=compiled(Net), steps=8)


def test_samples_that_are_not_finite_are_dropped() -> None:
    both(make=compiled(Net), nan=True)


@pytest.mark.parametrize("written", ["operand", "gradient"])
def test_operands_that_are_changed_are_refused(written: str) -> None:
    from dpkern.base.errors import PrivacyError

    run = both(make=compiled(Net))
    x, y = next(run.batches())
    F.cross_entropy(run.module(x), y).backward()
    held = next(h for h in run.engine.capture.program.run.held if h)
    held[0 if written == "operand" else 1].mul_(2)
    with pytest.raises(PrivacyError, match="in place"):
        run.optimizer.step()
