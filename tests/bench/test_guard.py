"""The quiet guard: shares of counters against limits, and a real process that takes a core."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dpkern.base.dispatch import OPS
from dpkern.base.threads import torch_threads
from dpkern.bench import guard, measure, results
from dpkern.bench.case import timed_cases
from dpkern.bench.cases import FACTS
from dpkern.bench.guard import Counters, verdict
from dpkern.bench.paired import QUICK

BEFORE = Counters(wall=100.0, cpu=50.0, waited=1.0, switches=1000, busy=900.0, steal=3.0)
QUIET = Counters(wall=102.0, cpu=54.0, waited=1.01, switches=1015, busy=904.1, steal=3.0)
"""Two seconds later: two threads ran all the time, and next to nothing besides."""


def test_a_quiet_machine_has_no_flags() -> None:
    found = verdict(BEFORE, QUIET, threads=1)
    assert found.quiet
    assert found.cpu_over_wall == pytest.approx(2.0)
    assert found.waited == pytest.approx(0.005)
    assert found.others == pytest.approx(0.04)
    assert found.as_json()["flags"] == []


@pytest.mark.parametrize(
    ("flag", "changes"),
    [
        ("idle", {"cpu": 51.8, "busy": 901.9}),
        ("waited", {"waited": 1.2}),
        ("others", {"busy": 904.5}),
        ("steal", {"steal": 3.1}),
        ("switches", {"switches": 1500}),
    ],
)
def test_each_counter_beyond_its_limit_is_named(flag: str, changes: dict[str, float]) -> None:
    assert verdict(BEFORE, replace(QUIET, **changes), threads=1).flags == (flag,)


def test_threads_that_wait_for_one_another_may_sleep() -> None:
    after = replace(QUIET, cpu=51.6, busy=901.7)
    assert verdict(BEFORE, after, threads=1).flags == ("idle",)
    assert verdict(BEFORE, after, threads=2).quiet
    assert verdict(BEFORE, replace(after, cpu=50.9, busy=901.0), threads=2).flags == ("idle",)


def test_a_process_on_the_second_core_is_seen_where_one_thread_runs() -> None:
    after = replace(QUIET, cpu=52.0, busy=903.95)
    assert verdict(BEFORE, after, threads=1).flags == ("others",)
    assert verdict(BEFORE, replace(after, busy=902.1), threads=1).quiet


def test_counters_that_a_system_does_not_keep_are_unknown(tmp_path: Path) -> None:
    found = guard.counters(tmp_path)
    assert (found.busy, found.steal, found.waited) == (None, None, None)
    (tmp_path / "stat").write_text("cpu 0 0 0 0 0 0 0 0 0 0\n")
    assert guard.counters(tmp_path).busy is None
    (tmp_path / "stat").write_text("cpu 100 100 100 900 5 10 10 50 0 0\ncpu0 1\n")
    second = os.sysconf("SC_CLK_TCK")
    assert guard.counters(tmp_path).busy == pytest.approx(320 / second)
    assert guard.counters(tmp_path).steal == pytest.approx(50 / second)
    after = replace(found, wall=found.wall + 1, cpu=found.cpu + 1)
    assert verdict(found, after, threads=1).quiet


BUSY = "import time\nend = time.time() + 30\nwhile time.time() < end: pass"


@pytest.mark.parametrize("threads", [1, 2])
def test_a_busy_process_marks_rows_and_takes_their_ratios(threads: int) -> None:
    """Real evidence: one process takes a core while a row is measured."""
    if guard.counters().busy is None:
        pytest.skip("this system does not say what its cores do")
    case = timed_cases(OPS["product.matmul"], FACTS["product.matmul"], ("typical",))[0]
    settings = measure.BenchSettings(threads=threads, rule=QUICK)
    other = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        time.sleep(0.3)
        row = measure.measure(case, "cpu", settings)
    finally:
        other.kill()
        other.wait()
    assert "others" in row["guard"]["flags"]
    assert not row["quiet"]
    assert not {"ratio", "verdict", "of limit"} & row.keys()
    assert "disturbed" in results.cells(row)[-1]
    assert max(map(len, results.text_lines([row]))) <= 80
    assert len(row["samples ms"]["dpkern"]) >= 5  # kept all the same


def test_threads_that_run_are_counted() -> None:
    with torch_threads(1):
        x = torch.randn(300, 300)
        before, end = guard.counters(), time.time() + 0.2
        while time.time() < end:
            torch.mm(x, x)
        found = verdict(before, guard.counters(), threads=1)
    assert 0.05 < found.cpu_over_wall < 1.2
