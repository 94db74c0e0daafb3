"""Time mechanisms of the frequency domain over DP-SGD of this package: whole steps, and layers.

Usage: ``python -m benchmarks.spectral_ratio '{"threads": 1, "rounds": 15, "parts": ["steps"]}'``

All variants run in turns in one process, in changing order, each with torch's transforms (as on
grids that the fused kernel does not take) and with the fused kernel. A ratio is the median over
rounds of two times of one round, so that what else runs on the machine falls on both.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn

from dpkern.nn import BlockCirculantLinear
from dpkern.ops.backends import _circulant, _spectral

from .spectral_cases import CASES, Work
from .spectral_step import LR, NOISE, VARIANTS, WHOLE
from .step_cases import quiet
from .step_models import TASKS, Task
from .step_report import worker

STEPS = ("GReDP spectrum", "Spectral-DP spectrum", "Spectral-DP whitened")
COLUMNS = ("G", "S", "W")
MEDIAN, WORST, STEP, MEMORY = 1.3, 2.5, 1.15, 1.1
"""Targets: the layers' median and worst, each whole step, and what it adds at its peak."""
PROCESSES = 5
"""Processes of a variant whose memory is measured: one alone differs by a tenth from the next."""

Times = dict[tuple[str, bool], list[float]]


@contextmanager
def kernel(fused: bool) -> Iterator[None]:
    """Run with the fused kernels, or with torch's transforms."""
    if fused:
        yield
        return
    with (
        mock.patch.object(_spectral, "reaches", return_value=False),
        mock.patch.object(_spectral, "is_even", return_value=False),
        mock.patch.object(_circulant, "LARGEST", 0),
    ):
        yield


def in_turns(ways: dict[str, Callable[[], Any]], rounds: int) -> Times:
    """Measure seconds of every way with either kernel; the first way knows only one."""
    pairs = [(name, fused) for name in ways for fused in (False, True)]
    times: Times = {pair: [] for pair in pairs}
    order = random.Random(0)
    for i in range(rounds + 2):
        order.shuffle(pairs)
        for name, fused in pairs:
            with kernel(fused):
                before = time.process_time()
                ways[name]()
                if i > 1:
                    times[name, fused].append(time.process_time() - before)
    return times


def ratios(times: Times, base: str) -> dict[str, dict[str, float]]:
    """Return medians over rounds of each way's time over the base's of that round."""
    found: dict[str, dict[str, float]] = {}
    plain = [sum(pair) / 2 for pair in zip(times[base, False], times[base, True], strict=True)]
    for (name, fused), taken in times.items():
        if name != base:
            each = [t / p for t, p in zip(taken, plain, strict=True)]
            found.setdefault(name, {})["fused" if fused else "transforms"] = statistics.median(each)
    return found


def steps(rounds: int) -> Iterator[dict[str, Any]]:
    """Yield the ratios of whole steps."""
    for task in WHOLE.values():
        runners = {v: VARIANTS[v](task, lr=LR).begin(NOISE) for v in ("DP-SGD", *STEPS)}
        times = in_turns({v: runner.step for v, runner in runners.items()}, rounds)
        yield {"task": task.title, "ratios": ratios(times, "DP-SGD")}


BLOCKS = (2, 4, 8, 16, 64, 128)
"""Sizes of the blocks of circulant layers."""


def circulants(rounds: int) -> Iterator[dict[str, Any]]:
    """Yield the ratio of steps whose linear layers but the last are circulant to dense ones'."""
    dense = TASKS["mlp"]
    runners = {"dense": VARIANTS["DP-SGD"](dense, lr=LR).begin(NOISE)}
    for block in BLOCKS:
        task = replace(dense, build=partial(_circulant_model, dense, block))
        runners[f"blocks of {block}"] = VARIANTS["DP-SGD"](task, lr=LR).begin(NOISE)
    times = in_turns({name: runner.step for name, runner in runners.items()}, rounds)
    yield {"task": dense.title, "ratios": ratios(times, "dense")}


def _circulant_model(dense: Task, block: int) -> nn.Module:
    model = dense.build()
    layers = [part for part in model.modules() if isinstance(part, nn.Linear)]
    for name, part in model.named_children():
        if isinstance(part, nn.Linear) and part is not layers[-1]:
            sizes = part.in_features, part.out_features
            setattr(model, name, BlockCirculantLinear(*sizes, block=block))
    return model


