"""Time one layer's columns in turns in one process: a worker with an allocator of its own.

Usage: ``python -m benchmarks.spectral_speed '{"case": ..., "threads": ..., "rounds": ...}'``
"""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any

import torch

from .spectral_cases import BY_NAME, LITERAL_SAMPLES, Work, verify
from .step_cases import quiet

SLOW = 0.5
"""Seconds: what takes longer gets a third of the rounds."""


def milliseconds(work: Work, rounds: int) -> dict[str, dict[str, float]]:
    """Measure the least time per column and way, rounds in changing order after one warm-up."""
    ways = [(column, way) for column, found in work.columns().items() for way in found]
    least = {way.__name__: float("inf") for _, way in ways}
    started = {way.__name__: time.perf_counter() for _, way in ways}
    for _, way in ways:
        started[way.__name__] = time.perf_counter()
        way()
        started[way.__name__] = time.perf_counter() - started[way.__name__]
    order = random.Random(0)
    for i in range(rounds):
        order.shuffle(ways)
        for _, way in ways:
            if started[way.__name__] > SLOW and i % 3:
                continue
            before = time.perf_counter()
            way()
            least[way.__name__] = min(least[way.__name__], time.perf_counter() - before)
    least["published"] *= work.case.batch / LITERAL_SAMPLES
    return {
        column: {way.__name__: 1e3 * least[way.__name__] for way in found}
        for column, found in work.columns().items()
    }


def main(request: dict[str, Any]) -> dict[str, Any]:
    """Check the ways, then time them.

    Raises:
        AssertionError: a way is wrong; then nothing is timed.
    """
    case = BY_NAME[request["case"]]
    if request["verify"]:
        verify(case)
    torch.set_num_threads(request["threads"])
    ways = milliseconds(Work(case), request["rounds"])
    kept = case.band.count / (case.size[0] * case.size[1])
    return {"case": case.name, "grid": list(case.size), "kept": kept, "ways ms": ways}


if __name__ == "__main__":
    with quiet():
        print(json.dumps(main(json.loads(sys.argv[1]))))
