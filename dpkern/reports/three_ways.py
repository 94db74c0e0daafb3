"""Report one private step three ways: its closed form, a count while it runs, its time here.

The step is that of ``cost.step_systems``: one sample on one small layer, with a gradient far above
its bound. The same step runs under ``cost.counting`` and, by the backends that would train,
under a clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..base import dispatch
from ..base.counts import EXECUTED, FORMULA, Counts, Itemised, weakest
from ..base.report import Report, ReportTable
from ..base.rng import Key, Purpose
from ..cost import count, counting, processors
from ..cost._numbers import tidy
from ..cost.autoencoder import CountOptions
from ..cost.forms import FORMS
from ..cost.phases import by_phase
from ..cost.processors import Processor
from ..cost.step_systems import RULE, StepForm, systems
from ..privacy.mechanisms import LabelMechanism
from ..step.noise_tables import RingPrefetch
from ..step.noise_tables.named import INLINE, source_of
from ..step.step import DPStep

ROUNDS = 25
"""Steps under each clock; a step takes about a millisecond."""
_SEED = 7
_FAR = 1e4
"""Gradients this large exceed every bound."""


@dataclass(frozen=True)
class StepCostReport:
    """A step in its three ways.

    Attributes:
        closed, counted: the two counts by phase and kind.
        ops: calls, closed form, count, median seconds of all calls, and evidence of the count, by
            op. Only what was ``executed`` can differ from its closed form.
        seconds: median of the whole step.
    """

    closed: Itemised
    counted: Itemised
    ops: dict[str, tuple[int, Counts, Counts, float, str]]
    seconds: float

    @property
    def executed(self) -> int:
        """The number of ops that ran in their counted kernels."""
        return sum(evidence == EXECUTED for *_, evidence in self.ops.values())

    @property
    def agrees(self) -> bool:
        """Whether both counts are equal, phase by phase and op by op; the noise's tails apart."""
        both = (_settled(self.closed), _settled(self.counted))
        return both[0] == both[1] and all(form == run for _, form, run, *_ in self.ops.values())


def report(
    mechanism: str = "spof",
    *,
    size: tuple[int, int] = (14, 7),
    processor: str | Path | Processor = "k7",
    options: CountOptions | None = None,
    noise: str | None = None,
    layer: str | None = None,
) -> Report:
    """Return ``cost.count.report``; a private step of dpkern adds its execution and its time.

    Args:
        mechanism: a name in ``cost.systems.SYSTEMS``.
        size: features n and length l of the code.
        processor: a name in ``processors.available()``, a TOML file, or a ``Processor``.
        options: way of counting Appendix G; as printed by default.
        noise: source of the noise; see ``cost.count.report``. A ring is counted in closed form
            alone.
        layer: kind of layer of a whole step; a convolution likewise.

    Raises:
        InvalidInput: as ``cost.count.report``.
    """
    machine = processors.load(processor)
    given: dict[str, Any] = {"options": options, "noise": noise, "layer": layer}
    found = count.report(mechanism, size=size, processor=machine, **given)
    form = systems().get(mechanism)
    if form is None or layer == "conv" or noise == RingPrefetch.name:
        return found  # a ring's producer works beside the step, and sometimes on its thread
    ways = three_ways(form, *size, noise or INLINE, layer)
    verdict = "agrees with" if ways.agrees else "DIFFERS from"
    return replace(
        found,
        summary=f"{found.summary} A counted run, in which {ways.executed} of {len(ways.ops)} kinds "
        f"of ops were executed, {verdict} the closed form, phase by phase and op by op; on this "
        f"machine the step takes {1e6 * ways.seconds:,.0f} µs.",
        facts={**found.facts, "execution": _facts(ways)},
        tables=[*found.tables, _phase_table(ways, machine), _op_table(ways, machine)],
    )


