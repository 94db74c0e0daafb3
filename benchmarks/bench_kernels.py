"""Time noise, clip and update: ours, then torch's best, in turns; no number on a wrong result."""

from __future__ import annotations

import statistics
import time
from functools import cache
from typing import Any

import pytest

from dpkern.ops import testing

from .cases import LARGE_CASES, Case, ClipCase

ROUNDS = 25
ISAS = [name for name in testing.available_isas() if name in ("avx2", testing.available_isas()[-1])]


@cache
def verify(case: Case, isa: str) -> None:
    """Verify once per case and instruction set."""
    case.verify("cpu")


def isas_of(case: Case) -> list[str]:
    """Return the best instruction set, and AVX2 for noise and updates, which arithmetic bounds."""
    return ISAS[-1:] if isinstance(case, ClipCase) else ISAS


ROWS = [
    pytest.param(case, isa, threads, id=f"{case.name}-{isa}-{threads}t")
    for case in LARGE_CASES
    for isa in isas_of(case)
    for threads in (1, 2)
]


@pytest.mark.parametrize(("case", "isa", "threads"), ROWS)
def bench_case(
    benchmark: Any, limits: dict[int, dict[str, float]], case: Any, isa: str, threads: int
) -> None:
    benchmark.group = type(case).__name__
    with testing.isa(isa), testing.threads(threads):
        verify(case, isa)
        work = case.work("cpu")
        torch_times: list[float] = []

        def take_turns() -> None:
            if work.torch is not None:
                started = time.perf_counter()
                work.torch()
                torch_times.append(time.perf_counter() - started)

        benchmark.pedantic(work.ours, setup=take_turns, rounds=ROUNDS, warmup_rounds=2)
        seconds = benchmark.stats.stats.median
    info = benchmark.extra_info
    info |= {"case": case.name, "isa": isa, "threads": threads, "ms": 1e3 * seconds}
    info["GB/s"] = 1e-9 * work.cost.bytes / seconds
    kind = "read" if isinstance(case, ClipCase) else "copy"
    info["limit GB/s"] = limits[threads][kind]
    info["random words/us"] = 1e-6 * work.cost.random_words / seconds
    if torch_times:
        info["torch ms"] = 1e3 * statistics.median(torch_times[2:])
        info["ratio"] = info["torch ms"] / info["ms"]
