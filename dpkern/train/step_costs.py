"""Count and time one step of a run's kind, for its report: closed, counted, measured.

The step is one of generated samples, as many as a batch is expected to have: how many a batch of
the run really had is private, and so is who was clipped. Torch's own operations are timed and not
counted, and so is what a ring of noise makes on its thread.

    closed     the closed forms of the ops that the step calls, for these sizes; bytes: every read
               and every write
    counted    operations: the kernels' own templates on scalars that count, where an op has one and
               the step is small, else its closed form again; bytes: the tensors that ops were given
               and gave back, each once
    measured   seconds of the step and of its ops; the process's largest resident memory
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from threading import get_ident
from typing import Any

import torch

from ..base import dispatch
from ..base.counts import EXECUTED, FORMULA, Counts, weakest
from ..cost._facts import facts_of
from ..cost.counted import KERNELS, tally_of
from ..cost.forms import FORMS
from ..cost.op_time import line_of
from ..cost.parts import NOISE_LINES
from ..ops._draws import CdtDraws, SampleReads

COUNTED_NUMBERS = 1 << 16
"""Largest number of trained values whose step is executed on scalars that count: about a second."""
TIMED, ENOUGH = 3, 0.5
"""Maximum of timed steps, and the seconds after which there are enough of them."""
NOT_COUNTED = (
    "torch's own operations (forward and backward pass, and between ops), and what a ring of noise "
    "makes on its thread: they are in the measured seconds alone"
)
_MOVED = ("LOAD", "STORE", "RNG")
"""Primitives that are bytes or random words, and no operations."""


@dataclass
class OpCosts:
    """The costs of all calls of an op in one step."""

    calls: int = 0
    closed: Counts = field(default_factory=Counts)
    counted: Counts = field(default_factory=Counts)
    evidence: str = EXECUTED
    noise: Counts = field(default_factory=Counts)
    flops: int = 0
    declared_bytes: int = 0
    operand_bytes: int = 0
    seconds: float = 0.0


class _Recorder:
    """Sees the ops that one thread calls in a step."""

    def __init__(self, execute: bool) -> None:
        self.ops: dict[str, OpCosts] = {}
        self._execute, self._thread = execute, get_ident()

    def __call__(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with dispatch.intercepted(None):
            if get_ident() != self._thread:
                return op(*args, **kwargs)
            given = {name: value for name, value in kwargs.items() if name != "backend"}
            form = FORMS[op.name](*args, **given, **facts_of(op.name, args, given))
            row = self.ops.setdefault(op.name, OpCosts())
            counted, evidence = form.of("exact"), form.evidence
            started = time.perf_counter()
            if self._execute and _can_count(op.name, given):
                result, run = tally_of(op, args, kwargs)
                counted, evidence = run.counts, EXECUTED
            else:
                result = op(*args, **kwargs)
                evidence = FORMULA if evidence == EXECUTED else evidence
            row.seconds += time.perf_counter() - started
        row.calls += 1
        row.closed += form.of("exact")
        noise = (i.counts for i in form.items if i.kind == "exact" and _is_noise(op.name, i.name))
        row.noise += sum(noise, Counts())
        row.flops += sum(i.floating for i in form.items)
        row.counted += counted
        row.evidence = weakest((row.evidence, evidence))
        row.declared_bytes += sum(i.bytes_read + i.bytes_written for i in form.items)
        row.operand_bytes += _bytes_of((args, given, result))
        return result


def costs_of(step: Callable[[], object], *, of: str, numbers: int) -> dict[str, Any]:
    """Take some steps and return what one takes, as JSON values.

    Args:
        step: takes one step each time that it is called, on generated samples.
        of: what the step is of, in words.
        numbers: trained values; beyond ``COUNTED_NUMBERS`` nothing is executed to be counted.
    """
    step()  # buffers and tables of the first step
    seconds: list[float] = []
    timed = []
    while len(seconds) < TIMED and sum(seconds) < ENOUGH:
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
        recorder = _Recorder(execute=False)
        with dispatch.intercepted(recorder):
            step()
        timed.append(recorder.ops)
    counter = _Recorder(execute=numbers <= COUNTED_NUMBERS)
    with dispatch.intercepted(counter):
        step()
    each_op = []
    for name, row in counter.ops.items():
        each = [ops[name].seconds for ops in timed if name in ops]
        row.seconds = statistics.median(each) if each else 0.0
        each_op.append(_row(name, row))
    found = list(counter.ops.values())
    closed, counted = (sum(_operations(c) for c in cs) for cs in zip(*_pairs(found), strict=True))
    return {
        "of": of,
        "not_counted": NOT_COUNTED,
        "closed": {
            "operations": closed,
            "noise_operations": sum(_operations(row.noise) for row in found),
            "flops": sum(row.flops for row in found),
            "bytes": sum(row.declared_bytes for row in found),
            "random_words": sum(row.closed["RNG"] for row in found),
        },
        "counted": {
            "operations": counted,
            "bytes": sum(row.operand_bytes for row in found),
            "random_words": sum(row.counted["RNG"] for row in found),
            "evidence": weakest(row.evidence for row in found),
            "executed_ops": sorted(n for n, r in counter.ops.items() if r.evidence == EXECUTED),
            "agrees": all(row.closed == row.counted for row in found),
        },
        "measured": {
            "seconds": statistics.median(seconds),
            "seconds_in_ops": sum(row.seconds for row in found),
            "peak_resident_bytes": _resident(),
        },
        "ops": each_op,
    }


def rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the row of a report's table; none of a summary without costs."""
    costs = summary.get("costs")
    if costs is None:
        return []
    closed, counted, measured = costs["closed"], costs["counted"], costs["measured"]
    said = (
        f"{costs['of']}: {closed['operations']:,} operations "
        f"({closed['noise_operations']:,} of them noise), {closed['bytes']:,} bytes closed; "
        f"{counted['operations']:,}, {counted['bytes']:,} counted ({counted['evidence']}); "
        f"{1e3 * measured['seconds']:.3g} ms. Not counted: {costs['not_counted']}"
    )
    return [("costs", said)]


