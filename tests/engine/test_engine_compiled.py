"""Capture inside compiled graphs: the sums of the loop over samples, and the graphs counted."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import dpkern
from benchmarks.step_cases import verify
from benchmarks.step_models import TASKS
from dpkern.base.errors import CompileWarning, UnsupportedModule
from dpkern.engine import optimizer as closing
from dpkern.engine.exact_sums import factoring_error
from dpkern.engine.provenance import untracked

from .engine_oracle import truth

# The compiler makes an object of every autograd function and looks at .grad of the taps: torch
# warns of both.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]

TOLERANCE = 1e-4
"""Of the size of the whole clipped gradient, as for uncompiled float32 modules."""


class Net(nn.Module):
    """A few layers, and branches that a test may switch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(5, 6), nn.LayerNorm(6)
        self.extra, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.twice = self.again = self.reentrant = False

    def inner(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.first(x)), inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if self.again:
            y = y + checkpoint(self.extra, y, use_reentrant=self.reentrant)
        else:
            y = y + self.extra(y)
        if self.twice:
            y = y + self.extra(y.tanh())
        return self.head(y).mean(1)


USES = 4
"""In a pass of ``Net``."""


class Whole(Net):
    """One use of everything else that graphs hold, too."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.conv = nn.Conv1d(4, 4, 3, padding=1)
        self.groups = nn.GroupNorm(2, 4)
        self.scale = nn.Parameter(torch.linspace(0.5, 2.0, 6))
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def inner(self, x: Tensor) -> Tensor:
        ids = (x[..., 0].abs() * 3).long() % 11
        y = super().inner(x) + self.table(ids)
        y = F.relu(self.groups(self.conv(y))) * self.scale
        return y + self.attention(y, y, y, need_weights=False)[0]


WHOLE = USES + 6


class Tied(nn.Module):
    """A table that is the output layer as well."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 6)
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        ids = (x[..., 0].abs() * 3).long() % 7
        return F.linear(self.inner(self.table(ids)), self.table.weight).mean(1)


@dataclass
class Backend:
    """A backend of ``torch.compile`` that counts graphs, and may damage what leaves them."""

    damage: Callable[[list[Any]], None] | None = None
    graphs: int = 0
    nodes: list[str] = field(default_factory=list)

    def __call__(self, graph: torch.fx.GraphModule, example: list[Tensor]) -> Any:
        self.graphs += 1
        self.nodes += [str(node.target) for node in graph.graph.nodes]
        compiled: Any = aot_autograd(
            fw_compiler=lambda module, _: make_boxed_func(module.forward),
            bw_compiler=lambda module, _: make_boxed_func(self._backward(module)),
        )
        return compiled(graph, example)

    def _backward(self, module: torch.fx.GraphModule) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            results = list(module.forward(*inputs))
            if self.damage is not None:
                self.damage(results)
            return results

        return run


@dataclass
class Loop:
    """A private loop; every sum that it closes is compared with the loop over samples."""

    model: Any
    optimizer: Any
    loader: Any
    engine: Any
    passes: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    closed: int = 0

    @property
    def graphs(self) -> Any:
        return self.engine.capture.graphs

    def batches(self, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            for batch in self.loader:
                yield batch
                count -= 1
                if not count:
                    return

    def train(self, steps: int = 3) -> Loop:
        for x, y in self.batches(steps):
            self.optimizer.zero_grad()
            self.backward(x, y)
            self.optimizer.step()
        return self

    def backward(self, x: Tensor, y: Tensor) -> None:
        if not x._state.batch.placeholder:  # type: ignore[attr-defined]
            self.passes.append((untracked(x).clone(), untracked(y).clone()))
        F.cross_entropy(self.model(x), y).backward()

    def expected(self) -> list[Tensor]:
        """float64 gradients of each sample, by an uncompiled copy of the module."""
        module = copy.deepcopy(self.engine.capture.module).double()
        module.again = False  # checkpoints of one kind refuse chosen gradients
        parameters = [p for p in module.parameters() if p.requires_grad]
        total: list[Tensor] = []
        for x, y in self.passes:
            rows = []
            for b in range(len(x)):
                loss = F.cross_entropy(module(x[b : b + 1].double()), y[b : b + 1])
                found = torch.autograd.grad(loss, parameters, allow_unused=True)
                rows.append(
                    [p * 0 if g is None else g for p, g in zip(parameters, found, strict=True)]
                )
            each = [torch.stack(column).detach() for column in zip(*rows, strict=True)]
            total = [a + b for a, b in zip(total, each, strict=True)] if total else each
        return total

    def close(self, own: Callable[..., None], step: Any, capture: Any) -> None:
        """Close the samples as the engine does, and compare what was added."""
        exact = step.plan.arithmetic == "exact"
        units = step.plan.units if exact else [1.0] * len(step.plan.units)

        def sums() -> list[Tensor]:
            return [s.double() * unit for s, unit in zip(step.sums, units, strict=True)]

        before = None if step.sums is None else sums()
        own(step, capture)
        with torch.enable_grad():
            passes, gradients = self.passes, self.expected()
        self.passes = []
        if not passes:
            return
        found = sums()
        if before is not None:
            found = [a - b for a, b in zip(found, before, strict=True)]
        names = [n for n, p in capture.module.named_parameters() if p.requires_grad]
        expected = truth(gradients, step.plan)
        for i, (name, mine, other) in enumerate(zip(names, found, expected.sums, strict=True)):
            off = float((mine - other).norm())
            allowed = TOLERANCE * expected.scale
            if mine.dim() == 2:
                allowed += factoring_error(step.plan, i, mine.numel(), len(expected.norms))
            assert off <= allowed, f"{name} is off by {off:.1e}"
        self.closed += 1


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Loop]:
    """Makes a loop whose module is compiled ``before`` or ``after`` ``make_private``."""
    torch._dynamo.reset()
    own = closing.close_into

    def make(
        backend: Any,
        build: Callable[[], nn.Module] = Net,
        *,
        when: str = "after",
        method: bool = False,
        batch: int = 6,
        change: Callable[[Any], None] = lambda module: None,
        **options: Any,
    ) -> Loop:
        torch.manual_seed(0)
        model: Any = build()
        x, y = torch.randn(24, 4, 5), torch.arange(24) % 3
        chosen = {k: options.pop(k) for k in ("fullgraph", "dynamic") if k in options}

        def compiled(module: Any) -> Any:
            if not method:
                return torch.compile(module, backend=backend, **chosen)
            module.compile(backend=backend, **chosen)
            return module

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        called = compiled(model) if when == "before" else model
        engine = dpkern.PrivacyEngine()
        called, optimizer, loader = engine.make_private(
            module=called,
            optimizer=optimizer,
            data_loader=DataLoader(TensorDataset(x, y), batch_size=batch),
            **{
                "noise_multiplier": 1.0,
                "max_grad_norm": 0.5,
                "unsafe_seed": 1,
                "sampling": "shuffled",
                **options,
            },
        )
        change(model)
        called = compiled(called) if when == "after" else called
        made = Loop(called, optimizer, loader, engine)
        monkeypatch.setattr(closing, "close_into", lambda s, c: made.close(own, s, c))
        return made

    return make


