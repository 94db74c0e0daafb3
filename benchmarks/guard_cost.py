"""Time what the guards add to private training, step by step.

Usage: ``python -m benchmarks.guard_cost '{"task": ..., "steps": ...}'``

Records are rows of a ``TensorDataset`` in a plain ``DataLoader``. *Every pass* is measured in one
run, which takes its epochs in turns with the guards and without: no hook looks at outputs and
state, and records are not followed. Two runs of one model differ by more than the guards cost,
since their tensors lie elsewhere in memory, and so do two processes: ``guard_report`` takes medians
of several. *The first step* is that of fresh
runs, with and without guards, which take turns at being first. Both probe the gradients of the
first batch, which is timed by itself. Secret probes come once in 500 passes: some are timed by
themselves, and their expected share is added. The loader's epochs are short, and the first step of
each tries ``collate_fn``: a run counts as one epoch, and what another one would add is a figure of
its own.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpkern
from dpkern.engine import loader
from dpkern.engine.capture import Capture
from dpkern.engine.guard import ForwardGuard
from dpkern.engine.occasions import MEAN_GAP
from dpkern.engine.padding import PaddingCheck
from dpkern.engine.program.site import SHORT_CUT
from dpkern.engine.provenance import YieldedBatch, boundary, rules

from .step_cases import CLIP, LR, MOMENTUM, NOISE, quiet
from .step_models import TASKS, Task

CLOCKS: dict[str, Callable[[], float]] = {"cpu": time.thread_time, "wall": time.perf_counter}


@dataclass
class Run:
    """A training run of one model in the plain loop.

    Attributes:
        engine: the engine that made it private.
        step: takes one step.
        epoch: steps from one start of the loader to the next.
        guards: the guards of the run.
    """

    engine: dpkern.PrivacyEngine
    step: Callable[[], None]
    epoch: int
    guards: Guards

    def timed_step(self) -> dict[str, float]:
        """Take a step and return how long it took, by clock."""
        before = {name: clock() for name, clock in CLOCKS.items()}
        self.step()
        return {name: clock() - before[name] for name, clock in CLOCKS.items()}


class Guards:
    """A switch for all guards of a run.

    Args:
        engine: the engine of the run.
        batches: its private loader.
    """

    def __init__(self, engine: dpkern.PrivacyEngine, batches: Any) -> None:
        capture, adapter = engine.capture, engine.adapter

        def hand_out(batch: YieldedBatch) -> None:
            adapter.begin_batch(batch.size, first=batch.first, final=batch.final)

        self._without: list[tuple[Any, str, Any]] = [
            (capture.guard, "_attached", False),
            (capture.guard, "after", lambda args, kwargs, output: None),
            (capture, "boundary", None),
            (adapter.batches.boundary, "has_loader", False),
            (batches, "boundary", None),
            (batches, "padding", None),
            (batches, "_check_collation", lambda collates: None),
            (batches, "on_batch", hand_out),
        ]
        self._with = [(owner, name, getattr(owner, name)) for owner, name, _ in self._without]

    def switch(self, on: bool) -> None:
        """Let the next steps be guarded, or not."""
        for owner, name, value in self._with if on else self._without:
            vars(owner)[name] = value


_EPOCH = 4
"""Steps of an epoch."""

_NO_PROBE = 1 << 29
"""Passes to the next secret probe that no run takes; Python counts larger numbers another way."""


def _loader(task: Task) -> DataLoader[Any]:
    drawn = task.draw(_EPOCH * task.batch, torch.Generator().manual_seed(1))
    rows = TensorDataset(*drawn)
    return DataLoader(rows, batch_size=task.batch, shuffle=True, drop_last=True)


def begin(task: Task, *, guarded: bool) -> Run:
    """Make a run that has taken no step yet."""
    model = task.model()
    engine = dpkern.PrivacyEngine()
    module, optimizer, private = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM),
        data_loader=_loader(task),
        noise_multiplier=NOISE,
        max_grad_norm=CLIP,
        sampling="fixed",
    )
    # No secret probe by chance: their expected share is added.
    engine.capture.guard._occasions.gap = _NO_PROBE
    guards = Guards(engine, private)
    guards.switch(guarded)
    criterion = nn.CrossEntropyLoss()

    def forever() -> Iterator[Any]:
        while True:
            yield from private

    batches = forever()

    def step() -> None:
        x, y = next(batches)
        task.loss(criterion, module(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Run(engine, step, len(private), guards)


PARTS = (
    ("gradients", Capture, "verify"),
    ("probe", ForwardGuard, "_wait"),
    ("probe", ForwardGuard, "_end_wait"),
    ("probe", ForwardGuard, "_check"),
    ("scans", ForwardGuard, "before"),
    ("scans", ForwardGuard, "after"),
    ("rows", boundary.ModuleBoundary, "enter"),
    ("rows", boundary.ModuleBoundary, "leave"),
    ("rows", boundary.LossCheck, "check"),
    ("rows", rules, "run"),
    ("rows", loader, "tracked_alike"),
    ("rows", loader, "tracked_batch"),
    ("rows", PaddingCheck, "look"),
    ("", rules.TrackedCall, "plain"),
    ("", boundary.ModuleBoundary, "backward"),
)
"""The part of the guards that each function runs in; the empty part is what the user asked for."""


@contextmanager
def parts_timed() -> Iterator[dict[str, float]]:
    """Measure CPU seconds inside the guards while the block runs, by part."""
    spent = {part: 0.0 for part, _, _ in PARTS}
    running: list[str] = []
    since = [0.0]

    def switch() -> None:
        now = time.thread_time()
        if running:
            spent[running[-1]] += now - since[0]
        since[0] = now

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            switch()
            running.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                switch()
                running.pop()

        return run

    with ExitStack() as stack:
        for part, owner, name in PARTS:
            replacement = timed(part, getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield spent


def median(values: Sequence[float]) -> float:
    """Return the median, 0 of nothing."""
    return statistics.median(values) if values else 0.0


FIRSTS = 8
"""Fresh runs of each kind whose first steps are measured."""


def measure(task: Task, steps: int) -> dict[str, Any]:
    """Measure one task: what guards add to ``steps`` steps, as parts of the run without them."""
    firsts = [_firsts(task, bool(number % 2)) for number in range(FIRSTS + 1)][1:]
    turns = _turns(task, steps)
    row: dict[str, Any] = {"task": task.name, "steps": steps}
    for clock in CLOCKS:
        row[clock] = _summary(firsts, turns, clock, steps)
    row["parts ms"] = _parts(task)
    for clock in CLOCKS:
        found = row[clock]
        expected = steps / MEAN_GAP * row["parts ms"]["secret probe"] / found["run ms"]
        found["secret"] = expected
        found["all"] = found["first"] + expected + found["passes"]
    return row


Pair = dict[bool, dict[str, float]]
"""Seconds of a step with guards and of one without, by clock."""


def _firsts(task: Task, guarded_first: bool) -> Pair:
    """Return the times of the first steps of two fresh runs.

    Whichever takes it first finds colder memory.
    """
    runs = {guarded: begin(task, guarded=guarded) for guarded in (True, False)}
    gc.collect()
    order = (True, False) if guarded_first else (False, True)
    return {guarded: runs[guarded].timed_step() for guarded in order}


def _turns(task: Task, steps: int) -> dict[bool, list[Pair]]:
    """Return the times of steps that begin an epoch (True) and of others, in pairs.

    Epochs with and without guards take turns; a pair has the steps of two at the same place.
    """
    run = begin(task, guarded=True)
    gc.collect()
    for _ in range(_WARM):
        run.step()
    found: dict[bool, list[Pair]] = {True: [], False: []}
    until = time.perf_counter() + _SHORTEST
    while len(found[False]) < steps or time.perf_counter() < until:
        order = (True, False) if len(found[True]) % 2 else (False, True)
        taken: dict[bool, list[dict[str, float]]] = {}
        for guarded in order:
            run.guards.switch(guarded)
            taken[guarded] = [run.timed_step() for _ in range(run.epoch)]
        for place in range(run.epoch):
            found[place == 0].append({guarded: each[place] for guarded, each in taken.items()})
    return found


_SHORTEST = 5.0
"""Seconds of turns at least: guards add less to a step than short steps differ by."""

_WARM = 8
"""Steps of a run that are not counted: some whole epochs."""


def _summary(
    firsts: list[Pair], turns: dict[bool, list[Pair]], clock: str, steps: int
) -> dict[str, Any]:
    """Return the parts of a run without guards that guards add to its first and other steps."""

    def added(pairs: Sequence[Pair]) -> list[float]:
        return [pair[True][clock] - pair[False][clock] for pair in pairs]

    starts, later = turns[True], turns[False]
    step = median([pair[False][clock] for pair in later])
    plain = median([pair[False][clock] for pair in firsts]) + (steps - 1) * step
    first = statistics.fmean(median(added(each)) for each in (firsts[::2], firsts[1::2]))
    each = median(added(later))
    return {
        "run ms": 1e3 * plain,
        "step ms": 1e3 * step,
        "pass us": 1e6 * each,
        "first": first / plain,
        "passes": (steps - 1) * each / plain,
        "epoch ms": 1e3 * (median(added(starts)) - each),
    }


def _parts(task: Task, steps: int = 30, probes: int = 5) -> dict[str, float]:
    """Return CPU milliseconds of each part of two probes, else of an ordinary step.

    They are timed inside.
    """
    with parts_timed() as spent:
        run = begin(task, guarded=True)
        occasions = run.engine.capture.guard._occasions
        run.step()
        found = {"first probe": spent["probe"], "gradients": spent["gradients"]}
        each: list[dict[str, float]] = []
        for _ in range(steps):
            before = dict(spent)
            run.step()
            each.append({part: spent[part] - before[part] for part in ("rows", "scans")})
        for part in ("rows", "scans"):
            found[part] = median([taken[part] for taken in each])
        secret = []
        for _ in range(probes):
            before = dict(spent)
            occasions.gap = 1
            run.step()
            occasions.gap = _NO_PROBE
            secret.append(spent["probe"] - before["probe"])
    found["secret probe"] = median(secret)
    return {part: 1e3 * seconds for part, seconds in found.items()}


def main(request: dict[str, Any]) -> dict[str, Any]:
    """Measure what the request asks for, on one thread."""
    # A stack is one node only where guards have looked: without them a step would take longer.
    SHORT_CUT[:] = [lambda *_: None]
    torch.set_num_threads(1)
    return measure(TASKS[request["task"]], request["steps"])


if __name__ == "__main__":
    with quiet():
        print(json.dumps(main(json.loads(sys.argv[1]))))
