"""``StepGraph``: recorded steps equal steps without a graph, and what differs is refused.

The recording is replayed kernel by kernel on the CPU (``recorded_work``); the real one on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpkern
from dpkern import InvalidInput, PrivacyError, mechanisms
from dpkern.engine import exact_sums, step_graph
from dpkern.graphs import StepGraph
from tests.engine.device_path import device_path, needs_emulation
from tests.engine.recorded_work import recorded
from tests.engine.test_device_ops import MODELS
from tests.engine.test_device_ops import loss_of as loss_of_model

ROWS, FIRST = 4, step_graph._FIRST
ADAM = partial(torch.optim.AdamW, lr=0.1)


@pytest.fixture
def on_device() -> Iterator[None]:
    with device_path(watched=False), recorded():
        yield


pytestmark = [needs_emulation, pytest.mark.usefixtures("on_device")]


class Small(nn.Module):
    """Two linear layers, a norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(self.dropout(F.gelu(self.first(x)))).mean(1))
        return out


def loss_of(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(module(x), y)


class Run:
    """A private run of a small model, with or without a graph."""

    def __init__(
        self,
        loss: Callable[..., Tensor] | None = loss_of,
        model: Callable[[], nn.Module] = Small,
        data: tuple[Tensor, ...] | None = None,
        *,
        rule: Callable[..., torch.optim.Optimizer] = ADAM,
        size: int = ROWS,
        rows: int | None = None,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.model: Any = model()
        x, y = torch.randn(12, 5, 6), torch.randint(3, (12,))
        self.engine = dpkern.PrivacyEngine()
        self.optimizer: Any
        usual = {
            "sampling": "fixed",
            "noise_multiplier": 1.0,
            "max_grad_norm": 1.0,
            "unsafe_seed": 1,
            "arithmetic": "float",
        }
        given = {k: v for k, v in {**usual, **options}.items() if v is not None}
        self.model, self.optimizer, self.loader = self.engine.make_private(
            module=self.model,
            optimizer=rule(self.model.parameters()),
            data_loader=DataLoader(TensorDataset(*(data or (x, y))), batch_size=size),
            **given,
        )
        self.guard = self.engine.capture.guard
        self.guard._occasions.gap = 1 << 60
        self.loss = loss
        self.graph = None if loss is None else StepGraph(self.engine, loss, rows=rows)
        self._batches = self._drawn()

    def _drawn(self) -> Iterator[Any]:
        while True:
            yield from self.loader

    def batch(self) -> Any:
        """The loader's next batch."""
        return next(self._batches)

    def step(self, without: Callable[..., Tensor] = loss_of, batch: Any = None) -> float:
        """Take a step, of the loader's next batch if none is given; return its loss."""
        batch = self.batch() if batch is None else batch
        if self.graph is not None:
            return float(self.graph.step(*batch).detach())
        self.optimizer.zero_grad()
        loss = without(self.model, *batch)
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def steps(self, count: int, without: Callable[..., Tensor] = loss_of) -> list[float]:
        return [self.step(without) for _ in range(count)]

    def parameters(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


def recorded_run(**options: Any) -> tuple[Run, StepGraph]:
    """A run whose step has been recorded."""
    run = Run(**options)
    run.steps(FIRST + 1)
    assert run.graph is not None
    assert (run.graph.replays, run.graph.reason) == (1, "")
    return run, run.graph


def equal(mine: Run, theirs: Run) -> None:
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)
    ours, others = mine.engine.step, theirs.engine.step
    assert ours.steps == others.steps
    assert ours.epsilon_if_seed_secret(1e-5) == others.epsilon_if_seed_secret(1e-5)
    assert float(ours.nonfinite) == float(others.nonfinite)


@pytest.mark.parametrize("arithmetic", [pytest.param("float", marks=pytest.mark.slow), "exact"])
def test_replayed_steps_are_the_steps_without_a_graph(arithmetic: str) -> None:
    """Dropout draws anew, every noise is fresh, and the learning rate follows its schedule."""
    plain, graphed = (Run(loss, arithmetic=arithmetic) for loss in (None, loss_of))
    losses = []
    for run in (plain, graphed):
        schedule = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.5)
        torch.manual_seed(1)
        losses.append([])
        for _ in range(FIRST + 4):
            losses[-1].append(run.step())
            schedule.step()
            if arithmetic == "float":
                run.optimizer.noise_multiplier *= 1.1
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == FIRST + 4
    equal(graphed, plain)
    assert graphed.graph is not None
    assert graphed.graph.replays == 4


@pytest.mark.slow
@pytest.mark.parametrize("arithmetic", ["float", "exact"])
@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_replayed(name: str, arithmetic: str) -> None:
    build, draw = MODELS[name]
    data = (torch.cat([draw(), draw().flip(0)]),)

    def loss(module: nn.Module, x: Tensor) -> Tensor:
        return loss_of_model(module(x), x)

    plain, graphed = (Run(each, build, data, arithmetic=arithmetic) for each in (None, loss))
    assert plain.steps(FIRST + 3, loss) == graphed.steps(FIRST + 3)
    equal(graphed, plain)
    assert graphed.graph is not None
    assert graphed.graph.replays == 3


def test_physical_batches_join_one_step() -> None:
    plain, graphed = (Run(loss, max_physical_batch_size=2) for loss in (None, loss_of))
    for run in (plain, graphed):
        torch.manual_seed(1)
        run.steps(FIRST + 5)
    equal(graphed, plain)
    assert plain.engine.step.steps == (FIRST + 5) // 2


def test_passes_that_are_probed_run_operation_by_operation() -> None:
    run, graph = recorded_run()
    before = run.guard.probes
    run.guard._occasions.gap = 1
    run.step()
    assert graph.reason == "the guards look at this pass"
    assert run.guard.probes == before + 1
    run.guard._occasions.gap = 1 << 60
    run.steps(2)  # the first of which finds everything as usual again
    assert (graph.replays, graph.reason) == (2, "")
    run.guard._occasions.gap = 5
    run.step()
    assert run.guard._occasions.gap == 4  # replays count as passes


def test_nothing_of_python_runs_in_a_replay() -> None:
    calls = []

    def counted(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        calls.append(1)
        return loss_of(module, x, y)

    run, _ = recorded_run(loss=counted)
    assert len(calls) == FIRST + 1
    run.steps(2)
    assert len(calls) == FIRST + 1


@contextmanager
def moved(run: Run) -> Iterator[None]:
    weight = run.model.first.weight
    with torch._C.DisableTorchFunctionSubclass():
        before, weight.data = weight.data, weight.data.clone()
        yield
        weight.data = before


@contextmanager
def frozen(run: Run) -> Iterator[None]:
    run.model.first.bias.requires_grad_(False)
    yield
    run.model.first.bias.requires_grad_(True)


@contextmanager
def less_dropout(run: Run) -> Iterator[None]:
    before, run.model.dropout.p = run.model.dropout.p, 0.1
    yield
    run.model.dropout.p = before


@contextmanager
def evaluated(run: Run) -> Iterator[None]:
    run.model.eval()
    yield
    run.model.train()


@contextmanager
def hooked(run: Run) -> Iterator[None]:
    handle = run.model.first.register_forward_hook(lambda *_: None)
    yield
    handle.remove()


@contextmanager
def other_bound(run: Run) -> Iterator[None]:
    run.optimizer.max_grad_norm = 0.5
    yield
    run.optimizer.max_grad_norm = 1.0


CHANGES = {
    moved: "place or trained flag of a parameter",
    frozen: "place or trained flag of a parameter",
    less_dropout: "flag, attribute, hook or part",
    evaluated: "flag, attribute, hook or part",
    hooked: "flag, attribute, hook or part",
    other_bound: "way to clip",
}


def test_changes_are_refused_until_they_are_undone() -> None:
    run, graph = recorded_run()
    before, steps = run.parameters(), run.engine.step.steps
    x, y = run.batch()
    for change, name in CHANGES.items():
        with change(run), pytest.raises(InvalidInput, match=name):
            graph.step(x, y)
    for given in ((x[:, :4], y), (x,), (x.double(), y)):
        with pytest.raises(InvalidInput, match="shape, dtype or device of the batch"):
            graph.step(*given)
    with torch.autocast("cpu"), pytest.raises(InvalidInput, match="autocast"):
        graph.step(x, y)
    with torch.no_grad(), pytest.raises(InvalidInput, match="without gradients"):
        graph.step(x, y)
    assert run.engine.step.steps == steps  # nothing is released
    assert all(map(torch.equal, before, run.parameters()))
    graph.step(x, y)
    assert run.engine.step.steps == steps + 1
    graph.close()
    with pytest.raises(InvalidInput, match="closed"):
        run.step()


def test_another_lattice_of_exact_sums_is_refused() -> None:
    """It follows the noise."""
    run, graph = recorded_run(arithmetic="exact")
    run.optimizer.noise_multiplier = 2.0
    batch = run.batch()
    with pytest.raises(InvalidInput, match="way to clip"):
        graph.step(*batch)
    run.optimizer.noise_multiplier = 1.0
    graph.step(*batch)


def test_samples_come_from_the_loader_once_each() -> None:
    run, graph = recorded_run()
    x, y = run.batch()
    with pytest.raises(PrivacyError, match="inputs of the module"):
        graph.step(torch.randn(x.shape), y)
    with pytest.raises(PrivacyError, match="inputs of the module"):
        graph.step(x.flip(0), y)
    graph.step(x, y)
    with pytest.raises(PrivacyError):
        graph.step(x, y)
    assert run.engine.step.steps == FIRST + 2


def test_what_waits_for_the_device_cannot_be_recorded() -> None:
    """The samples of the failed recording can take their step without a graph."""

    def waits(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(module, x, y)
        float(loss.detach())
        return loss

    run = Run(waits)
    run.steps(FIRST)
    batch = run.batch()
    assert run.graph is not None
    with pytest.raises(InvalidInput, match="cannot be recorded"):
        run.graph.step(*batch)
    loss_of(run.model, *batch).backward()
    run.optimizer.step()
    assert run.engine.step.steps == FIRST + 1


def test_losses_of_classes_wait_for_nothing() -> None:
    """Whether a target is left out is not looked at: each record has a mean of its own."""

    def loss(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(module(x), y, ignore_index=2)

    run, graph = recorded_run(loss=loss)
    with torch.no_grad():
        x, y = run.batch()
        run.model.eval()
        terms = F.cross_entropy(run.model(x), y, ignore_index=2, reduction="none")
        run.model.train()
        wanted = float(terms.detach().sum() / len(terms))
    found = float(run.loss(run.model.eval(), x, y).detach()) if run.loss else 0.0
    assert found == pytest.approx(wanted, rel=1e-5)
    assert graph.replays == 1


def by_groups() -> dict[str, Any]:
    """Options of exact clipping by two groups."""
    mechanism = mechanisms.DPSGD(
        noise_multiplier=1.0,
        max_grad_norm=[1.0, 1.0],
        clipping="group",
        groups=(0, 0, 0, 1, 1, 1),
    )
    others = dict.fromkeys(("arithmetic", "noise_multiplier", "max_grad_norm"))
    return {"mechanism": mechanism, **others}


def test_exact_clipping_by_groups_is_replayed() -> None:
    plain, graphed = (Run(loss, **by_groups()) for loss in (None, loss_of))
    losses = []
    for run in (plain, graphed):
        torch.manual_seed(1)  # of the dropout
        losses.append(run.steps(FIRST + 2))
    assert losses[0] == losses[1]
    equal(graphed, plain)
    assert graphed.graph is not None
    assert graphed.graph.replays == 2


def test_groups_of_gradients_that_are_written_out_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exact_sums, "availability", lambda _: (False, "is not here"))
    with pytest.raises(InvalidInput, match="exact clipping by groups"):
        Run(**by_groups())


class Scaled(nn.Module):
    """A module of two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.last(x.mean(1)) * scale[:, None]


@pytest.mark.slow
def test_two_passes_in_a_step_count_as_two() -> None:
    def twice(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return loss_of(module, x, y) + loss_of(module, 2 * x, y)

    plain, run = Run(None), Run(twice)
    for each in (plain, run):
        torch.manual_seed(1)
        each.steps(FIRST + 2, twice)
    equal(run, plain)
    run.guard._occasions.gap = 9
    run.step()
    assert (run.guard.passes_left, run.graph and run.graph.replays) == (7, 3)


def test_public_passes_in_the_loss_are_refused() -> None:
    def with_public(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with runs[0].engine.public():
            module(torch.ones(2, 5, 6)).sum().backward()
        return loss_of(module, x, y)

    runs = [Run(with_public)]
    runs[0].steps(FIRST)
    with pytest.raises(InvalidInput, match="StepGraph"):
        runs[0].steps(3)


def test_a_module_that_the_guards_always_look_at_is_refused() -> None:
    def loss(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(module(x, y), y)

    run = Run(loss, Scaled)
    run.steps(FIRST + step_graph._LOOKS)
    with pytest.raises(InvalidInput, match="several tensors"):
        run.step()


def test_parameters_on_the_cpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_graph, "_on_device", lambda parameter: parameter.is_cuda)
    with pytest.raises(InvalidInput, match="on the CPU"):
        Run()


class Sequenced(nn.Module):
    """An LSTM and a cell whose states have as many values as the pass has rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm, self.cell = nn.LSTM(6, width, batch_first=True), nn.GRUCell(6, width)
        self.last = nn.Linear(2 * width, 3)

    def forward(self, x: Tensor) -> Tensor:
        ends = self.lstm(x)[0][:, -1], self.cell(x[:, 0])
        out: Tensor = self.last(torch.cat(ends, 1))
        return out


@pytest.mark.parametrize("rows", [None, 6])
def test_states_of_as_many_values_as_rows_are_recorded(rows: int | None) -> None:
    """A square tensor of zeros is looked at elsewhere: it may be the identity, and no sample's."""
    width = rows or ROWS
    plain = Run(None, lambda: Sequenced(width))
    graphed = Run(loss_of, lambda: Sequenced(width), rows=rows)
    for run in (plain, graphed):
        run.steps(FIRST + 4)
    assert graphed.graph is not None
    assert graphed.graph.replays == (4 if rows is None else 2)  # filled passes are looked at
    for a, b in zip(plain.parameters(), graphed.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)


class Placed(nn.Module):
    """A module with a vector for each of five positions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.places = nn.Linear(6, 8), nn.Embedding(5, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last((self.first(x) + self.places(torch.arange(5))).tanh().mean(1))
        return out


def test_positions_as_many_as_rows_are_refused_with_what_helps() -> None:
    run = Run(loss_of, Placed, size=5)
    run.steps(FIRST)
    batch = run.batch()
    with pytest.raises(InvalidInput, match=r"indices of 5 rows.*rows=") as found:
        run.step(batch=batch)
    assert "as many as the pass has" in str(found.value)
    loss_of(run.model, *batch).backward()
    run.optimizer.step()
    plain, filled = Run(None, Placed, size=5), Run(loss_of, Placed, size=5, rows=7)
    for run in (plain, filled):
        run.steps(FIRST + 3)
    assert filled.graph is not None
    assert filled.graph.replays == 1
    for a, b in zip(plain.parameters(), filled.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)
