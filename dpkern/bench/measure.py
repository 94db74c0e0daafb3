"""Measure one row: an op's call on one backend beside plain torch, and beside its limit.

No number without a check: the call's results and everything that it writes are compared with the
reference first, at the same shape, and every torch formulation that can be compared is.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..base.errors import BackendError, DPKernError
from ..base.signature import DeviceParameter
from ..base.threads import torch_threads
from ..ops import testing
from . import guard
from .case import Case
from .device import arguments, device_of, wait
from .formulations import WITHOUT, Formulation, formulations_of
from .limits import limit_of
from .outcome import check_close, check_unchanged, check_values, failure, outcome, run
from .paired import Rounds, Sampler, StopRule, collect

OURS, LIMIT = "dpkern", "limit"
CACHES = ("warm", "cold")
SAMPLE = 2e-4
"""Seconds that one sample lasts at least: calls that are shorter are repeated within it."""
LEVELS = 3
"""Multiples of the last cache that are overwritten to make it cold."""
FORMULATION_TOLERANCE = 1e-3
HOPELESS = 4.0
LONG = 2e-2
"""Seconds of a call from which on hopeless formulations are looked at once only."""


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """Options of a measurement.

    Attributes:
        threads: of torch and of every kernel.
        cache: ``warm`` repeats a call on the same memory; ``cold`` overwrites the caches before
            each call.
        isa: instruction set of the compiled CPU kernels; None selects the best one.
        rule: when sampling stops.
        compiled: compile every formulation too, with ``torch.compile``; None compiles those that
            gain by it.
        limits: of the quiet guard.
    """

    threads: int = 1
    cache: str = "warm"
    isa: str | None = None
    rule: StopRule = field(default_factory=StopRule)
    compiled: bool | None = False
    limits: guard.QuietLimits = guard.LIMITS


Row = dict[str, Any]


def measure(case: Case, backend: str, settings: BenchSettings) -> Row:
    """Return the row of a case; without numbers where the backend refuses it or is wrong."""
    row = identity(case, backend, settings)
    with ExitStack() as stack:
        stack.enter_context(torch_threads(settings.threads))
        stack.enter_context(torch.no_grad())
        stack.enter_context(device_of(backend))
        if settings.isa is not None:
            stack.enter_context(testing.isa(settings.isa))
        try:
            verify(case, backend)
        except BackendError as error:
            return row | {"refused": error.got}
        except (AssertionError, DPKernError, MemoryError, RuntimeError, ValueError) as error:
            return row | failure(error)
        try:
            return row | _timed(case, backend, settings)
        except (MemoryError, RuntimeError) as error:
            if "no memory" not in (why := failure(error)):
                raise
            return row | why


def identity(case: Case, backend: str, settings: BenchSettings) -> Row:
    """Return the fields of a row that say what it measures (``results.KEY``)."""
    return {
        "op": case.op.name,
        "case": case.name,
        "sizes": _sizes(case),
        "dtype": str(case.kind).removeprefix("torch.") if case.kind else None,
        "backend": backend,
        "isa": settings.isa,
        "threads": settings.threads,
        "cache": settings.cache,
    }


def verify(case: Case, backend: str) -> None:
    """Compare two calls with the reference: the second meets what the first left behind.

    Raises:
        BackendError: the backend refuses the call.
        AssertionError: the results differ, or an argument was changed that is not declared so.
    """
    for _ in range(1 if backend == "reference" else 2):
        args = _arguments(case, backend)
        check_values(case, args, run(case, backend, args))
        check_unchanged(case, args, _arguments(case, backend))


def _arguments(case: Case, backend: str) -> dict[str, Any]:
    devices = {
        p.name for p in case.op.schema.signature.parameters if isinstance(p, DeviceParameter)
    }
    return arguments(_fresh(case), backend, devices)


_KEPT: list[tuple[Case, dict[str, Any]]] = []
"""The arguments of the case that is measured: rows of one case follow each other."""


def _fresh(case: Case) -> dict[str, Any]:
    """Return a case's arguments on memory of their own: copied, which is faster than drawn."""
    if not _KEPT or _KEPT[0][0] is not case:
        _KEPT[:] = [(case, case.arguments())]
    return copy.deepcopy(_KEPT[0][1])


