"""A run that broke off, or met a busy machine, goes on: what was measured well is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dpkern.base import dispatch
from dpkern.base.errors import InvalidInput
from dpkern.bench import results, suite, worker
from dpkern.bench.measure import OURS, identity
from dpkern.bench.suite import BenchPlan
from dpkern.cli import main

PLAN = BenchPlan(ops=("ghost.clip_factors",), backends=("reference",), sizes=("tiny", "typical"))
PLACE: dict[str, Any] = {
    **dict.fromkeys(results.SAME),
    "date": "2026-01-01T00:00:00+00:00",
    "load": [0.0, 0.0, 0.0],
}
ORDER = [results.digest_of(identity(*found)) for found in suite.selected(PLAN)]


def _row(index: int, **other: Any) -> dict[str, Any]:
    case = list(suite.selected(PLAN))[index]
    return {**identity(*case), "ms": 1.0, "quiet": True, **other}


def _content(*rows: dict[str, Any]) -> dict[str, Any]:
    return results.result(PLACE, PLAN.as_json(), True, rows)


def test_rows_of_both_runs_stand_in_the_order_of_the_plan() -> None:
    found = results.merged(_content(_row(1)), _content(_row(0, ms=2.0)), ORDER)
    assert [row["case"] for row in found["rows"]] == ["tiny", "typical"]
    assert found["complete"]
    assert [run["rows"] for run in found["runs"]] == [1, 1]
    assert not results.merged(_content(_row(1)), _content(_row(1)), ORDER)["complete"]


def test_a_new_row_takes_the_place_of_an_older_one() -> None:
    found = results.merged(_content(_row(0), _row(1)), _content(_row(1, ms=7.0)), ORDER)
    assert [row["ms"] for row in found["rows"]] == [1.0, 7.0]


def test_a_reference_that_no_plan_names_stands_behind_its_op() -> None:
    extra = {**_row(0), "backend": "elsewhere"}
    other = {**_row(0), "op": "z.z"}
    found = results.merged(_content(extra, other), _content(_row(0), _row(1)), ORDER)
    assert [row["backend"] for row in found["rows"] if row["op"] != "z.z"][-1] == "elsewhere"


@pytest.mark.parametrize(
    ("row", "done"),
    [
        ({"ms": 1.0, "quiet": True}, True),
        ({"ms": 1.0, "quiet": False}, False),
        ({"wrong": "other bits"}, False),
        ({"refused": "no such call"}, False),
    ],
)
def test_disturbed_rows_and_rows_without_a_number_are_measured_again(
    row: dict[str, Any], done: bool
) -> None:
    assert results.is_done(row) is done


def test_only_what_is_missing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def measured(case: Any, backend: str, settings: Any) -> dict[str, Any]:
        seen.append(f"{case.name} {backend} {settings.threads}")
        return {**identity(case, backend, settings), "ms": 1.0}

    monkeypatch.setattr(suite, "measure", measured)
    plan = BenchPlan(ops=PLAN.ops, backends=PLAN.backends, sizes=PLAN.sizes, done=(ORDER[0],))
    assert len(list(suite.rows(plan))) == 1
    assert seen == ["typical reference 1"]
    again = BenchPlan.of_json(json.loads(json.dumps(plan.as_json())))
    assert again.done == plan.done


def test_a_backend_that_refuses_adds_no_reference_beside_one_that_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each number of threads for itself: numba refuses, the CPU's kernel takes the case."""

    def measured(case: Any, backend: str, settings: Any) -> dict[str, Any]:
        found = identity(case, backend, settings)
        return found | ({"refused": "no"} if backend == "numba" else {"ms": 1.0})

    if not dispatch.availability("numba")[0]:
        pytest.skip("numba is not installed")
    monkeypatch.setattr(suite, "measure", measured)
    plan = BenchPlan(ops=("ghost.clip_factors",), sizes=("tiny",), threads=(1, 2))
    found = [(row["backend"], row["threads"]) for row in suite.rows(plan)]
    assert sorted(found) == [("cpu", 1), ("cpu", 2), ("numba", 1), ("numba", 2)]


def test_other_options_code_or_machines_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "ops.json"
    path.write_text(json.dumps(_content()))
    with pytest.raises(InvalidInput, match="options that this result was measured with"):
        results.begun(path, BenchPlan().as_json())
    with pytest.raises(InvalidInput, match="another processor"):
        results.check_same_place(PLACE, {**PLACE, "processor": "another"})
    results.check_same_place(PLACE, {**PLACE, "date": "later", "load": [3.0]})


PART = ["--op", "ghost.clip_factors", "--size", "tiny", "--backend", "reference"]
PART += ["--threads", "1", "--seconds", "0.05"]


def test_the_command_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path = tmp_path / "part.json"
    assert main(["bench", *PART, "--resume"]) == 2
    assert main(["bench", *PART, "--out", str(path), "--resume"]) == 2
    assert main(["bench", *PART, "--out", str(path)]) == 0
    (row,) = results.read(path)["rows"]
    path.write_text(path.read_text().replace('"quiet": false', '"quiet": true'))
    assert main(["bench", *PART, "--out", str(path), "--resume"]) == 0
    found = results.read(path)
    assert found["rows"][0]["samples ms"][OURS] == row["samples ms"][OURS]
    assert len(found["runs"]) == 2
    assert main(["bench", *PART, "--dtype", "float64", "--out", str(path), "--resume"]) == 2


def test_what_was_measured_is_kept_where_a_run_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "part.json"
    whole = worker.measured

    def interrupted(plan: Any) -> Any:
        found = whole(plan)
        yield next(found)
        yield next(found)
        raise KeyboardInterrupt

    monkeypatch.setattr(worker, "measured", interrupted)
    code: int | str | None = None
    try:
        code = main(["bench", *PART, "--out", str(path)])
    except (KeyboardInterrupt, SystemExit) as error:
        code = getattr(error, "code", 130)
    assert code != 0
    assert len(results.read(path)["rows"]) == 1


@pytest.mark.parametrize(("text", "threads"), [("1..2", [1, 2]), ("2,1", [2, 1]), ("1", [1])])
def test_threads_are_numbers_or_ranges(
    text: str, threads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[BenchPlan] = []

    def stopped(plan: BenchPlan, *_: Any) -> dict[str, Any]:
        plans.append(plan)
        raise InvalidInput("threads", expected="nothing", got="a plan", remedy="None.")

    monkeypatch.setattr(suite, "check_plan", lambda plan: None)
    monkeypatch.setattr("dpkern.commands.bench.measure", stopped)
    assert main(["bench", "--op", "clip_factors", "--threads", text]) == 2
    assert list(plans[0].threads) == threads
    assert main(["bench", "--op", "clip_factors", "--threads", "2..1"]) == 2
    assert main(["bench", "--op", "clip_factors", "--threads", "1.."]) == 2
