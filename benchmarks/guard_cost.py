"""Time private training with and without the guards around it, step by step in turns.

Usage: ``python -m benchmarks.guard_cost '{"task": ..., "steps": ..., "rounds": ...}'``

A run without guards begins its batches by hand: no hook looks at outputs and state, and records are
not followed. Both runs probe the gradients of the first batch, which is timed by itself. They take
one step after the other in one process, so that drift of the machine cancels. Secret probes come
once in 500 passes: one is timed by itself, its expected share added. The loader's epochs are short,
and the first step of each tries ``collate_fn``: a run counts as one epoch, and what another one
would add is a figure of its own.

Whichever run takes its first step first finds colder memory. Rounds alternate between the two
orders, and the figure of the first step is the mean of both orders' medians.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import nn

import dpkern
from dpkern.engine import loader
from dpkern.engine.capture import Capture
from dpkern.engine.guard import ForwardGuard
from dpkern.engine.occasions import MEAN_GAP
from dpkern.engine.padding import PaddingCheck
from dpkern.engine.provenance import YieldedBatch, boundary, rules

from .step_cases import CLIP, LR, MOMENTUM, NOISE, _loader, quiet
from .step_models import TASKS, Task

CLOCKS: dict[str, Callable[[], float]] = {"cpu": time.thread_time, "wall": time.perf_counter}


@dataclass
class Run:
    """A training run of one model in the plain loop.

    Attributes:
        engine: the engine that made it private.
        step: takes one step.
        epoch: steps from one start of the loader to the next.
    """

    engine: dpkern.PrivacyEngine
    step: Callable[[], None]
    epoch: int
    taken: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in CLOCKS})
    """Seconds of each step, by clock."""

    def timed_step(self) -> None:
        """Take a step and note how long it took."""
        before = {name: clock() for name, clock in CLOCKS.items()}
        self.step()
        for name, clock in CLOCKS.items():
            self.taken[name].append(clock() - before[name])


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
    engine.capture.guard._occasions._gap = 1 << 60
    if not guarded:
        _drop_guards(engine, private)
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

    return Run(engine, step, len(private))


def _drop_guards(engine: dpkern.PrivacyEngine, batches: Any) -> None:
    capture, adapter = engine.capture, engine.adapter
    capture.guard.detach()
    capture.guard.after = lambda args, kwargs, output: None  # type: ignore[method-assign]
    capture.boundary = batches.boundary = batches.padding = None
    adapter.batches.boundary.has_loader = False
    batches._check_collation = lambda: None

    def hand_out(batch: YieldedBatch) -> None:
        adapter.begin_batch(batch.size, first=batch.first, final=batch.final)

    batches.on_batch = hand_out


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


def measure(task: Task, steps: int, rounds: int) -> dict[str, Any]:
    """Measure one task: what guards add to ``steps`` steps, as parts of the run without them.

    The first round warms up and is not counted.
    """
    turns: list[dict[bool, dict[str, list[float]]]] = []
    for number in range(rounds + 1):
        runs = {guarded: begin(task, guarded=guarded) for guarded in (True, False)}
        gc.collect()
        for step in range(steps if number else 3):
            first = bool((step + number) % 2)
            runs[first].timed_step()
            runs[not first].timed_step()
        turns.append({guarded: run.taken for guarded, run in runs.items()})
        epoch = runs[True].epoch
    row: dict[str, Any] = {"task": task.name, "steps": steps, "rounds": rounds}
    for clock in CLOCKS:
        row[clock] = _summary([{g: t[g][clock] for g in t} for t in turns[1:]], epoch)
    row["parts ms"] = _parts(task)
    for clock in CLOCKS:
        found = row[clock]
        expected = steps / MEAN_GAP * row["parts ms"]["secret probe"] / found["run ms"]
        found["secret"] = expected
        found["all"] = found["first"] + expected + found["passes"]
    return row


def _summary(turns: list[dict[bool, list[float]]], epoch: int) -> dict[str, Any]:
    """Return the parts of a run without guards that guards add to its first and other steps."""
    plain = median([sum(t[False]) for t in turns])
    count = len(turns[0][False]) - 1
    firsts = [t[True][0] - t[False][0] for t in turns]
    first = statistics.fmean(median(one) for one in (firsts[::2], firsts[1::2]) if one)
    pairs = [[*enumerate(zip(t[True], t[False], strict=True))] for t in turns]
    later = [pair for turn in pairs for i, pair in turn if i % epoch]
    starts = [pair for turn in pairs for i, pair in turn[1:] if i % epoch == 0]
    each = median([a - b for a, b in later])
    passes = count * each
    return {
        "run ms": 1e3 * plain,
        "step ms": 1e3 * median([b for _, b in later]),
        "ratio of runs": median([sum(t[True]) / sum(t[False]) for t in turns]),
        "ratio of steps": median([a / b for a, b in later]),
        "first": first / plain,
        "passes": passes / plain,
        "epoch ms": 1e3 * (median([a - b for a, b in starts]) - each),
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
            occasions._gap = 1
            run.step()
            occasions._gap = 1 << 60
            secret.append(spent["probe"] - before["probe"])
    found["secret probe"] = median(secret)
    return {part: 1e3 * seconds for part, seconds in found.items()}


def main(request: dict[str, Any]) -> dict[str, Any]:
    """Measure what the request asks for, on one thread."""
    torch.set_num_threads(1)
    return measure(TASKS[request["task"]], request["steps"], request["rounds"])


if __name__ == "__main__":
    with quiet():
        print(json.dumps(main(json.loads(sys.argv[1]))))
