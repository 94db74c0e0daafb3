"""Verdicts of the benchmark's own measurements on this machine, not of simulated clocks.

The same call is compared with itself, and with one that repeats a twentieth of its calls: 5 %
slower. Sampling, stop rule, intervals and guard are those of ``dpkern bench``. Comparisons that
the guard marks are counted apart, for a busy machine promises nothing. Then a process that takes a
core runs beside some rows; each of them must be marked and have no ratio.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from dpkern.base.dispatch import OPS
from dpkern.base.threads import torch_threads
from dpkern.bench import guard
from dpkern.bench.case import timed_cases
from dpkern.bench.cases import FACTS
from dpkern.bench.measure import BenchSettings, burst_of, call, measure
from dpkern.bench.paired import QUICK, SAME, SLOWER, StopRule, collect

WORKS = ("ghost.linear_norm", "ghost.explicit_norm", "product.matmul", "coef.perturb")
"""Ops ruled by arithmetic, by memory, by the library's products and by random words."""
BURST = 20
PLANTED = 1.05
RULE = StopRule(seconds=3.0)
BUSY = "while True: pass"
SAMPLE = 2e-3


def run(n: int = 200) -> dict[str, Any]:
    """Compare every way ``n`` times in all: A with A, and A with A that does a twentieth more."""
    load = list(os.getloadavg())
    with torch_threads(1), torch.no_grad():
        calls = [_call(name) for name in WORKS]
        same = [_compared(calls[i % len(calls)], BURST, i) for i in range(n)]
        slower = [_compared(calls[i % len(calls)], round(PLANTED * BURST), i) for i in range(n)]
    busy = _beside_a_busy_process()
    figures = {
        "load": load,
        "A against A": _counted(same, SAME),
        "5 % planted": _counted(slower, SLOWER),
        "beside a busy process": busy,
    }
    right = (
        figures["A against A"]["share"] >= 0.95
        and figures["5 % planted"]["share"] >= 0.9
        and min(figures[name]["quiet"] for name in ("A against A", "5 % planted")) >= n // 2
        and busy["marked"] == busy["rows"]
        and not busy["with ratio"]
    )
    return {"passed": right, "figures": figures}


def _call(name: str) -> Callable[[], Any]:
    (case, *_) = timed_cases(OPS[name], FACTS[name], ("typical",))
    return call(case, "cpu")


def _compared(work: Callable[[], Any], calls: int, seed: int) -> dict[str, Any]:
    """Compare so many calls with ``BURST`` of them, both as if they were ``BURST``."""
    times = max(1, round(SAMPLE / (BURST * _seconds(work))))

    def sampler(count: int) -> Callable[[], float]:
        def sample() -> float:
            began = time.perf_counter()
            for _ in range(count * times):
                work()
            return (time.perf_counter() - began) / (BURST * times)

        return sample

    before = guard.counters()
    ways = {"a": sampler(calls), "b": sampler(BURST)}
    found = collect(ways, RULE, lambda _: ("a", "b"), time.perf_counter, seed)
    quiet = guard.verdict(before, guard.counters(), threads=1)
    ratio = found.ratio("a", "b")
    return {"verdict": ratio.verdict, "ratio": ratio.value, "flags": quiet.flags}


def _seconds(work: Callable[[], Any]) -> float:
    burst = burst_of(work, torch.device("cpu"), SAMPLE)
    began = time.perf_counter()
    for _ in range(burst):
        work()
    return (time.perf_counter() - began) / burst


def _counted(found: list[dict[str, Any]], wanted: str) -> dict[str, Any]:
    calm = [one for one in found if not one["flags"]]
    right = sum(one["verdict"] == wanted for one in calm)
    return {
        "comparisons": len(found),
        "quiet": len(calm),
        "verdicts of quiet ones": dict(Counter(one["verdict"] for one in calm)),
        "verdicts of disturbed ones": dict(Counter(o["verdict"] for o in found if o["flags"])),
        "share": right / len(calm) if calm else 0.0,
        "ratios": [round(one["ratio"], 4) for one in found],
    }


def _beside_a_busy_process() -> dict[str, Any]:
    other = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        time.sleep(0.3)
        rows = [
            measure(
                timed_cases(OPS[name], FACTS[name], ("typical",))[0],
                "cpu",
                BenchSettings(threads=threads, rule=QUICK),
            )
            for name in WORKS
            for threads in (1, 2)
        ]
    finally:
        other.kill()
        other.wait()
    return {
        "rows": len(rows),
        "marked": sum(not row["quiet"] for row in rows),
        "with ratio": sum("ratio" in row for row in rows),
        "flags": [row["guard"]["flags"] for row in rows],
    }


def headline(figures: dict[str, Any]) -> str:
    """Return the table's cell."""
    same, slow, busy = (
        figures[name] for name in ("A against A", "5 % planted", "beside a busy process")
    )
    return (
        f"same {same['share']:.0%} of {same['quiet']} quiet, 5 % found in {slow['share']:.0%} of "
        f"{slow['quiet']} quiet, {busy['marked']} of {busy['rows']} rows marked when busy"
    )
