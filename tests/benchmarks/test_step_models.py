"""The step benchmark: every model trains one private step, the tiny relatives included."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.step_cases import NOISE, VARIANTS, finish_timer, private
from benchmarks.step_models import TASKS
from benchmarks.step_report import memory_table, speed_table
from benchmarks.step_speed import rounds_of, summary, turn
from dpkern.bench import guard
from dpkern.engine.parameter import source_of

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", [name for name, task in TASKS.items() if task.small is not None])
def test_the_tiny_relative_of_every_model_trains(name: str) -> None:
    small = TASKS[name].small
    assert small is not None
    runner = private(small, lr=1e-3).begin(NOISE)
    before = [p.detach().clone() for p in runner.model.parameters()]
    runner.step()
    after = runner.model.parameters()
    assert any(not torch.equal(p, b) for p, b in zip(after, before, strict=True))


def test_sums_are_told_from_noise_and_update_in_replayed_steps_too() -> None:
    runner = private(TASKS["tiny"], lr=1e-3).begin(NOISE)
    with finish_timer(runner):
        steps = [runner.step() for _ in range(6)]
    for forward, backward, sums, update in steps:
        assert min(forward, backward, sums, update) > 0
    first = next(iter(runner.model.parameters()))
    assert source_of(first).capture.program.replays > 2


def test_tables_have_a_dash_where_a_variant_does_not_take_a_model() -> None:
    tied = TASKS["decoder"]
    assert tied.refused_by
    assert set(tied.refused_by) <= set(VARIANTS)
    rows = [
        {
            "task": task,
            "threads": 1,
            "heap": "default",
            "variant": variant,
            "baseline": "torch default",
            "ms": 2.0,
            "ratio": 1.5,
            "growth": 10**6,
        }
        for task in ("tiny", "decoder")
        for variant in ("torch default", "dpkern", *tied.refused_by)
        if variant not in TASKS[task].refused_by
    ]
    for table in (speed_table(rows), memory_table(rows)):
        cells = {line.split(" | ")[0][2:]: line.count(" - ") for line in table if "|" in line}
        assert cells[tied.title] == cells[TASKS["tiny"].title] + 1


def test_compiled_steps_stand_over_torchs_compiled_one_and_the_table_names_it() -> None:
    ms = {
        "torch default": 3.0,
        "torch fused": 2.0,
        "torch compiled": 1.0,
        "dpkern": 3.0,
        "dpkern compiled": 4.0,
    }
    rows = summary({name: [(1e-3 * t, 0.0, 0.0, 0.0)] * 3 for name, t in ms.items()})
    found = {row["variant"]: (row["baseline"], round(row["ratio"], 6)) for row in rows}
    assert found["dpkern"] == ("torch fused", 1.5)
    assert found["dpkern compiled"] == ("torch compiled", 4.0)
    assert {row["over default"] for row in rows if row["variant"] == "dpkern"} == {1.0}
    placed = [{**row, "task": "tiny", "threads": 1, "heap": "default"} for row in rows]
    head, _, line = speed_table(placed)[:3]
    assert "dpkern over default | FastDP" in head
    assert line.endswith("| 1.00 | - |")
    assert "2.00 fused" in line
    assert "4.00 (1.00 compiled)" in line


@pytest.mark.parametrize(("steps", "mean"), [(1, 9.0), (3, 2.0)])
def test_a_turn_of_several_steps_leaves_out_one_with_cold_caches(steps: int, mean: float) -> None:
    seconds = iter([9.0, 1.0, 2.0, 3.0])
    runner: Any = SimpleNamespace(step=lambda: (next(seconds), 0.0, 0.0, 0.0))
    assert turn(runner, steps) == (mean, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(("quiet", "left_out"), [([False, True, False, True, True], 2), ([], 4)])
def test_disturbed_rounds_are_taken_again_as_often_as_there_are_rounds(
    monkeypatch: pytest.MonkeyPatch, quiet: list[bool], left_out: int
) -> None:
    coming = iter(quiet)
    usual = guard.verdict

    def verdict(*args: Any, **options: Any) -> Any:
        flags = () if next(coming, False) else ("steal",)
        return replace(usual(*args, **options), flags=flags)

    monkeypatch.setattr(guard, "verdict", verdict)
    runner = private(TASKS["tiny"], lr=1e-3).begin(NOISE)
    taken, found = rounds_of({"dpkern": runner}, {"dpkern": 1}, rounds=3, threads=1)
    assert found == {"flags": [] if quiet else ["steal"], "left out": left_out}
    assert len(taken["dpkern"]) == (3 if quiet else left_out)
