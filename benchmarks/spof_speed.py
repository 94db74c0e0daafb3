"""Time an epoch of SPOF beside DP-SGD, of the same autoencoder, in turns in one process.

The source claims that SPOF takes 57.2 % less time than DP-SGD, against one baseline. Here each of
several forms of SPOF stands beside several baselines: reduction = (t_SGD - t_SPOF) / t_SGD.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

import torch

from .spof_cases import BATCH, BY_NAME, CASES, CODE, FEATURES, USERS, Variant, setting, verify

PUBLISHED = 57.2
"""Percent."""

EPOCH = 36_480
"""Records of the source's epoch."""

RECORDS = 1024
WARM_UPS = 3
TURN_SECONDS = 0.02

_SGD = "DP-SGD, "
_BATCHES = (f"{_SGD}torch, book-keeping, B = {BATCH}", f"{_SGD}engine, B = {BATCH}")
PAIRS: tuple[tuple[str, str], ...] = (
    *(
        ("SPOF, torch, record by record", _SGD + name)
        for name in ("torch, per-sample loop", "torch, book-keeping", "engine")
    ),
    *(
        (f"SPOF {mode}, 1 run", name)
        for mode in ("published", "corrected")
        for name in (
            f"{_SGD}torch, per-sample loop",
            f"{_SGD}torch, book-keeping",
            f"{_SGD}engine",
            f"DP-SGD {mode}, 1 run",
            *_BATCHES,
        )
    ),
    *(
        (f"SPOF {mode}, 100 runs together", f"DP-SGD {mode}, 100 runs together")
        for mode in ("published", "corrected")
    ),
)
"""Pairs of a SPOF variant and the DP-SGD variant beside it."""


def turn(variant: Variant, steps: int) -> float:
    """Measure microseconds of the processor per record visited, over consecutive steps.

    On one thread that is the time on a machine that does nothing else.
    """
    before = time.process_time()
    for _ in range(steps):
        variant.step()
    return 1e6 * (time.process_time() - before) / (steps * variant.visits)


def rounds_of(rounds: int) -> dict[str, list[float]]:
    """Measure microseconds per record, by variant and round; each round has another order.

    Raises:
        AssertionError: a variant's step is not the one that it should be.
    """
    for case in CASES:
        verify(case)
    given = setting(RECORDS)
    variants = {case.name: case.make(given) for case in CASES}
    steps = {}
    for name, variant in variants.items():
        turn(variant, WARM_UPS)
        one = turn(variant, WARM_UPS) * variant.visits / 1e6
        steps[name] = max(1, round(TURN_SECONDS / one))
    order, names = random.Random(0), list(variants)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        order.shuffle(names)
        for name in names:
            taken[name].append(turn(variants[name], steps[name]))
    return taken


def measured(rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Return ``times``, medians by variant, and ``reductions``, rounds' medians and quartiles."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # a step is too small to be shared out
    try:
        taken = rounds_of(rounds)
    finally:
        torch.set_num_threads(before)
    times = []
    for name, values in taken.items():
        each = statistics.median(values)
        times.append(
            {
                "variant": name,
                "B": BY_NAME[name].batch,
                "us per record": each,
                "s per epoch": each * EPOCH / 1e6,
            }
        )
    reductions = []
    for ours, theirs in PAIRS:
        ratios = [b / a for a, b in zip(taken[ours], taken[theirs], strict=True)]
        low, middle, high = statistics.quantiles([100 * (1 - 1 / ratio) for ratio in ratios], n=4)
        reductions.append(
            {
                "SPOF": ours,
                "DP-SGD": theirs.removeprefix(_SGD),
                "ratio": statistics.median(ratios),
                "reduction %": middle,
                "quartiles": [low, high],
            }
        )
    return {"times": times, "reductions": reductions}


def markdown(machine: dict[str, Any], found: dict[str, list[dict[str, Any]]]) -> str:
    """Return the tables that are printed and committed."""
    lines = [
        f"dpkern {machine['dpkern']}, torch {machine['torch']}, {machine['processor']}, 1 thread. "
        f"An autoencoder of {USERS} users, n = {FEATURES}, l = {CODE}; every step was compared "
        "with autograd first, without noise and clipping. Medians of turns in one process, in time "
        f"of the processor. An epoch has the source's {EPOCH} records, visited one at a time "
        "unless B says otherwise; of runs together, each one's share.",
        "",
        "| variant | B | us per record | s per epoch |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {row['variant']} | {row['B']} | {row['us per record']:.3g} | {row['s per epoch']:.3g} |"
        for row in found["times"]
    ]
    lines += [
        "",
        f"Reduction = (t_SGD - t_SPOF) / t_SGD, {PUBLISHED} % in the source; where it is negative, "
        "SPOF takes longer.",
        "",
        "| SPOF | DP-SGD | t_SGD / t_SPOF | reduction | quartiles |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['SPOF']} | {row['DP-SGD']} | {row['ratio']:.3g} | {row['reduction %']:.1f} % | "
        f"{row['quartiles'][0]:.1f} to {row['quartiles'][1]:.1f} % |"
        for row in found["reductions"]
    ]
    return "\n".join(lines) + "\n"
