"""Time every op and torch's formulations of its work with pytest-benchmark, a group for each case.

    pytest benchmarks --benchmark-only [-k linear_norm]

The cases are those of ``dpkern bench``, which also samples in turns, stops by the interval of the
ratio and marks what a busy machine disturbed. Results are compared with the reference first.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dpkern.bench import suite
from dpkern.bench.case import Case
from dpkern.bench.formulations import FORMULATIONS, formulations_of
from dpkern.bench.guard import counters, verdict
from dpkern.bench.measure import call, checked_formulations, verify

PLAN = suite.BenchPlan()
CASES = [(op, case) for op in suite.ops_of(PLAN) for case in suite.cases_of(op, PLAN)]
OURS = [
    pytest.param(case, backend, id=f"{op.name}-{case.name}-{backend}")
    for op, case in CASES
    for backend in suite.backends_of(op, PLAN)
]
THEIRS = [
    pytest.param(case, one.name, id=f"{op.name}-{case.name}-torch: {one.name}")
    for op, case in CASES
    for one in FORMULATIONS.get(op.name, ())
]
pytestmark = pytest.mark.benchmark(max_time=0.2, warmup=True)


def _timed(benchmark: Any, case: Case, work: Any) -> None:
    benchmark.group = f"{case.op.name} {case.name}"
    before = counters()
    with torch.no_grad():
        benchmark(work)
    benchmark.extra_info["guard"] = verdict(
        before, counters(), threads=torch.get_num_threads()
    ).as_json()


@pytest.mark.parametrize(("case", "backend"), OURS)
def bench_op(benchmark: Any, case: Case, backend: str) -> None:
    verify(case, backend)
    _timed(benchmark, case, call(case, backend))


@pytest.mark.parametrize(("case", "name"), THEIRS)
def bench_torch(benchmark: Any, case: Case, name: str) -> None:
    if name not in [one.name for one in formulations_of(case)]:
        pytest.skip("does not do the work of this case")
    with torch.no_grad():
        found, left = checked_formulations(case, "reference", compiled=False)
    assert name in found, left[name]
    _timed(benchmark, case, found[name])
