"""Measure the limits of the machine, once per number of threads."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import pytest
import torch

from dpkern.ops import testing

_FLOATS = 1 << 26  # 256 MiB: far beyond the caches


def median_seconds(work: Callable[[], object], rounds: int = 9) -> float:
    """Return the median duration of ``work`` after one warm-up call."""
    work()
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


@pytest.fixture(scope="session")
def limits() -> dict[int, dict[str, float]]:
    """Return GB/s of a plain copy (both directions counted) and of a plain read, by threads."""
    source = torch.zeros(_FLOATS)
    target = torch.empty(_FLOATS)
    measured = {}
    for threads in (1, 2):
        with testing.threads(threads):
            size = 4e-9 * _FLOATS
            measured[threads] = {
                "copy": 2 * size / median_seconds(lambda: target.copy_(source)),
                "read": size / median_seconds(source.sum),
            }
    return measured