def _is_noise(op: str, line: str) -> bool:
    """Return whether a line of an op makes noise or releases it, within a fused update too."""
    return op.startswith("noise.") or (op == "update.step" and line_of(line) in NOISE_LINES)


def _can_count(op: str, given: dict[str, Any]) -> bool:
    # The counted add_noise makes its own draws.
    return op in KERNELS and not (op == "noise.add_noise" and given.get("draws") is not None)


def _operations(counts: Counts) -> int:
    return sum(n for primitive, n in counts.items() if primitive not in _MOVED)


def _pairs(rows: list[OpCosts]) -> list[tuple[Counts, Counts]]:
    return [(row.closed, row.counted) for row in rows] or [(Counts(), Counts())]


def _row(name: str, row: OpCosts) -> dict[str, Any]:
    return {
        "op": name,
        "calls": row.calls,
        "closed": dict(row.closed),
        "closed_noise": dict(row.noise),
        "counted": dict(row.counted),
        "evidence": row.evidence,
        "bytes_closed": row.declared_bytes,
        "bytes_counted": row.operand_bytes,
        "seconds": row.seconds,
    }


def _bytes_of(values: Any) -> int:
    """Return the bytes of all tensors among these values, each counted once."""
    found = {(t.data_ptr(), t.nbytes): t.nbytes for t in _tensors(values) if t.numel()}
    return sum(found.values())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, CdtDraws | SampleReads):
        return  # a table stays in the cache: closed forms read it for nothing too
    elif is_dataclass(value) and not isinstance(value, type):
        for part in fields(value):
            yield from _tensors(getattr(value, part.name))
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)


def _resident() -> int:
    """Return the largest resident memory of this process so far, in bytes."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


__all__ = ["COUNTED_NUMBERS", "OpCosts", "costs_of", "rows"]
