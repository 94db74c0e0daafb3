"""The variants of a training step, non-private, dpkern and Opacus, and the check each must pass.

Every variant trains on the same physical batch: a loader hands it out (untimed), then forward,
backward and update are timed. Private variants clip to 1, add noise and train with the same SGD.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import dpkern
from dpkern.bench.peers import PEERS, UNBUILT, PeerAbsentError, PeerTask
from dpkern.engine.optimizer import OptimizerAdapter

from .step_models import Task

CLIP, NOISE, LR, MOMENTUM = 1.0, 1.0, 1e-3, 0.9
PHASES = ("forward", "backward", "sums", "update")

Batch = tuple[Tensor, Tensor]


class OneBatch(Dataset[int]):
    """A data set whose rows only have numbers: for any rows, ``collate`` gives the same samples."""

    def __init__(self, task: Task) -> None:
        self.batch = task.data()
        self.size = 4 * task.batch

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, row: int) -> int:
        return row

    def collate(self, rows: list[int]) -> Batch:
        """Return the batch for any rows; its first samples for fewer rows, as engines try them."""
        x, y = self.batch
        if len(rows) > len(x):
            raise RuntimeError(f"a batch of {len(rows)} rows instead of {len(x)}")
        return (x, y) if len(rows) == len(x) else (x[: len(rows)], y[: len(rows)])


class DrawnBatch(OneBatch):
    """The same for draws of any number of rows: samples come again where a draw has more."""

    def collate(self, rows: list[int]) -> Batch:
        """Return the first samples, as many as rows, from the beginning again behind the last."""
        x, y = self.batch
        places = torch.arange(len(rows), device=x.device) % len(x)
        return x[places], y[places]


@dataclass
class Runner:
    """A variant made ready: what a training loop calls, phase by phase.

    Attributes:
        model: the module that is trained.
        hand_out: the next batch.
        loss: forward pass and loss.
        update: the optimizer's step and what must be cleared.
        finishing: seconds spent in noise and update, appended by the variant where it can tell.
    """

    model: nn.Module
    hand_out: Callable[[], Batch]
    loss: Callable[[Batch], Any]
    update: Callable[[], None]
    finishing: list[float] = field(default_factory=list)

    def step(self) -> tuple[float, ...]:
        """Measure seconds of each phase of one step."""
        batch = self.hand_out()
        self.finishing.clear()
        t0 = time.perf_counter()
        loss = self.loss(batch)
        t1 = time.perf_counter()
        loss.backward()
        t2 = time.perf_counter()
        self.update()
        t3 = time.perf_counter()
        noised = sum(self.finishing) if self.finishing else t3 - t2
        return t1 - t0, t2 - t1, t3 - t2 - noised, noised


def _loader(task: Task, kind: type[OneBatch] = OneBatch) -> DataLoader[Any]:
    rows = kind(task)
    return DataLoader(
        rows, batch_size=task.batch, shuffle=True, drop_last=True, collate_fn=rows.collate
    )


def _batches(loader: DataLoader[Any]) -> Callable[[], Batch]:
    def forever() -> Iterator[Batch]:
        while True:
            yield from loader

    return forever().__next__


def _runner(
    task: Task, model: nn.Module, optimizer: Any, loader: Any, criterion: Any = None
) -> Runner:
    measure = nn.CrossEntropyLoss() if criterion is None else criterion

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Runner(
        model=model,
        hand_out=_batches(loader),
        loss=lambda batch: task.loss(measure, model(batch[0]), batch[1]),
        update=update,
    )


@dataclass(frozen=True)
class Prepared:
    """A model with its optimizer, loader and first batch drawn, before training.

    Attributes:
        model: the module, not yet wrapped.
        begin: wraps what the variant wraps, with this noise multiplier.
    """

    model: nn.Module
    begin: Callable[[float], Runner]


def non_private(task: Task, lr: float, *, compiled: bool = False, **options: bool) -> Prepared:
    """Make a step of torch alone."""
    model = task.model()
    called = torch.compile(model) if compiled else model
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=MOMENTUM, **options)
    loader = _loader(task)
    return Prepared(model, lambda noise: _runner(task, called, optimizer, loader))


def private(
    task: Task,
    lr: float,
    *,
    compiled: bool = False,
    engine: dpkern.PrivacyEngine | None = None,
    sampling: str = "fixed",
    **options: Any,
) -> Prepared:
    """Make dpkern's step with flat clipping."""
    model = task.model()
    called = torch.compile(model) if compiled else model
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=MOMENTUM)
    loader = _loader(task, OneBatch if sampling == "fixed" else DrawnBatch)

    def begin(noise: float) -> Runner:
        made = (engine or dpkern.PrivacyEngine()).make_private(
            module=called,
            optimizer=optimizer,
            data_loader=loader,
            noise_multiplier=noise,
            max_grad_norm=CLIP,
            sampling=sampling,
            **options,
        )
        return _runner(task, *made)

    return Prepared(model, begin)


class LibraryProducts(Runner):
    """A step whose matrix products run in torch's library even where dpkern's are faster."""

    def step(self) -> tuple[float, ...]:
        from dpkern.ops.backends import cpu

        with cpu.use_own_products(False):
            return super().step()


def private_on_library(task: Task, lr: float) -> Prepared:
    """Make dpkern's step with the very products that non-private training uses."""
    prepared = private(task, lr)
    return Prepared(prepared.model, lambda noise: LibraryProducts(**vars(prepared.begin(noise))))


