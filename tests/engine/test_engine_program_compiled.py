"""Replay of uses inside compiled graphs: the same bits as the recorded path makes of their taps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpkern.base.errors import PrivacyError

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
    assert graphs.reason == ""
    return graphs.inside, graphs.outside


@pytest.mark.parametrize("arithmetic", ["exact", "float"])
@pytest.mark.parametrize("build", [pytest.param(Whole, marks=pytest.mark.slow), Tied, Pooled])
def test_replayed_graphs_make_the_recorded_bits(build: Any, arithmetic: Any) -> None:
    run = both(make=compiled(build), arithmetic=arithmetic)
    assert run.reasons[-1] == ""
    assert inside(run)[1] == 0


class Transposed(nn.Module):
    """Parameters whose per-sample gradients come out of graphs transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.norm = nn.Parameter(torch.randn(4, 5)), nn.LayerNorm((4, 5))
        self.conv, self.scale = nn.Conv1d(5, 6, 3), nn.Parameter(torch.ones(2, 3))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(self.norm(x + self.places).transpose(1, 2)).transpose(1, 2)
        y = (y.reshape(-1, 2, 3) * self.scale).transpose(1, 2)
        return self.head(y.reshape(len(x), -1, 6).mean(1))


def test_gradients_may_have_any_strides() -> None:
    assert both(make=compiled(Transposed)).reasons[-1] == ""


def test_compiled_parts_are_replayed_beside_the_others() -> None:
    def part() -> nn.Module:
        torch._dynamo.reset()
        module = Net()
        module.extra.compile(backend="aot_eager")
        return module

    run = both(make=part)
    assert (inside(run), run.reasons[-1]) == ((1, 3), "")


def test_positions_that_all_samples_share_break_the_graph_and_nothing_else() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.table, self.head = nn.Linear(5, 6), nn.Embedding(4, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x) + self.table(torch.arange(x.shape[1]))
            return self.head(y.tanh()).mean(1)

    run = both(make=compiled(Positions), replays=False)
    assert inside(run) == (2, 1)


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


def hook_between(run: Loop) -> None:
    """Two passes in one step, with a hook that is new to the second: it is recorded on copies."""
    one, module = run.one, run.module

    def again(x: Tensor, y: Tensor) -> None:
        first = F.cross_entropy(module(x), y)
        module.head.register_forward_hook(lambda *_: None)
        (first + F.cross_entropy(module(x.flip(1)), y)).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.one = one  # type: ignore[method-assign]

    run.one = again  # type: ignore[method-assign]


def without_a_gradient(run: Loop) -> None:
    """A pass whose loss is never led back."""
    one = run.one

    def passes(x: Tensor, y: Tensor) -> None:
        run.module(x)
        run.optimizer.step()
        run.one = one  # type: ignore[method-assign]

    run.one = passes  # type: ignore[method-assign]


def two_losses(run: Loop) -> None:
    """Two backward passes of each forward pass."""
    run.losses = 2


_NO_NOISE = (hook_between, without_a_gradient)
"""Noise would round a difference in the last place away."""


@pytest.mark.parametrize(
    "change",
    [
        *(uncompile, replace, two_losses, without_a_gradient),
        *(
            pytest.param(change, marks=pytest.mark.slow)
            for change in (freeze, thaw_norm, another_branch, evaluate, hook_between)
        ),
    ],
)
def test_changes_in_the_middle_lose_nothing(change: Callable[[Loop], None]) -> None:
    still = {"numbers": {"lr": 0.1}, "noise_multiplier": 0.0} if change in _NO_NOISE else {}
    both(change, make=compiled(Net), steps=11, **still)


@pytest.mark.slow
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
    run = both(make=compiled(Net))
    x, y = next(run.batches())
    F.cross_entropy(run.module(x), y).backward()
    held = next(h for h in run.engine.capture.program.run.held if h)
    held[0 if written == "operand" else 1].mul_(2)
    with pytest.raises(PrivacyError, match="in place"):
        run.optimizer.step()


CONSTANT = {"taken": False}
"""Whether ``Constant`` takes its buffer, which no guard of the module knows."""


class Constant(nn.Module):
    """Samples, or a buffer that looks like them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("constant", torch.randn(8, 4, 5))
        self.first, self.head = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(self.constant if CONSTANT["taken"] else x)
        return self.head(y.tanh() + x.sum(-1, keepdim=True)).mean(1)


def test_a_buffer_in_the_place_of_samples_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    run = both(make=compiled(Constant))
    x, y = next(run.batches())
    monkeypatch.setitem(CONSTANT, "taken", True)
    loss = F.cross_entropy(run.module(x), y)
    with pytest.raises(PrivacyError, match=r"first.weight in linear: .* a buffer of the module"):
        loss.backward()
