"""Time whole steps, variants in turns in one process: a worker with an allocator of its own.

Usage: ``python -m benchmarks.step_speed '{"task": ..., "variants": ..., "threads": ...}'``
"""

from __future__ import annotations

import json
import random
import statistics
import sys
from contextlib import ExitStack
from typing import Any

import torch

from dpkern.bench import guard

from .step_cases import (
    COMPILED,
    DEFAULT,
    EAGER,
    NOISE,
    PHASES,
    VARIANTS,
    Runner,
    finish_timer,
    quiet,
    verify,
)
from .step_models import TASKS

LR = 1e-3
WARM_UPS = 3
TURN_SECONDS = 0.1


def turn(runner: Runner, steps: int) -> tuple[float, ...]:
    """Measure mean seconds of each phase over consecutive steps, as in a training loop.

    Where there are several, one more goes first: another variant's turn has left it cold caches.
    """
    if steps > 1:
        runner.step()
    taken = [runner.step() for _ in range(steps)]
    return tuple(sum(column) / steps for column in zip(*taken, strict=True))


def warmed(runners: dict[str, Runner]) -> dict[str, int]:
    """Take the first steps, in which models are compiled, and return how many a turn has."""
    steps = {}
    for name, runner in runners.items():
        turn(runner, WARM_UPS)
        steps[name] = max(1, round(TURN_SECONDS / sum(turn(runner, 1))))
    return steps


def rounds_of(
    runners: dict[str, Runner], steps: dict[str, int], rounds: int, threads: int
) -> tuple[dict[str, list[tuple[float, ...]]], dict[str, Any]]:
    """Measure phases per round and variant, and tell whether the machine was quiet.

    Each round takes the variants in another order. A round that a busy machine disturbed is left
    out and another one taken, at most as many again; if they do not suffice all rounds count, and
    the flags of the disturbed ones stand in the verdict.
    """
    order = random.Random(0)
    names = list(runners)
    quiet_rounds, disturbed_rounds = [], []
    flags: set[str] = set()
    while len(quiet_rounds) < rounds and len(disturbed_rounds) <= rounds:
        order.shuffle(names)
        before = guard.counters()
        taken = {name: turn(runners[name], steps[name]) for name in names}
        found = guard.verdict(before, guard.counters(), threads=threads)
        (quiet_rounds if found.quiet else disturbed_rounds).append(taken)
        flags.update(found.flags)
    enough = len(quiet_rounds) == rounds
    used = quiet_rounds if enough else quiet_rounds + disturbed_rounds
    verdict = {"flags": [] if enough else sorted(flags), "left out": len(disturbed_rounds)}
    return {name: [taken[name] for taken in used] for name in runners}, verdict


def summary(taken: dict[str, list[tuple[float, ...]]]) -> list[dict[str, Any]]:
    """Return medians: milliseconds, and the ratio to the non-private variant of the same round.

    A compiled model stands over torch's compiled one, any other over the better of torch's eager
    steps: a compiler's gain is neither dpkern's nor its loss. "over default": the ratio to the step
    of torch's default optimizer.
    """
    totals = {name: [sum(phases) for phases in turns] for name, turns in taken.items()}
    eager = min(EAGER, key=lambda name: statistics.median(totals[name]))
    rows = []
    for name, seconds in totals.items():
        baseline = COMPILED if name == "dpkern compiled" else eager
        ratios = _over(seconds, totals[baseline])
        low, middle, high = statistics.quantiles(ratios, n=4)
        columns = zip(*taken[name], strict=True)
        rows.append(
            {
                "variant": name,
                "baseline": baseline,
                "ms": 1e3 * statistics.median(seconds),
                "ratio": middle,
                "ratio quartiles": [low, high],
                "over default": statistics.median(_over(seconds, totals[DEFAULT])),
                "phases ms": {
                    phase: 1e3 * statistics.median(column)
                    for phase, column in zip(PHASES, columns, strict=True)
                },
            }
        )
    return rows


def _over(seconds: list[float], others: list[float]) -> list[float]:
    return [a / b for a, b in zip(seconds, others, strict=True)]


def measure(task: str, variants: list[str], threads: int, rounds: int) -> list[dict[str, Any]]:
    """Measure one task at one number of threads."""
    torch.set_num_threads(threads)
    with ExitStack() as stack:
        runners = {}
        for name in variants:
            runners[name] = VARIANTS[name](TASKS[task], lr=LR).begin(NOISE)
            if name.startswith("dpkern"):
                stack.enter_context(finish_timer(runners[name]))
        steps = warmed(runners)
        taken, found = rounds_of(runners, steps, rounds, threads)
    return [{"task": task, "threads": threads, "guard": found, **row} for row in summary(taken)]


def main(request: dict[str, Any]) -> list[dict[str, Any]]:
    """Check every variant if asked to, then measure.

    Raises:
        AssertionError: a variant's step is wrong; then nothing is measured.
    """
    if request["verify"]:
        for name in request["variants"]:
            verify(TASKS[request["task"]], name)
    rows: list[dict[str, Any]] = []
    for threads in request["threads"]:
        rows += measure(request["task"], request["variants"], threads, request["rounds"])
    return rows


if __name__ == "__main__":
    with quiet():
        print(json.dumps(main(json.loads(sys.argv[1]))))
