"""Time steps of whole loops, the loader's part included, of models whose steps are short.

The step benchmark hands every variant the same batch and times what follows. Here loops draw
batches of their own from a ``TensorDataset``: the ordinary one by a ``DataLoader``, which takes
rows one by one, the private ones by the loader of ``make_private``, which draws records with the
secure generator and reads them at once.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpkern
from dpkern.base.threads import torch_threads

from .step_cases import CLIP, LR, MOMENTUM, NOISE, quiet
from .step_models import TASKS, Task

MODELS = ("tiny", "mlp", "lenet")
RECORDS = (60_000, 1_000_000)
"""Records of the data set; models with large ones only have the first."""
LARGEST = 1 << 26
"""Values of a data set, at most."""
TURN = 10
"""Steps of one loop that are timed together."""

Turn = Callable[[], tuple[float, float]]


def _loop(task: Task, data: TensorDataset, sampling: str | None) -> Turn:
    """Return what takes ``TURN`` steps and tells milliseconds of each: wall clock, its batch."""
    model, criterion = task.model(), nn.CrossEntropyLoss()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, fused=True)
    loader: Any = DataLoader(data, batch_size=task.batch, shuffle=True, drop_last=True)
    if sampling is not None:
        model, optimizer, loader = dpkern.PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            noise_multiplier=NOISE,
            max_grad_norm=CLIP,
            sampling=sampling,
        )

    def forever() -> Iterator[Any]:
        while True:
            yield from loader

    batches = forever()

    def turn() -> tuple[float, float]:
        handing = 0.0
        began = time.perf_counter()
        for _ in range(TURN):
            asked = time.perf_counter()
            x, y = next(batches)
            handing += time.perf_counter() - asked
            task.loss(criterion, model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return 1e3 * (time.perf_counter() - began) / TURN, 1e3 * handing / TURN

    return turn


LOOPS: dict[str, Callable[[Task, TensorDataset], Turn]] = {
    "ordinary": partial(_loop, sampling=None),
    "Poisson": partial(_loop, sampling="poisson"),
    "fixed size": partial(_loop, sampling="fixed"),
}


def measured(name: str, records: int, threads: int, rounds: int) -> dict[str, Any]:
    """Return medians over rounds in turns: milliseconds of a step and of its batch."""
    task = TASKS[name]
    data = TensorDataset(*task.draw(records, torch.Generator().manual_seed(1)))
    found: dict[str, list[tuple[float, float]]] = {loop: [] for loop in LOOPS}
    with torch_threads(threads), quiet():
        turns = {loop: make(task, data) for loop, make in LOOPS.items()}
        order, names = random.Random(0), list(turns)
        for i in range(rounds + 2):
            order.shuffle(names)
            for loop in names:
                times = turns[loop]()
                if i > 1:
                    found[loop].append(times)
    ordinary = [step for step, _ in found["ordinary"]]
    return {
        "model": task.title,
        "records": records,
        "threads": threads,
        "loops": {
            loop: {
                "step": statistics.median(step for step, _ in times),
                "batch": statistics.median(batch for _, batch in times),
                "ratio": statistics.median(
                    step / plain for (step, _), plain in zip(times, ordinary, strict=True)
                ),
            }
            for loop, times in found.items()
        },
    }


def rows(names: list[str], threads: int, rounds: int) -> list[dict[str, Any]]:
    """Measure every model with every number of records that is not too large for it."""
    found = []
    for name in names:
        values = TASKS[name].data()[0][0].numel()
        found += [
            measured(name, records, threads, rounds)
            for records in RECORDS
            if records * values <= LARGEST
        ]
    return found


def markdown(machine: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Return the table."""
    lines = [
        f"{machine['processor']}, torch {machine['torch']}, {rows[0]['threads']} thread(s).",
        "",
        "Milliseconds of a step of the whole loop, and those in which its batch is made; medians "
        f"of turns of {TURN} steps in one process. The ratio is the median of two turns' ratios.",
        "",
        "| model | records | ordinary: step, batch | Poisson: step, batch, ratio "
        "| fixed size: step, batch, ratio |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [
            f"{one['step']:.3g}, {one['batch']:.2g}"
            + (f", **{one['ratio']:.2f}**" if loop != "ordinary" else "")
            for loop, one in row["loops"].items()
        ]
        lines.append(f"| {row['model']} | {row['records']:,} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