def opacus(task: Task, lr: float, mode: str) -> Prepared:
    """Make Opacus' step with torch's generator (its secure mode needs a package of its own)."""
    from opacus import PrivacyEngine
    from opacus.validators import ModuleValidator

    model = ModuleValidator.fix(task.model())  # replaces attention, nothing else here
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=MOMENTUM)
    loader = _loader(task)

    def begin(noise: float) -> Runner:
        made = PrivacyEngine(secure_mode=False).make_private(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            criterion=nn.CrossEntropyLoss(),
            noise_multiplier=noise,
            max_grad_norm=CLIP,
            poisson_sampling=False,
            grad_sample_mode=mode,
        )
        if mode == "ghost":
            module, stepper, criterion, batches = made
            return _runner(task, module, stepper, batches, criterion)
        return _runner(task, *made)

    return Prepared(model, begin)


class WholeStep(Runner):
    """A step that another library makes in one piece: no phases."""

    def step(self) -> tuple[float, ...]:
        started = time.perf_counter()
        self.update()
        return 0.0, 0.0, 0.0, time.perf_counter() - started


def peer(task: Task, lr: float, name: str) -> Prepared:
    """Make the step of a library that ``dpkern bench --model`` puts beside dpkern.

    Raises:
        PeerAbsentError: it is not installed.
    """
    model = task.model()
    criterion = nn.CrossEntropyLoss()
    x, y = task.data()

    def begin(noise: float) -> Runner:
        made = PeerTask(
            model=model,
            x=x,
            labels=y,
            loss=lambda out, labels: task.loss(criterion, out, labels),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=MOMENTUM),
            clip=CLIP,
            noise=noise,
        )
        step = PEERS[name](made)
        return WholeStep(model=model, hand_out=lambda: (x, y), loss=lambda _: None, update=step)

    return Prepared(model, begin)


def _tiny() -> PeerTask:
    return PeerTask(
        model=nn.Linear(2, 2),
        x=torch.ones(2, 2),
        labels=torch.zeros(2, dtype=torch.long),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        clip=CLIP,
        noise=NOISE,
    )


def absent(names: Iterable[str]) -> dict[str, str]:
    """Return why variants of libraries that are not installed are left out."""
    found = dict(UNBUILT)
    for name in names:
        if name in PEERS:
            try:
                PEERS[name](_tiny())
            except PeerAbsentError as error:
                found[name] = str(error)
    return found


VARIANTS: dict[str, Callable[..., Prepared]] = {
    "torch default": non_private,
    "torch fused": partial(non_private, fused=True),
    "torch compiled": partial(non_private, compiled=True),
    "dpkern": private,
    "dpkern float": partial(private, arithmetic="float"),
    "dpkern compiled": partial(private, compiled=True),
    "dpkern keep 0": partial(private, keep_budget=0),
    "dpkern, torch's products": private_on_library,
    "Opacus hooks": partial(opacus, mode="hooks"),
    "Opacus ghost": partial(opacus, mode="ghost"),
    "torch.func": partial(peer, name="torch.func"),
    "Opake": partial(peer, name="Opake"),
}
DEFAULT, COMPILED = "torch default", "torch compiled"
EAGER = (DEFAULT, "torch fused")
BASELINES = (*EAGER, COMPILED)


@contextmanager
def finish_timer(runner: Runner) -> Iterator[None]:
    """Note how long noise and update take inside dpkern's optimizer step."""
    original = OptimizerAdapter._release

    def timed(adapter: OptimizerAdapter) -> None:
        started = time.perf_counter()
        original(adapter)
        runner.finishing.append(time.perf_counter() - started)

    with mock.patch.object(OptimizerAdapter, "_release", timed):
        yield


@contextmanager
def quiet() -> Iterator[None]:
    """Hide warnings of Opacus and torch about hooks and generators that are meant to be so."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def clipped_mean(task: Task, model: nn.Module, clip: float) -> Tensor:
    """Return the mean of the clipped gradients, one sample at a time; flat, all in float64."""
    x, y = task.data()
    model = deepcopy(model).double()
    x = x.double() if x.is_floating_point() else x
    criterion = nn.CrossEntropyLoss()
    total = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    for i in range(len(x)):
        loss = task.loss(criterion, model(x[i : i + 1]), y[i : i + 1])
        grads = torch.autograd.grad(loss, list(model.parameters()))
        flat = torch.cat([g.flatten() for g in grads])
        total.add_(flat, alpha=min(1.0, clip / float(flat.norm())))
    return total / len(x)


def verify(task: Task, name: str, tolerance: float = 1e-3) -> None:
    """Check that a variant's first step without noise subtracts the clipped mean gradient.

    Variants that do not clip are held to the mean gradient. The tolerance is relative to the norm
    of the whole update; the learning rate is 1, so that rounding to float32 parameters is below it.

    Raises:
        AssertionError: the step is another.
    """
    prepared = VARIANTS[name](task, lr=1.0)
    parameters = list(prepared.model.parameters())
    bound = float("inf") if name in BASELINES else CLIP
    want = clipped_mean(task, prepared.model, bound)
    before = [p.detach().clone() for p in parameters]
    prepared.begin(0.0).step()
    moved = [(b - p.detach()).flatten() for b, p in zip(before, parameters, strict=True)]
    error = float((torch.cat(moved).double() - want).norm() / want.norm())
    if not error <= tolerance:
        raise AssertionError(f"{task.name}, {name}: the update is off by {error:.2g}")
