"""Measure how much of the noise's time a ring of prefetched draws hides, in whole steps.

    hidden = (inline - ring) / (inline - without noise)

Variants take turns in one process and end with the same parameters, bit for bit, inline and ring.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dpkern import PrivacyEngine
from dpkern.step.noise_tables import RingPrefetch

BATCH, CLASSES, SEED = 16, 10, 1
WARM_UPS = 3
"""More than the blocks of the ring: those that were filled between turns are not timed."""

STEPS = 4
VARIANTS = ("without noise", "inline", "ring")


def model_of(parameters: int) -> nn.Module:
    """Make two square layers and a head, about this many parameters."""
    width = round((parameters / 2) ** 0.5)
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, CLASSES),
    )


def trainer(variant: str, parameters: int) -> tuple[nn.Module, Callable[[], None]]:
    """Make a private model and its training step."""
    model = model_of(parameters)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    source = RingPrefetch() if variant == "ring" else None
    engine = PrivacyEngine()
    engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=None,
        noise_multiplier=0.0 if variant == "without noise" else 1.0,
        max_grad_norm=1.0,
        sample_rate=0.01,
        expected_batch_size=BATCH,
        unsafe_seed=SEED,
        noise_source=source,
    )
    x = torch.randn(BATCH, model[0].in_features)  # type: ignore[index, operator]
    y = torch.randint(CLASSES, (BATCH,))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return model, step


def turn(step: Callable[[], None]) -> float:
    """Measure mean seconds of a step among others."""
    for _ in range(WARM_UPS):
        step()
    start = time.perf_counter()
    for _ in range(STEPS):
        step()
    return (time.perf_counter() - start) / STEPS


def measured(parameters: int, threads: int, rounds: int) -> dict[str, Any]:
    """Measure medians over rounds of turns; the producer always has one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        trainers = {name: trainer(name, parameters) for name in VARIANTS}
        taken: dict[str, list[float]] = {name: [] for name in VARIANTS}
        for _ in range(rounds):
            for name, (_, step) in trainers.items():
                taken[name].append(turn(step))
    finally:
        torch.set_num_threads(before)
    equal = all(
        torch.equal(a, b)
        for a, b in zip(
            trainers["inline"][0].parameters(), trainers["ring"][0].parameters(), strict=True
        )
    )
    if not equal:
        raise SystemExit("training with a ring differs from training without: no figures")
    seconds = {name: statistics.median(times) for name, times in taken.items()}
    noise = seconds["inline"] - seconds["without noise"]
    return {
        "parameters": sum(p.numel() for p in trainers["ring"][0].parameters()),
        "threads": threads,
        **{f"{name} ms": 1e3 * value for name, value in seconds.items()},
        "noise ms": 1e3 * noise,
        "hidden": (seconds["inline"] - seconds["ring"]) / noise if noise > 0 else None,
        "ring / inline": seconds["ring"] / seconds["inline"],
    }


def markdown(machine: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Return the table that is printed and committed."""
    lines = [
        f"dpkern {machine['dpkern']}, torch {machine['torch']}, {machine['processor']}. Whole "
        f"private steps of a dense network, {BATCH} samples; the producer has one thread besides. "
        "`hidden` = (inline - ring) / (inline - without noise).",
        "",
        "| " + " | ".join(rows[0]) + " |",
        "|" + "---|" * len(rows[0]),
    ]
    lines += [
        "| "
        + " | ".join(f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values())
        + " |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"
