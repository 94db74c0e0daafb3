"""Measure private and non-private steps of one model, side by side in one process.

The private step is the engine's, on the same batch as torch's own. Both are timed plainly, in
turns; then once more under a ``StepTracer``, which says where the time goes; and counted once.
Before all that each has taken a step on two samples, in which the engine checks the model.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..base.op_cost import Cost
from ..engine import PrivacyEngine
from ..engine.subject import BenchmarkModel
from ..privacy.mechanisms.base import Mechanism
from .energy_meter import EnergyMeter
from .machine import HardwareCounters, page_faults, peak_memory
from .trace import BACKWARD, ENGINE, FORWARD, UPDATE, StepTracer, TracedCall, divided
from .traffic import Moved, Traffic

SECONDS = 1.5
"""Maximum seconds of the timed rounds, unless their number is given."""
FEWEST_ROUNDS, MOST_ROUNDS = 3, 15
_LR, _MOMENTUM = 1e-3, 0.9
_DATASET = 1000
"""Batches in the made-up data set; only the ledger sees it."""


@dataclass
class Variant:
    """One way of training, ready for steps.

    Attributes:
        name: ``private`` or ``non-private``.
        step: function that steps on so many samples, or with None on the batch, under a trace if
            one is given.
        trace: makes a trace of it.
        base: the phase of the optimizer's step outside of ops.
    """

    name: str
    step: Callable[..., None]
    trace: Callable[[], StepTracer]


@dataclass
class Side:
    """The measurements of one variant.

    Attributes:
        plain: seconds of each step without a trace.
        traced: seconds by phase and layer, of each step with one.
        calls: the op calls of each step with a trace.
        moved: bytes and operations of torch's own operations, by phase and layer.
        memory: bytes that a step adds at its peak. None means unknown; ``memory_note`` says why.
        faults: pages that a step touches for the first time.
        counters: hardware counters of one step; empty where they cannot be read.
        joules: measured energy of one step by counter; empty where none can be read.
    """

    plain: list[float] = field(default_factory=list)
    traced: list[dict[tuple[str, str], float]] = field(default_factory=list)
    calls: list[list[TracedCall]] = field(default_factory=list)
    moved: dict[tuple[str, str], Moved] = field(default_factory=dict)
    memory: int | None = None
    memory_note: str = ""
    faults: int = 0
    counters: dict[str, int] = field(default_factory=dict)
    joules: dict[str, float] = field(default_factory=dict)

    @property
    def middle(self) -> int:
        """The traced step of median length: tables describe this one, so that they add up."""
        lengths = [sum(step.values()) for step in self.traced]
        return lengths.index(statistics.median_low(lengths))

    @property
    def seconds(self) -> dict[tuple[str, str], float]:
        """The seconds of the middle step by phase and layer."""
        return self.traced[self.middle]

    @property
    def ops(self) -> list[TracedCall]:
        """The op calls of the middle step."""
        return self.calls[self.middle]

    @property
    def median(self) -> float:
        """The median seconds of a plain step."""
        return statistics.median(self.plain)

    def by_layer(self) -> dict[str, Cost]:
        """Return bytes, FLOPs, words and launches per layer: declared by ops, counted for torch."""
        totals: dict[str, list[int]] = {}

        def add(shares: Any, numbers: Sequence[int]) -> None:
            for i, number in enumerate(numbers):
                for layer, part in divided(number, shares).items():
                    totals.setdefault(layer, [0] * 5)[i] += part

        for call in self.ops:
            add(call.shares, fields_of(call.cost))
        for (_, layer), moved in self.moved.items():
            add(((layer, 1),), (moved.bytes, 0, moved.flops, 0, 0))
        return {layer: Cost(*numbers) for layer, numbers in totals.items()}


def fields_of(cost: Cost) -> tuple[int, int, int, int, int]:
    """Return the numbers of a cost in the order of its fields."""
    return cost.bytes_read, cost.bytes_written, cost.flops, cost.random_words, cost.launches


@dataclass
class Measured:
    """Both sides, and how long it took to measure them."""

    private: Side
    plain: Side
    counters_note: str
    energy_note: str
    engine: PrivacyEngine
    seconds: float


def measure(subject: BenchmarkModel, mechanism: Mechanism, *, rounds: int | None) -> Measured:
    """Take, time, trace and count steps of both variants.

    Args:
        subject: model and batch.
        mechanism: mechanism of the private step.
        rounds: number of times that each variant is timed, plainly and traced. None selects as many
            as ``SECONDS`` allow, and at least three.

    Raises:
        DPKernError: a model or mechanism that the engine refuses.
    """
    started = time.perf_counter()
    engine = PrivacyEngine()
    variants = [_torch(subject), _private(subject, mechanism, engine)]
    sides = {variant.name: Side() for variant in variants}
    for variant in variants:
        variant.step(min(2, subject.batch))
        _count(variant, sides[variant.name])
    timed = time.perf_counter()
    done = 0
    while done < (MOST_ROUNDS if rounds is None else rounds):
        for variant in variants:
            side = sides[variant.name]
            begun = time.perf_counter()
            variant.step()
            side.plain.append(time.perf_counter() - begun)
        for variant in variants:
            side, trace = sides[variant.name], variant.trace()
            variant.step(None, trace)
            side.traced.append(trace.seconds)
            side.calls.append(trace.calls)
        done += 1
        spent = time.perf_counter() - timed
        if rounds is None and done >= FEWEST_ROUNDS and spent * (done + 1) / done > SECONDS:
            break
    note = _read_counters(variants, sides)
    meter = EnergyMeter()
    for variant in variants:
        sides[variant.name].joules = meter.measure(variant.step, done)
    both = sides["private"], sides["non-private"]
    return Measured(*both, note, meter.reason, engine, time.perf_counter() - started)


def _count(variant: Variant, side: Side) -> None:
    """Take one step, watch its memory and count torch's operations."""
    trace = variant.trace()
    before = page_faults()
    with Traffic(trace) as traffic:
        side.memory, side.memory_note = peak_memory(lambda: variant.step(None, trace))
    side.faults = page_faults() - before
    side.moved = traffic.moved


