"""Report what a private training step of a model costs: per phase, per layer and per op."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from ..base import validate as check
from ..base.counts import FORMULA
from ..base.errors import InvalidInput
from ..base.report import Report, ReportTable
from ..base.threads import torch_threads
from ..engine import named as by_name
from ..engine.subject import BenchmarkModel, subject
from ..privacy.mechanisms import DPSGD
from ..privacy.mechanisms.base import Mechanism
from . import layers, phases, roofline
from .energy import SOURCE, energy
from .machine import CACHE_MISSES, LINE_BYTES
from .measured import Measured, Side, measure
from .roofline import Limits, Point
from .trace import TracedCall

BATCH_SIZE = 4
"""The default batch size of a report; ResNet-18 then takes a few seconds on two cores."""


UNSTEADY = 2.0
"""Longest over shortest step of one kind, from which on a report warns of its times."""


def report(
    model: str | nn.Module,
    *,
    batch_size: int = BATCH_SIZE,
    row_shape: Sequence[int] | None = None,
    mechanism: Mechanism | str | None = None,
    rounds: int | None = None,
    threads: int | None = None,
) -> Report:
    """Train a model for a few private and ordinary steps on the CPU, and say where it all goes.

    Data are generated; nothing is kept. Every call of an op is recorded with what it declares, its
    time and backend; torch's own operations are counted. Both ways of training run in this process,
    in turns.

    Args:
        model: a name of ``dpkern.engine.demo.models``, ``package.module:callable``, or a module
            (``engine.subject``).
        batch_size: samples of a step, at least 2.
        row_shape: shape of one sample. None selects the model's usual one.
        mechanism: mechanism of the private step, or its name in ``dpkern.train``. None selects
            DP-SGD with flat clipping, as ``PrivacyEngine`` makes it.
        rounds: number of times that each way is timed. None selects as many as fit into about a
            second and a half.
        threads: torch's; None leaves them.

    Returns:
        Facts, tables and figures; the tables speak of one step, that of median length.

    Raises:
        InvalidInput: an unknown model, rows that it does not take, or numbers out of range.
        DPKernError: a model or mechanism that the engine refuses.
    """
    if rounds is not None:
        check.integer(1, rounds=rounds)
    if threads is not None:
        check.integer(1, threads=threads)
    started = time.perf_counter()
    made = subject(model, batch_size=batch_size, row_shape=row_shape)
    chosen = _mechanism(mechanism, made)
    with torch_threads(threads or torch.get_num_threads()):
        used = torch.get_num_threads()
        limits = roofline.measure_limits()
        measured = measure(made, chosen, rounds=rounds)
    ops = roofline.points_of(measured.private.ops)
    facts = {
        **_facts(made, measured, limits, used),
        "phases": phases.facts(measured),
        "layers": layers.facts(made.model, measured),
        "ops": [_point_facts(point, limits) for point in ops],
        "calls": [_call_facts(call) for call in measured.private.ops],
        "energy": _energy(measured),
        "seconds": time.perf_counter() - started,
    }
    return Report(
        name=f"model-{made.name.replace(':', '-').replace('.', '-')}",
        title=f"What privacy costs: one training step of {made.name}",
        summary=_summary(made, measured, chosen),
        facts=facts,
        tables=[
            phases.table(measured),
            layers.table(made.model, measured),
            _ops_table(ops, limits),
            _machine_table(measured, limits),
        ],
        figures=[
            phases.figure(measured),
            *layers.figures(made.model, measured),
            roofline.figure([*ops, *phases.of_torch(measured.plain)], limits),
        ],
        notes=_notes(measured),
    )


def _mechanism(given: Mechanism | str | None, made: BenchmarkModel) -> Mechanism:
    if given is None:
        return DPSGD(noise_multiplier=1.0, max_grad_norm=1.0, arithmetic="float")
    if isinstance(given, Mechanism):
        return given
    check.choice(by_name.NAMES, mechanism=given)
    run = by_name.Run(
        model=made.model,
        row_shape=made.rows,
        classes=made.classes,
        steps=1,
        sample_rate=1 / made.batch,
        rows=made.batch * made.batch,
        batch_size=made.batch,
        delta=1e-5,
    )
    mechanism, _ = by_name.make(given, run, mode="corrected")
    if mechanism.noise_multiplier is None:
        raise InvalidInput(
            "mechanism",
            expected="one that adds noise to gradients",
            got=given,
            remedy="Train as usual; this mechanism costs nothing at a step.",
        )
    return mechanism


def _summary(made: BenchmarkModel, measured: Measured, mechanism: Mechanism) -> str:
    private, plain = measured.private, measured.plain
    more = phases.untraced(private)
    for phase, seconds in phases.untraced(plain).items():
        more[phase] = more.get(phase, 0.0) - seconds
    most = max(more, key=more.__getitem__)
    return (
        f"A private step of {made.name} ({type(mechanism).__name__}) on {made.batch} samples takes "
        f"{_milliseconds(private.median)}, {private.median / plain.median:.4g} times the "
        f"{_milliseconds(plain.median)} of a step without privacy. The "
        f"phase that grew most is {most}, by {_milliseconds(more[most])}.{_unsteady(measured)}"
    )


def _unsteady(measured: Measured) -> str:
    """Return a warning if steps of one kind took very different times, except for a slow tenth."""
    spreads = []
    for side in (measured.private, measured.plain):
        times = sorted([*side.plain, *(sum(step.values()) for step in side.traced)])
        spreads.append(times[-1 - len(times) // 10] / times[0])
    if max(spreads) < UNSTEADY:
        return ""
    return (
        f" Steps of one kind differed up to {max(spreads):.1f}-fold: the machine was busy, and its "
        "times and ratios are not to be quoted."
    )


def _milliseconds(seconds: float) -> str:
    number = 1e3 * seconds
    return f"{number:,.0f} ms" if number >= 1000 else f"{number:.4g} ms"  # as in the tables


def _facts(
    made: BenchmarkModel, measured: Measured, limits: Limits, threads: int
) -> dict[str, Any]:
    private, plain = measured.private, measured.plain
    return {
        "model": made.name,
        "parameters": sum(p.numel() for p in made.model.parameters() if p.requires_grad),
        "batch_size": made.batch,
        "row_shape": list(made.rows),
        "mechanism": type(measured.engine.step.mechanism).__name__,
        "arithmetic": measured.engine.step.plan.arithmetic,
        "clipping": measured.engine.step.plan.clipping,
        "threads": threads,
        "torch": torch.__version__,
        "rounds": len(private.plain),
        "step_seconds": {"private": private.median, "non-private": plain.median},
        "traced_seconds": {"private": _length(private), "non-private": _length(plain)},
        "ratio": private.median / plain.median,
        "bandwidth_bytes_per_second": limits.bandwidth,
        "peak_flops_per_second": limits.peak,
        "memory": {
            name: {"peak_growth_bytes": s.memory, "note": s.memory_note, "page_faults": s.faults}
            for name, s in (("private", private), ("non-private", plain))
        },
        "hardware_counters": {
            "private": private.counters,
            "non-private": plain.counters,
            "note": measured.counters_note,
        },
    }


def _length(side: Side) -> float:
    return sum(side.seconds.values())


def _point_facts(point: Point, limits: Limits) -> dict[str, Any]:
    return {
        "op": point.name,
        "backend": point.backend,
        "calls": point.calls,
        "bytes": point.bytes,
        "flops": point.flops,
        "random_words": point.words,
        "launches": point.launches,
        "evidence": FORMULA,
        "seconds": point.seconds,
        "share_of_limit": point.share(limits),
    }


def _call_facts(call: TracedCall) -> dict[str, Any]:
    return {
        "op": call.op,
        "phase": call.phase,
        "layers": [layer for layer, _ in call.shares],
        "backend": call.backend,
        "seconds": call.seconds,
        **asdict(call.cost),
    }


def _energy(measured: Measured) -> dict[str, Any]:
    """Return measured joules of a step where there are some, and the range of its counted work."""
    rounds = measured.engine.step.key.rounds
    found: dict[str, Any] = {"source": SOURCE, "measured_note": measured.energy_note}
    for name, side in (("private", measured.private), ("non-private", measured.plain)):
        costs = side.by_layer().values()
        both = energy(
            bytes=sum(cost.bytes for cost in costs),
            flops=sum(cost.flops for cost in costs),
            words=sum(cost.random_words for cost in costs),
            rounds=rounds,
        )
        found[name] = {
            "measured_joules": side.joules,
            **{
                end: {
                    "joules": joules.total,
                    "computing": joules.flops,
                    "random words": joules.words,
                    "memory": joules.bytes,
                }
                for end, joules in zip(("low", "high"), both, strict=True)
            },
        }
    return found


def _ops_table(points: Sequence[Point], limits: Limits) -> ReportTable:
    rows = [
        (
            *(p.name, p.backend, p.calls, 1e3 * p.seconds, p.bytes, p.flops, p.words, p.launches),
            p.bytes / p.seconds / 1e9 if p.seconds else None,
            p.flops / p.seconds / 1e9 if p.seconds else None,
            p.share(limits),
        )
        for p in sorted(points, key=lambda p: -p.seconds)
    ]
    names = ("op", "backend", "calls", "ms", "bytes", "FLOPs", "random words", "launches")
    return ReportTable(
        title="Ops of dpkern in the private step",
        columns=(*names, "GB/s", "GFLOP/s", "share of limit"),
        rows=rows,
        note="Bytes, FLOPs, words and launches are declared, by formula: compulsory traffic at the "
        "op's edge. The limit is the time that the measured bandwidth or peak would need for them; "
        "random words take time of their own, which it does not know, and caches can beat it.",
    )


def _machine_table(measured: Measured, limits: Limits) -> ReportTable:
    """Build the table of declared and counted work against the machine's counters and limits."""
    sides = (measured.private, measured.plain)
    rows: list[tuple[str | float | None, ...]] = []

    def row(quantity: str, *values: float | None) -> None:
        rows.append((quantity, *values))

    row(
        "bytes declared and counted, MB",
        *(sum(cost.bytes for cost in side.by_layer().values()) / 1e6 for side in sides),
    )
    for name in measured.private.counters:
        row(f"{name}, hardware", *(side.counters[name] for side in sides))
        if name == CACHE_MISSES:
            row("bytes of cache misses, MB", *(LINE_BYTES * s.counters[name] / 1e6 for s in sides))
    memory = [None if side.memory is None else side.memory / 1e6 for side in sides]
    row("peak resident memory added by a step, MB", *memory)
    row("pages touched for the first time", *(side.faults for side in sides))
    joules = _energy(measured)
    for name in measured.private.joules:
        row(f"energy of {name}, measured, mJ", *(1e3 * side.joules[name] for side in sides))
    for end, words in (("low", "7 nm, from a cache"), ("high", "45 nm, from memory")):
        values = [1e3 * joules[name][end]["joules"] for name in ("private", "non-private")]
        row(f"energy, {words}, mJ", *values)
    row("copy bandwidth of this machine, GB/s", limits.bandwidth / 1e9, None)
    row("matrix product peak of this machine, GFLOP/s", limits.peak / 1e9, None)
    return ReportTable(
        title="Machine, memory and energy",
        columns=("quantity", "private", "non-private"),
        rows=rows,
        note=f"Energy that is not called measured: published figures times counted work, {SOURCE}. "
        "The range is by process node and memory level; where both steps' ranges overlap, it does "
        "not say which one takes more.",
    )


def _notes(measured: Measured) -> list[str]:
    private, plain = measured.private, measured.plain
    steps = "1 step" if len(private.plain) == 1 else f"{len(private.plain)} steps"
    notes = [
        f"The step's time, the ratio and the phases that add up to it are medians of {steps} "
        "without tracing, divided as the traced step of median length, which other tables show. "
        f"Tracing took the private step to {_length(private) / private.median:.2f} times and the "
        f"other to {_length(plain) / plain.median:.2f} times that.",
        "FLOPs of torch's operations are those of products and convolutions, by torch's formulas; "
        "bytes those of all operands, each once (reference walk: every operation was seen).",
        "Work on several layers at once is divided in proportion to their parameters.",
    ]
    if measured.energy_note:
        notes.append(f"Energy is not measured: {measured.energy_note}.")
    if measured.counters_note:
        notes.append(f"No hardware counters: {measured.counters_note}.")
    notes += [f"Peak memory: {side.memory_note}." for side in (private,) if side.memory_note]
    return notes
