"""Time whole trainings by SPOF at the source's full size: 100 runs, one kernel for all their steps.

Beside it stand the same runs' steps as operations on tensors, some steps of each in turns in one
process. Whole trainings are timed by the clock and in time of the processor, draws, orders of the
records and the test on held-out records included.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from dpkern.accounting import shown_bound
from dpkern.objective import SpofTraining, VisitSchedule
from dpkern.objective.records import Records, generated
from dpkern.privacy.mechanisms import SPOF

USERS, RECORDS, EPOCHS, RUNS = 2, 18_240, 20, 100
"""The source's size: records are those of each user."""

EPSILON = 10.0
STILL = 1e-9
"""A learning rate so small that no run is stopped: a stopped one takes no time."""

STEPS = 300
"""Steps of a turn."""

WHOLE = (
    ("corrected", VisitSchedule().lr),
    ("published", VisitSchedule().lr),
    ("published", STILL),
)
"""Modes and learning rates that are trained to the end."""


def whole(data: Records, mode: str, lr: float, *, epochs: int, runs: int) -> dict[str, Any]:
    """Train the runs to their end; return how long that took, and how many were stopped."""
    schedule = VisitSchedule(lr=lr, epochs=epochs)
    clock, processor = time.perf_counter(), time.process_time()
    training = SpofTraining(data, SPOF(epsilon=EPSILON, mode=mode), schedule, seeds=range(runs))
    outcome = training.run()
    taken = time.process_time() - processor
    return {
        "mode": mode,
        "lr": lr,
        "runs": runs,
        "steps": training.steps,
        "seconds": time.perf_counter() - clock,
        "processor seconds": taken,
        "stopped": int(outcome.diverged.sum()),
        "accuracy": float(outcome.accuracy.mean()),
    }


def turns(data: Records, mode: str, *, runs: int, rounds: int, steps: int) -> dict[str, Any]:
    """Return microseconds of the processor per step, all runs together, fused and apart.

    What a training releases once is released before.
    """
    schedule = VisitSchedule(lr=STILL, epochs=10**6)
    method = SPOF(epsilon=EPSILON, mode=mode)
    each = {
        fused: SpofTraining(data, method, schedule, seeds=range(runs), fused=fused)
        for fused in (True, False)
    }
    taken: dict[bool, list[float]] = {True: [], False: []}
    for number in range(rounds + 1):
        for fused, training in each.items():
            last, before = training.step_number + steps, time.process_time()
            while training.step_number < last:
                training.advance(last - training.step_number)
            if number:  # the first round warms up
                taken[fused].append(1e6 * (time.process_time() - before) / steps)
    ratios = [apart / one for one, apart in zip(taken[True], taken[False], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "mode": mode,
        "runs": runs,
        "one kernel us": statistics.median(taken[True]),
        "tensors us": statistics.median(taken[False]),
        "ratio": middle,
        "quartiles": [low, high],
    }


def measured(
    *, records: int = RECORDS, epochs: int = EPOCHS, runs: int = RUNS, rounds: int = 15
) -> dict[str, Any]:
    """Return ``trainings`` and ``steps``, on one thread."""
    data = generated(users=USERS, records=records)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        steps = [
            turns(data, mode, runs=n, rounds=rounds, steps=min(STEPS, records))
            for mode in ("published", "corrected")
            for n in dict.fromkeys((1, runs))
        ]
        trainings = [whole(data, mode, lr, epochs=epochs, runs=runs) for mode, lr in WHOLE]
    finally:
        torch.set_num_threads(before)
    size = {"users": USERS, "records": records, "epochs": epochs}
    return {"size": size, "trainings": trainings, "steps": steps}


def markdown(machine: dict[str, Any], found: dict[str, Any]) -> str:
    """Return the tables that are printed and committed."""
    size = found["size"]
    lines = [
        f"dpkern {machine['dpkern']}, torch {machine['torch']}, {machine['processor']}, 1 thread. "
        f"{size['records']} generated records of each of {size['users']} users, n = 14, l = 7, "
        f"{size['epochs']} epochs of one record of every user at a time, epsilon "
        f"{shown_bound(EPSILON)}.",
        "",
        "| whole training | learning rate | runs | seconds | of the processor | stopped |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| SPOF {row['mode']} | {row['lr']:g} | {row['runs']} | {row['seconds']:.1f} | "
        f"{row['processor seconds']:.1f} | {row['stopped']} |"
        for row in found["trainings"]
    ]
    lines += [
        "",
        "A step of all runs, where none is stopped: one kernel for many steps, and operations on "
        "tensors step by step; medians of turns in one process, in time of the processor.",
        "",
        "| step | runs | one kernel | operations | ratio | quartiles |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| SPOF {row['mode']} | {row['runs']} | {row['one kernel us']:.3g} us | "
        f"{row['tensors us']:.3g} us | {row['ratio']:.3g} | {row['quartiles'][0]:.3g} to "
        f"{row['quartiles'][1]:.3g} |"
        for row in found["steps"]
    ]
    return "\n".join(lines) + "\n"