@pytest.mark.parametrize(
    ("method", "when"),
    [
        pytest.param(False, "before", id="function-before"),
        pytest.param(True, "after", id="method-after"),
        pytest.param(False, "after", id="function-after", marks=pytest.mark.slow),
        pytest.param(True, "before", id="method-before", marks=pytest.mark.slow),
    ],
)
def test_every_use_is_captured_inside_one_graph(loop: Any, when: str, method: bool) -> None:
    backend = Backend()
    run = loop(backend, Whole, when=when, method=method, fullgraph=True).train()
    assert run.closed == 3
    assert backend.graphs == 1 == run.graphs.graphs
    assert (run.graphs.inside, run.graphs.outside, run.graphs.passes) == (WHOLE, 0, 3)
    assert sum("autograd_function_apply" in node for node in backend.nodes) == 7
    assert not run.graphs.reason
    assert str(run.graphs).startswith("1 compiled graphs; in the last pass 10 uses")


@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_other_compilers_agree(loop: Any, compiler: str) -> None:
    run = loop(compiler, Whole, fullgraph=True).train()
    assert run.closed == 3
    assert (run.graphs.inside, run.graphs.outside) == (WHOLE, 0)


@pytest.mark.parametrize("scale", [2.0, 1.0], ids=["damaged", "sound"])
def test_the_comparison_sees_one_damaged_record(loop: Any, scale: float) -> None:
    def damage(results: list[Any]) -> None:
        place = next(i for i, r in enumerate(results) if r is not None and r.dim() == 3)
        results[place] = results[place] * scale

    run = loop(Backend(damage=damage))
    if scale == 1.0:
        run.train(1)
    else:
        with pytest.raises(AssertionError, match="is off by"):
            run.train(1)


@pytest.mark.slow
@pytest.mark.parametrize("build", [Tied, Net])
def test_parameters_of_several_uses_stay_in_the_graph(loop: Any, build: Any) -> None:
    run = loop(Backend(), build, change=lambda module: setattr(module, "twice", True)).train()
    assert run.closed == 3
    assert (run.graphs.inside, run.graphs.outside) == (3 if build is Tied else USES + 1, 0)


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_parts_stay_outside(loop: Any, reentrant: bool) -> None:
    def change(module: Any) -> None:
        module.again, module.reentrant = True, reentrant

    run = loop(Backend(), change=change).train()
    assert run.closed == 3
    assert run.graphs.inside == USES - 1
    assert run.graphs.graphs > 1


@pytest.mark.slow
def test_poisson_batches_of_any_size_and_empty_ones(loop: Any) -> None:
    torch.manual_seed(3)
    backend = Backend()
    run = loop(backend, batch=2, sampling="poisson").train(20)
    sizes = run.graphs.passes
    assert 10 < sizes < 20  # some draws were empty
    # After batches of one sample at first, the next one is probed outside of graphs.
    assert run.closed - sizes in (0, 1)
    assert backend.graphs == 3  # the first size, one sample, and any number
    assert run.graphs.outside == 0