def _read_counters(variants: Sequence[Variant], sides: dict[str, Side]) -> str:
    """Read the hardware counters of one step each; return why not, where they cannot be read."""
    counters = HardwareCounters()
    if counters.reason:
        return counters.reason
    try:
        for variant in variants:
            before = counters.read()
            variant.step()
            after = counters.read()
            sides[variant.name].counters = {name: after[name] - before[name] for name in after}
    finally:
        counters.close()
    return ""


def _torch(subject: BenchmarkModel) -> Variant:
    """Build the variant that trains without privacy, as torch does it."""
    model = subject.fresh()
    step = _stepper(subject, model, _sgd(model), UPDATE)
    return Variant("non-private", step, lambda: StepTracer(model))


def _private(subject: BenchmarkModel, mechanism: Mechanism, engine: PrivacyEngine) -> Variant:
    """Build the variant that trains with the engine; each forward pass brings new samples."""
    model = subject.fresh()
    model, optimizer, _ = engine.make_private(
        module=model,
        optimizer=_sgd(model),
        data_loader=None,
        mechanism=mechanism,
        sample_rate=1 / _DATASET,
        expected_batch_size=subject.batch,
        dataset_size=_DATASET * subject.batch,
    )

    def trace() -> StepTracer:
        plan = engine.step.plan
        return StepTracer(model, dict(zip(engine.capture.names, plan.positions, strict=True)))

    ordinary = _stepper(subject, model, optimizer, ENGINE)

    def step(samples: int | None = None, trace: StepTracer | None = None) -> None:
        if trace is None:
            return ordinary(samples)
        with engine.capture.guard.paused():
            ordinary(samples, trace)

    return Variant("private", step, trace)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trained, lr=_LR, momentum=_MOMENTUM)


def _stepper(
    subject: BenchmarkModel, model: nn.Module, optimizer: torch.optim.Optimizer, base: str
) -> Callable[..., None]:
    """Return a step of forward pass, backward pass and update.

    ``base`` is charged for the part of the update outside of ops.
    """

    def step(samples: int | None = None, trace: StepTracer | None = None) -> None:
        def running(phase: str, **more: Any) -> Any:
            return nullcontext() if trace is None else trace.running(phase, **more)

        with nullcontext() if trace is None else trace.watching():
            with running(FORWARD):
                loss = subject.loss(model, samples)
            if trace is not None:
                trace.watch_backward(loss)
            with running(BACKWARD):
                loss.backward()  # type: ignore[no-untyped-call]
            shared = {} if trace is None else {"shares": trace.everything}
            with running(base, **shared):
                optimizer.step()
                optimizer.zero_grad()

    return step