def three_ways(
    form: StepForm, n: int, code: int, noise: str = INLINE, layer: str | None = None
) -> StepCostReport:
    """Count and time the step that ``form`` describes; no ring may make its noise."""
    step = _step(form, n, code, noise, layer)
    step()  # momentum and tables of the first step
    spans: dict[str, list[float]] = {}
    whole = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        step()
        whole.append(time.perf_counter() - started)
        for op, seconds in _timed(step).items():
            spans.setdefault(op, []).append(seconds)
    forms: dict[str, Counts] = {}

    def noting(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = {name: value for name, value in kwargs.items() if name != "backend"}
        exact = FORMS[op.name](*args, **given).of("exact")
        forms[op.name] = forms.get(op.name, Counts()) + exact
        with dispatch.intercepted(None):
            return op(*args, **kwargs)

    with dispatch.intercepted(noting):
        step()
    execution = counting.count(step)
    calls = [call for call in execution.calls if call.name in forms and call.kind == "exact"]
    ops = {
        name: (
            sum(call.name == name for call in calls),
            exact,
            sum((call.counts for call in calls if call.name == name), Counts()),
            statistics.median(spans[name]),
            weakest(call.evidence for call in calls if call.name == name),
        )
        for name, exact in forms.items()
    }
    closed = by_phase(form(n, code, noise, layer))
    return StepCostReport(closed, execution.items, ops, statistics.median(whole))


def _step(form: StepForm, n: int, code: int, noise: str, layer: str | None) -> Callable[[], None]:
    """Return a function that makes one step each time that it is called."""
    mechanism = form.make(n, code, layer)
    draw = torch.Generator().manual_seed(_SEED)
    if isinstance(mechanism, LabelMechanism):
        values = torch.randint(mechanism.categories, (n,), generator=draw)
        stream = Key.from_unsafe_seed(_SEED).stream(Purpose.SYMBOLS, 0)

        def respond() -> None:
            mechanism.estimate(mechanism.randomize(values, stream=stream))

        return respond
    step = DPStep(
        mechanism,
        [torch.randn(site.shape, generator=draw) for site in form.sites(n, code, layer)],
        optimizer=RULE,
        unsafe_seed=_SEED,
        noise_source=source_of(noise),
        expected_batch_size=1.0,
        **(mechanism.sampling or {"sample_rate": 0.1}),
    )
    gradients = [
        _FAR * torch.randn((1, *block.shape), generator=draw) for block in step.plan.blocks
    ]

    def train() -> None:
        step.add(gradients)
        step.finish()
        mechanism.project(step.params)

    return train


def _timed(step: Callable[[], None]) -> dict[str, float]:
    """Return the seconds of every op in one step."""
    spans: dict[str, float] = {}

    def clocked(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with dispatch.intercepted(None):
            started = time.perf_counter()
            result = op(*args, **kwargs)
            spans[op.name] = spans.get(op.name, 0.0) + time.perf_counter() - started
        return result

    with dispatch.intercepted(clocked):
        step()
    return spans


def _settled(items: Itemised) -> dict[tuple[str, str], Counts]:
    """Return counts by phase and kind, without what depends on the noise."""
    return {(i.name, i.kind): i.counts for i in items.items if i.kind != "random"}


def _primitives(counts: Counts) -> int:
    return sum(counts.values())


def _pairs(ways: StepCostReport) -> list[tuple[str, str, str, Counts, Counts]]:
    """Return phase, kind, evidence of the count, closed form and count."""
    closed, counted = _settled(ways.closed), _settled(ways.counted)
    evidence = {(i.name, i.kind): i.evidence for i in ways.counted.items}
    none = Counts()
    return [
        (*key, evidence.get(key, FORMULA), closed.get(key, none), counted.get(key, none))
        for key in closed.keys() | counted
    ]


def _phase_table(ways: StepCostReport, machine: Processor) -> ReportTable:
    pairs = sorted(_pairs(ways), key=lambda pair: -machine.price(pair[3]))
    forms = sum((pair[3] for pair in pairs), Counts())
    runs = sum((pair[4] for pair in pairs), Counts())
    rows = [
        *(
            (name, kind, *_numbers(both, machine), known, None)
            for name, kind, known, *both in pairs
        ),
        (
            "whole step",
            "",
            *_numbers((forms, runs), machine),
            weakest(known for _, _, known, *_ in pairs),
            tidy(1e6 * ways.seconds),
        ),
    ]
    return ReportTable(
        title="Closed, counted, measured: phases",
        columns=("phase", "kind", *_columns(machine), "evidence", "measured, µs"),
        rows=rows,
        note="Primitives of the closed form and of a counted run of the same step, and their "
        f"prices. Measured: median of {ROUNDS} steps, Python included. The noise's tails apart.",
    )


def _op_table(ways: StepCostReport, machine: Processor) -> ReportTable:
    rows = [
        (name, calls, *_numbers((form, run), machine), known, tidy(1e6 * seconds))
        for name, (calls, form, run, seconds, known) in ways.ops.items()
    ]
    return ReportTable(
        title="Closed, counted, measured: ops",
        columns=("op", "calls", *_columns(machine), "evidence", "measured, µs"),
        rows=rows,
        note="What torch does between ops is in the phases alone. Evidence of the count, of its "
        "weakest part: executed: the kernel's own template on numbers that count; reference walk: "
        "plain code, each operation of torch counted; formula: the closed form again.",
    )


def _columns(machine: Processor) -> tuple[str, ...]:
    return "closed", "counted", f"closed ({machine.unit})", f"counted ({machine.unit})"


def _numbers(both: Sequence[Counts], machine: Processor) -> tuple[int | float, ...]:
    return (*map(_primitives, both), *(tidy(machine.price(counts)) for counts in both))


def _facts(ways: StepCostReport) -> dict[str, Any]:
    return {
        "agrees": ways.agrees,
        "seconds": ways.seconds,
        "phases": [
            {
                "phase": name,
                "kind": kind,
                "closed": dict(form),
                "counted": dict(run),
                "evidence": known,
            }
            for name, kind, known, form, run in _pairs(ways)
        ],
        "ops": [
            {
                "op": name,
                "calls": n,
                "closed": dict(form),
                "counted": dict(run),
                "seconds": seconds,
                "evidence": known,
            }
            for name, (n, form, run, seconds, known) in ways.ops.items()
        ],
    }


__all__ = ["StepCostReport", "report", "three_ways"]