def test_physical_batches_add_up(loop: Any) -> None:
    run = loop(Backend(), batch=12, max_physical_batch_size=5).train(6)
    assert run.closed == 6
    assert run.graphs.passes == 6


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"clipping": "automatic"},
        {"clipping": "per_layer", "max_grad_norm": [0.2] * 8},
        {"loss_reduction": "mean", "keep_budget": 0},
    ],
    ids=lambda options: next(iter(options)),
)
def test_other_ways_to_clip(loop: Any, options: dict[str, Any]) -> None:
    run = loop(Backend(), **options).train(2)
    assert run.closed == 2
    assert run.graphs.outside == 0


@pytest.mark.slow
def test_two_passes_over_one_batch_and_a_switch_of_shapes(loop: Any) -> None:
    backend = Backend()
    run = loop(backend)
    for number, (x, y) in enumerate(run.batches(4)):
        run.optimizer.zero_grad()
        for part in (x, x.flip(1)) if number < 2 else (x,):
            run.backward(part, y)
        run.optimizer.step()
    assert run.closed == 4
    assert run.graphs.outside == 0


@pytest.mark.slow
def test_switches_between_training_and_evaluation_and_of_frozen_parts(loop: Any) -> None:
    backend = Backend()
    run = loop(backend).train(2)
    run.model.eval()
    with torch.no_grad():
        compiled = run.model(torch.ones(5, 4, 5))
        assert torch.allclose(compiled, run.engine.capture.module(torch.ones(5, 4, 5)), atol=1e-6)
    run.model.train()
    run.train(2)
    run.engine.capture.module.twice = True
    run.train(2)
    assert run.graphs.inside == USES + 1
    run.engine.capture.module.twice = False
    run.train(1)
    assert (run.closed, run.graphs.outside, run.graphs.inside) == (7, 0, USES)


@pytest.mark.slow
def test_a_module_that_was_compiled_and_run_before_it_was_private(loop: Any) -> None:
    torch.manual_seed(0)
    backend = Backend()

    def build() -> nn.Module:
        module = Net()
        warm = torch.compile(module, backend=backend)
        F.cross_entropy(warm(torch.randn(6, 4, 5)), torch.arange(6) % 3).backward()
        module.zero_grad()
        return module

    run = loop(backend, build).train(2)
    assert run.closed == 2
    assert run.graphs.outside == 0
    run.engine.detach()
    F.cross_entropy(run.model(torch.randn(6, 4, 5)), torch.arange(6) % 3).backward()
    assert all(p.grad is not None for p in run.engine.capture.module.parameters())


def test_compiled_parts_of_a_module(loop: Any) -> None:
    backend = Backend()

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = Net(), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x))

    run = loop("eager", Parts, when="never", change=lambda m: m.body.compile(backend=backend))
    run.train(2)
    assert (run.closed, backend.graphs) == (2, 1)
    assert (run.graphs.inside, run.graphs.outside) == (USES, 1)


@pytest.mark.slow
def test_public_passes_are_not_captured(loop: Any) -> None:
    run = loop(Backend()).train(1)
    with run.engine.public():
        F.cross_entropy(run.model(torch.randn(6, 4, 5)), torch.arange(6) % 3).backward()
    assert len(run.engine.capture.public_gradients) == len(run.engine.capture.parameters)
    assert not run.engine.capture.captured
    run.optimizer.zero_grad()
    run.train(1)
    assert run.closed == 2


def test_samples_that_mix_are_refused_before_a_graph_is_made(loop: Any) -> None:
    class Mixing(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x - x.mean(0))

    backend = Backend()
    run = loop(backend, Mixing)
    with pytest.raises(UnsupportedModule, match="samples"):
        run.train(1)
    assert run.closed == 0


@pytest.mark.slow
def test_double_backward_is_refused(loop: Any) -> None:
    run = loop("eager")
    x, y = next(run.batches(1))
    loss = F.cross_entropy(run.model(x), y)
    with pytest.raises(UnsupportedModule, match="create_graph"):
        loss.backward(create_graph=True)


class Recurrent(nn.Module):
    """Nothing that a graph can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(5, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0][:, -1]


def test_a_module_that_no_graph_can_hold_is_named(loop: Any) -> None:
    run = loop(Backend(), Recurrent)
    with pytest.warns(CompileWarning, match="no use that a graph can hold"):
        run.train(3)
    assert run.closed == 3
    assert (run.graphs.inside, run.graphs.passes) == (0, 0)
    assert "none in the last pass" in str(run.graphs)


@pytest.mark.slow
def test_autocast_stays_outside(loop: Any) -> None:
    run = loop(Backend())
    x, y = next(run.batches(1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        F.cross_entropy(run.model(x), y).backward()
    assert run.graphs.inside == 0
    assert run.engine.capture.captured


@pytest.mark.slow
@pytest.mark.parametrize("task", ["mlp", "lenet", "resnet", "encoder"])
def test_compiled_benchmark_models_step_as_the_loop_over_samples(task: str) -> None:
    torch._dynamo.reset()
    small = TASKS[task].small
    assert small is not None
    verify(replace(small, batch=4), "dpkern compiled")