def layers(rounds: int) -> Iterator[dict[str, Any]]:
    """Yield the ratios of single convolutions, the better way of each column."""
    for case in CASES:
        if case.linear or (case.batch > 64 and case.ins >= 32):
            continue
        work = Work(replace(case, batch=min(case.batch, 128)))
        found = work.columns()
        ways = {way.__name__: way for column in ("ours", *COLUMNS) for way in found[column]}
        times = in_turns(ways, rounds)
        best: Times = {}
        for column in ("ours", *COLUMNS):
            for fused in (False, True):
                each = [times[way.__name__, fused] for way in found[column]]
                best[column, fused] = [min(taken) for taken in zip(*each, strict=True)]
        yield {"layer": work.case.name, "ratios": ratios(best, "ours")}


PARTS = {"steps": steps, "circulants": circulants, "layers": layers}
"""What is compared."""


def measured(threads: list[int], rounds: int, parts: list[str]) -> list[dict[str, Any]]:
    """Return the parts on the first number of threads, and steps alone on others."""
    requests = [{"threads": threads[0], "parts": parts}]
    requests += [{"threads": n, "parts": ["steps"]} for n in threads[1:] if "steps" in parts]
    return [worker("spectral_ratio", r | {"rounds": rounds}, "retained") for r in requests]


def memory() -> Iterator[dict[str, Any]]:
    """Yield the bytes that two steps of each variant add at their peak, medians of processes."""
    for name, task in WHOLE.items():
        request = {"task": name, "whole": True, "threads": 1, "rounds": 1}
        growth = {
            variant: statistics.median(
                worker("spectral_step", request | {"variant": variant})["growth"]
                for _ in range(PROCESSES)
            )
            for variant in ("DP-SGD", *STEPS)
        }
        yield {"task": task.title, "growth": growth}


def memory_table(rows: list[dict[str, Any]]) -> str:
    """Return megabytes of DP-SGD, and the others over them."""
    heads = ["two steps add at their peak", "DP-SGD, MB", *(f"{v} over it" for v in STEPS)]
    lines = [
        f"Medians of {PROCESSES} processes each; target {MEMORY}.",
        "",
        f"| {' | '.join(heads)} |",
        "|---" * len(heads) + "|",
    ]
    for row in rows:
        growth = row["growth"]
        base = growth["DP-SGD"]
        cells = [f"{base / 1e6:.0f}", *(f"{growth[v] / base:.2f}" for v in STEPS)]
        lines.append(f"| {row['task']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def markdown(result: dict[str, Any], processor: str) -> str:
    """Return the tables of the parts that were measured."""
    lines = [
        f"{processor}, torch {torch.__version__}, {result['threads']} thread(s), load "
        f"average {result['load'][0]:.1f} before and {result['load'][1]:.1f} after on "
        f"{os.cpu_count()} cores. Time over DP-SGD of this package, median of "
        f"{result['rounds']} rounds in turns in one process; float tier, keep a quarter. "
        "Before: torch's transforms; after: the fused kernel.",
    ]
    if "steps" in result:
        heads = [f"step (target {STEP})", *(f"{v}: before, after" for v in STEPS)]
        lines += ["", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
        lines += [_row(row["task"], [row["ratios"][v] for v in STEPS]) for row in result["steps"]]
    if "circulants" in result:
        lines += ["", "| step over the dense one's (target below 1) | before, after |", "|---|---|"]
        for row in result["circulants"]:
            for name, found in row["ratios"].items():
                lines.append(_row(f"{row['task']}, circulant, {name}", [found]))
    if "layers" in result:
        heads = ["layer", *(f"{c}: before, after" for c in COLUMNS)]
        lines += ["", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
        rows = [[row["ratios"][c] for c in COLUMNS] for row in result["layers"]]
        lines += [
            _row(row["layer"], cells) for row, cells in zip(result["layers"], rows, strict=True)
        ]
        median = f"median (target {MEDIAN})"
        for name, of in ((median, statistics.median), (f"worst ({WORST})", max)):
            columns = zip(*rows, strict=True)
            lines.append(
                _row(
                    name,
                    [{k: of(cell[k] for cell in cells) for k in cells[0]} for cells in columns],
                )
            )
    return "\n".join(lines) + "\n"


def _row(name: str, cells: list[dict[str, float]]) -> str:
    text = (f"{c['transforms']:.2f}, {c['fused']:.2f}" for c in cells)
    return f"| {name} | {' | '.join(text)} |"


def main(request: dict[str, Any]) -> dict[str, Any]:
    """Measure steps and layers."""
    torch.set_num_threads(request["threads"])
    before = os.getloadavg()[0]
    result = {
        **request,
        **{name: list(PARTS[name](request["rounds"])) for name in request["parts"]},
    }
    return {**result, "load": [before, os.getloadavg()[0]]}


if __name__ == "__main__":
    with quiet():
        print(json.dumps(main(json.loads(sys.argv[1]))))
