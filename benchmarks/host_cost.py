"""Count and time what privacy adds to a step on the host: CPU time per parameter, Python calls.

Usage: ``python -m benchmarks.host_cost '{"task": ..., "rounds": ..., "threads": ...}'``

Forward, backward and update, non-private and private, some steps each in turns in one process. CPU
time of the thread, so that other processes on the machine count for little.
"""

from __future__ import annotations

import cProfile
import gc
import json
import pstats
import statistics
import sys
import time
from typing import Any
from unittest import mock

import torch

import dpkern

from .step_cases import BASELINES, LR, NOISE, VARIANTS, Runner, quiet
from .step_models import TASKS, Task

WARM_UPS = 6
TURN_SECONDS = 0.05
PRIVATE = ("dpkern", "dpkern compiled", "dpkern recorded")
"""The step as it is, of a compiled model, and with every step taken as the first ones are."""


def begin(task: Task, variant: str) -> tuple[Runner, dpkern.PrivacyEngine | None]:
    """A training loop's phases, and the engine where it is private."""
    made: list[dpkern.PrivacyEngine] = []

    def remembered() -> dpkern.PrivacyEngine:
        made.append(engine())
        return made[-1]

    engine = dpkern.PrivacyEngine
    with mock.patch.object(dpkern, "PrivacyEngine", remembered):
        runner = VARIANTS[variant.removesuffix(" recorded")](task, lr=LR).begin(NOISE)
    if not made:
        return runner, None
    made[0].capture.guard._occasions.gap = 1 << 60  # no secret probe by chance
    made[0].capture.program.enabled = variant != "dpkern recorded"
    return runner, made[0]


def taken(runner: Runner, steps: int) -> float:
    """CPU seconds of a step: forward pass, loss, backward pass and update."""
    total = 0.0
    for _ in range(steps):
        batch = runner.hand_out()
        started = time.thread_time()
        runner.loss(batch).backward()
        runner.update()
        total += time.thread_time() - started
    return total / steps


def python_calls(runner: Runner, steps: int = 10) -> int:
    """Python functions called in one step; what is built in does not count."""
    profile = cProfile.Profile(builtins=False)
    for _ in range(steps):
        batch = runner.hand_out()
        profile.enable()
        runner.loss(batch).backward()
        runner.update()
        profile.disable()
    rows = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    return round(sum(row[1] for row in rows.values()) / steps)


def measure(task: Task, rounds: int) -> dict[str, Any]:
    """One task: milliseconds, ratios to torch's default optimizer, and calls of each variant."""
    runners: dict[str, Runner] = {}
    replayed = True
    for variant in (*BASELINES, *PRIVATE):
        runner, engine = begin(task, variant)
        taken(runner, WARM_UPS)
        if engine is not None and engine.capture.program.enabled:
            before = engine.capture.program.replays
            taken(runner, 2)
            replayed = replayed and engine.capture.program.replays == before + 2
        runners[variant] = runner
    counts = {v: max(1, round(TURN_SECONDS / taken(r, 2))) for v, r in runners.items()}
    found: dict[str, list[float]] = {variant: [] for variant in runners}
    gc.collect()
    for _ in range(rounds):
        for variant, runner in runners.items():
            found[variant].append(taken(runner, counts[variant]))
    parameters = len(list(task.model().parameters()))
    base = found[BASELINES[0]]
    rows = []
    for variant, seconds in found.items():
        added = [a - b for a, b in zip(seconds, base, strict=True)]
        rows.append(
            {
                "variant": variant,
                "ms": 1e3 * statistics.median(seconds),
                "ratio": statistics.median(a / b for a, b in zip(seconds, base, strict=True)),
                "added us per parameter": 1e6 * statistics.median(added) / parameters,
                "python calls": python_calls(runners[variant]),
            }
        )
    return {"task": task.name, "parameters": parameters, "replayed": replayed, "rows": rows}


def main(request: dict[str, Any]) -> dict[str, Any]:
    """Measure what the request asks for."""
    torch.set_num_threads(request["threads"])
    row = measure(TASKS[request["task"]], request["rounds"])
    return {**row, "threads": request["threads"]}


if __name__ == "__main__":
    with quiet():
        print(json.dumps(main(json.loads(sys.argv[1]))))
