"""Measure the share of its limits that each op's kernel reaches, for ``dpkern cost predict``.

Processor time of one thread, in turns with the copy or the product that bounds a call
(``dpkern.bench.limits``): other processes change it little, so that it can be taken on a machine
that is not quiet. Shares come from typical cases, which fit a cache; other cases are for checking.

    python -m benchmarks.kernel_shares icelake > shares.txt

prints the table ``[kernels]`` of a processor's file, and rows for ``machines/measured``.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dpkern.base.dispatch import OPS
from dpkern.base.errors import BackendError
from dpkern.base.threads import torch_threads
from dpkern.bench.case import Case, timed_cases
from dpkern.bench.cases import FACTS
from dpkern.bench.limits import limit_of
from dpkern.bench.measure import call, verify
from dpkern.cost.forms import FORMS
from dpkern.reports.prediction_check import inside_seconds

FITTED = "typical"
SAMPLE = 2e-3


def rows(seconds: float = 0.5) -> Iterator[dict[str, Any]]:
    """Yield a row for each typical and large case that the CPU's kernels take."""
    with torch_threads(1), torch.no_grad():
        for name in sorted(OPS):
            for case in timed_cases(OPS[name], FACTS[name], (FITTED, "large")):
                try:
                    verify(case, "cpu")
                except BackendError:
                    continue
                yield _row(case, seconds)


def _row(case: Case, seconds: float) -> dict[str, Any]:
    limit = limit_of(case.op.cost(**case.arguments()), torch.device("cpu"))
    ways = {"op": call(case, "cpu"), "limit": limit.run}
    bursts = {name: _burst(work) for name, work in ways.items()}
    samples: dict[str, list[float]] = {name: [] for name in ways}
    began, order, draw = time.process_time(), list(ways), random.Random(0)
    while time.process_time() - began < seconds or len(samples["op"]) < 7:
        draw.shuffle(order)
        for name in order:
            samples[name].append(_seconds(ways[name], bursts[name]))
    return {
        "kind": "op",
        "op": case.op.name,
        "case": case.name,
        "dtype": str(case.kind).removeprefix("torch.") if case.kind else None,
        "set": "",
        "threads": 1,
        "seconds": float(f"{statistics.median(samples['op']):.4g}"),
        "limit": limit.kind,
        "limit_seconds": float(f"{statistics.median(samples['limit']) / limit.share:.4g}"),
        "fitted": case.name == FITTED,
        "lines": lines_of(case),
    }


def lines_of(case: Case) -> list[dict[str, Any]]:
    """Return the lines of a case's closed form, as a measured row keeps them."""
    bound = case.op.schema.call.bind(**case.shapes())
    bound.apply_defaults()
    return [
        {
            "name": item.name,
            "counts": dict(item.counts),
            "bytes_read": item.bytes_read,
            "bytes_written": item.bytes_written,
            "flops": item.floating,
        }
        for item in FORMS[case.op.name](*bound.args, **bound.kwargs).items
    ]


def _seconds(work: Callable[[], Any], times: int) -> float:
    began = time.process_time()
    for _ in range(times):
        work()
    return (time.process_time() - began) / times


def _burst(work: Callable[[], Any]) -> int:
    work()
    return max(1, round(SAMPLE / max(_seconds(work, 1), 1e-7)))


def shares(found: list[dict[str, Any]], processor: str) -> dict[str, float]:
    """Return the share of each op on a processor: what its limits allow over what it took.

    The typical case of ``noise.source_draws`` reads stored draws and says nothing of tables.
    """
    known = {}
    for row in found:
        if row["fitted"] and row["op"] != "noise.source_draws":
            inside, launch = inside_seconds(processor, row)
            known[row["op"]] = float(f"{inside / max(row['seconds'] - launch, 1e-7):.3g}")
    return known


def lines(found: list[dict[str, Any]], processor: str) -> Iterator[str]:
    """Yield the table ``[kernels]`` of a processor's file, then the rows of its measured file."""
    yield "[kernels]"
    for op, share in shares(found, processor).items():
        yield f'"{op}" = {share}'
    yield ""
    yield ",\n".join(f"  {json.dumps(row)}" for row in found)


if __name__ == "__main__":
    print("\n".join(lines(list(rows()), sys.argv[1])))