def call(case: Case, backend: str) -> Callable[[], Any]:
    """Return the op's call without arguments, as users write it, on memory that it keeps."""
    args = _arguments(case, backend)
    parameters = case.op.schema.call.parameters
    named = {n: args[n] for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
    places = [args[n] for n, p in parameters.items() if p.kind is not p.KEYWORD_ONLY]
    op = case.op
    return lambda: op(*places, **named, backend=backend)


def checked_formulations(
    case: Case, backend: str, compiled: bool | None
) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """Return torch's formulations that do the op's work, and why others are left out."""
    found: dict[str, Callable[[], Any]] = {}
    left: dict[str, str] = {}
    for formulation in formulations_of(case, compiled):
        reason = _difference(case, backend, formulation)
        if reason is None:
            found[formulation.name] = formulation.prepare(_arguments(case, backend))
        else:
            left[formulation.name] = reason
    return found, left


def _difference(case: Case, backend: str, formulation: Formulation) -> str | None:
    args = _arguments(case, backend)
    try:
        result = formulation.prepare(args)()
        if not formulation.draws:
            tolerance = max(FORMULATION_TOLERANCE, formulation.tolerance)
            check_close(case, outcome(case, args, result), tolerance)
    except (AssertionError, RuntimeError, KeyError) as error:
        return f"{type(error).__name__}: {error}"[:300]
    return None


def _timed(case: Case, backend: str, settings: BenchSettings) -> Row:
    device = device_of(backend)
    cost = case.op.cost(**_arguments(case, backend))
    limit = limit_of(cost, device)
    others, left = checked_formulations(case, backend, settings.compiled)
    others, slow = screened(others, device)
    works: dict[str, Callable[[], Any]] = {OURS: call(case, backend), **others, LIMIT: limit.run}
    evict = _evictor(device) if settings.cache == "cold" else None
    bursts = {name: 1 if evict else burst_of(work, device) for name, work in works.items()}
    samplers = {name: sampler(work, bursts[name], device, evict) for name, work in works.items()}
    before = guard.counters()
    rounds = collect(
        samplers,
        settings.rule,
        lambda found: (OURS, found.fastest(list(others)) or LIMIT),
        time.perf_counter,
    )
    quiet = guard.verdict(before, guard.counters(), settings.limits, threads=settings.threads)
    return (
        _numbers(rounds, list(others), limit.kind, limit.share, cost, bursts, quiet)
        | ({"left out": left} if left else {})
        | ({"no torch": WITHOUT[case.op.name]} if case.op.name in WITHOUT else {})
        | ({"one look ms": slow} if slow else {})
    )


def screened(
    found: dict[str, Callable[[], Any]], device: torch.device
) -> tuple[dict[str, Callable[[], Any]], dict[str, float]]:
    """Return the formulations that can be the fastest, and milliseconds of those that cannot.

    A whole table samples every way at least a dozen times: those that take ``HOPELESS`` times as
    long as the fastest in a first look would take most of its time.
    """
    looks = {}
    for name, work in found.items():
        work()
        wait(device)
        began = time.perf_counter()
        work()
        wait(device)
        looks[name] = time.perf_counter() - began
    least = min(looks.values(), default=0.0)
    slow = {name: 1e3 * s for name, s in looks.items() if s > max(HOPELESS * least, LONG)}
    return {name: work for name, work in found.items() if name not in slow}, slow


def _numbers(
    rounds: Rounds,
    others: list[str],
    kind: str,
    share: float,
    cost: Any,
    bursts: dict[str, int],
    quiet: guard.QuietVerdict,
) -> Row:
    """Return what a row says; ratios only where the machine was quiet."""
    seconds, best = rounds.median(OURS), rounds.fastest(others)
    low, high = rounds.interval(OURS)
    bound = rounds.median(LIMIT) / share
    row: Row = {
        "ms": 1e3 * seconds,
        "ms interval": [1e3 * low, 1e3 * high],
        "bytes": cost.bytes,
        "flops": cost.flops,
        "GB/s": 1e-9 * cost.bytes / seconds,
        "GFLOP/s": 1e-9 * cost.flops / seconds,
        "random words/us": 1e-6 * cost.random_words / seconds,
        "limit": kind,
        "limit ms": 1e3 * bound,
        "torch": best,
        "torch ms": None if best is None else 1e3 * rounds.median(best),
        "formulations ms": {name: 1e3 * rounds.median(name) for name in others},
        "quiet": quiet.quiet,
        "guard": quiet.as_json(),
        "calls per sample": bursts,
        "samples ms": {name: [1e3 * s for s in each] for name, each in rounds.seconds.items()},
    }
    if quiet.quiet:
        row["of limit"] = bound / seconds
        if best is not None:
            ratio = rounds.ratio(best, OURS)
            row |= {"ratio": ratio.value, "ratio interval": [ratio.low, ratio.high]}
            row["verdict"] = rounds.ratio(OURS, best).verdict
    return row


def sampler(
    work: Callable[[], Any],
    burst: int,
    device: torch.device,
    evict: Callable[[], None] | None = None,
) -> Sampler:
    """Return what takes one sample: so many calls, and their mean."""

    def sample() -> float:
        if evict is not None:
            evict()
        wait(device)
        began = time.perf_counter()
        for _ in range(burst):
            work()
        wait(device)
        return (time.perf_counter() - began) / burst

    return sample


def burst_of(work: Callable[[], Any], device: torch.device, least: float = SAMPLE) -> int:
    """Return how many calls last ``least`` seconds; the first calls warm everything up."""
    work()
    wait(device)
    taken, burst = 0.0, 1
    while True:
        began = time.perf_counter()
        for _ in range(burst):
            work()
        wait(device)
        taken = time.perf_counter() - began
        if taken >= least or burst >= 1 << 12:
            return burst
        burst *= 2


def _evictor(device: torch.device) -> Callable[[], None]:
    """Return a function that overwrites the caches."""
    size = LEVELS * last_cache(device)
    held = torch.zeros(size // 4, device=device)

    def evict() -> None:
        held.add_(1)

    return evict


def last_cache(device: torch.device) -> int:
    """Return the bytes of the largest cache of a device; 32 MiB where it does not say."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    return largest_cache()


def largest_cache(folder: str = "/sys/devices/system/cpu/cpu0/cache") -> int:
    """Return the bytes of the processor's largest cache; 32 MiB where the system does not say."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    found = [32 << 20]
    sizes = [path.read_text().strip() for path in Path(folder).glob("index*/size")]
    read = [int(size[:-1]) * units[size[-1]] for size in sizes if size[-1:] in units]
    return max(read or found)


def _sizes(case: Case) -> dict[str, Any]:
    """Return the sizes of a case: those that its arguments have, and the range of their ids."""
    hidden = {name: case.example[name] for name in ("V",) if name in case.example}
    found = {**hidden, **case.sizes}
    return {name: found[name] for name in sorted(found)}
