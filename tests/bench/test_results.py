"""What is kept of a run, what may take its place, and what happens from run to run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dpkern.base.errors import BackendError, InvalidInput
from dpkern.bench import environment, history, measure, results, revision, suite, sweep, worker
from dpkern.bench.paired import FASTER, SAME, SLOWER, UNCLEAR
from dpkern.cli import main

PLACE = environment.environment()
PART = ["--op", "ghost.clip_factors", "--size", "tiny", "--quick", "--threads", "1"]


def _row(ms: float = 1.0, width: float = 0.01, **other: Any) -> dict[str, Any]:
    keys = dict.fromkeys(results.KEY) | {"op": "a.b", "case": "tiny", "backend": "cpu"}
    numbers = {"ms": ms, "ms interval": [ms * (1 - width), ms * (1 + width)], "quiet": True}
    shown = {"torch": "mm", "torch ms": 2.0, "GB/s": 1.0, "guard": {"flags": []}}
    ways = {"formulations ms": {"mm": 2 * ms}}
    return {**keys, "threads": 1, "cache": "warm", **numbers, **shown, **ways, **other}


def _content(complete: bool = True, **place: Any) -> dict[str, Any]:
    return results.result(PLACE | place, {}, complete, [_row()])


def test_a_result_says_what_it_depends_on() -> None:
    for name in ("schema", "date", "commit", "dirty", "processor", "build", "variables", "torch"):
        assert name in PLACE
    assert PLACE["schema"] == environment.SCHEMA
    assert PLACE["processor"]
    if (revision.SOURCE / ".git").exists():
        assert len(PLACE["commit"]) == 40


def test_written_results_are_read_and_tables_stand_beside_them(tmp_path: Path) -> None:
    path = tmp_path / "ops.json"
    results.write(path, _content())
    assert results.read(path)["rows"] == [_row()]
    page = path.with_suffix(".md").read_text()
    assert "| a.b tiny | cpu | 1 | 1 | mm | 2 |" in page
    assert "0 of 1" in page


def test_a_part_never_takes_the_place_of_a_complete_table(tmp_path: Path) -> None:
    path = tmp_path / "ops.json"
    results.write(path, _content())
    before = path.read_bytes()
    with pytest.raises(InvalidInput, match="a table of all cases"):
        results.write(path, _content(complete=False))
    assert main(["bench", *PART, "--out", str(path)]) == 2
    assert path.read_bytes() == before
    other = tmp_path / "part.json"
    results.write(other, _content(complete=False))
    results.write(other, _content(complete=False))
    results.write(path, _content())


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 99, "rows": []}', '{"rows": []}'])
def test_other_files_are_no_results(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(InvalidInput, match="a result of dpkern bench with schema"):
        results.read(path)


def test_only_all_cases_are_a_complete_table() -> None:
    threads = suite.torch_threads_here()
    assert suite.BenchPlan(threads=threads).complete
    parts: tuple[dict[str, Any], ...] = (
        {"ops": ("clip",)},
        {"backends": ("cpu",)},
        {"sizes": ("tiny",)},
        {"quick": True},
        {"dtypes": ("float64",)},
        {"shape": {"B": 3}},
        {"isas": ("avx2",)},
        {"threads": threads[1:] or (2,)},
    )
    assert not any(suite.BenchPlan(**{"threads": threads, **part}).complete for part in parts)


def test_plans_travel_to_workers_unchanged() -> None:
    plan = suite.BenchPlan(ops=("clip",), shape={"B": 3}, threads=(1, 2), seconds=0.5)
    assert suite.BenchPlan.of_json(json.loads(json.dumps(plan.as_json()))) == plan


@pytest.mark.parametrize(
    ("option", "says"),
    [
        (["--op", "no.such"], "op: expected an op, or one of"),
        (["--backend", "none"], "backend: expected one of"),
        (["--threads", "0"], "threads: expected an int >= 1"),
        (["--threads", "two"], "threads: expected whole numbers"),
        (["--dtype", "float3"], "dtype: expected one of"),
        (["--size", "huge"], "size: expected one of"),
        (["--cache", "tepid"], "cache: expected one of"),
        (["--shape", "B"], "shape: expected NAME=NUMBER"),
        (["--shape", "Z=3"], "shape: expected one of"),
        (["--isa", "mmx"], "isa: expected one of"),
    ],
)
def test_wrong_selections_are_refused_before_anything_is_measured(
    option: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *option, "--json"]) == 2
    printed = json.loads(capsys.readouterr().out)
    assert says in printed["error"]["message"]


def test_a_backend_that_is_not_here_is_refused_with_its_reason() -> None:
    plan = suite.BenchPlan(backends=("cupy",))
    if suite.dispatch.availability("cupy")[0]:
        pytest.skip("cupy is here")
    with pytest.raises(BackendError, match="backend 'cupy'"):
        suite.check_plan(plan)


def test_the_command_prints_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *PART, "--shape", "B=24", "--backend", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == environment.SCHEMA
    assert found["environment"]["variables"]["OMP_WAIT_POLICY"]
    (row,) = found["rows"]
    assert row["sizes"] == {"B": 24}
    assert row["ms"] > 0
    assert len(row["samples ms"][measure.OURS]) >= 5


def test_what_a_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert worker.variables()["OMP_WAIT_POLICY"] == "active"
    monkeypatch.delenv("OMP_WAIT_POLICY")
    assert worker.variables()["OMP_WAIT_POLICY"] == "passive"


@pytest.mark.parametrize(
    ("new", "verdict"),
    [
        (_row(1.2), SLOWER),
        (_row(0.8), FASTER),
        (_row(1.0, width=0.005), SAME),
        (_row(1.03), UNCLEAR),
        (_row(1.2, quiet=False), UNCLEAR),
    ],
)
def test_changes_from_run_to_run_need_intervals_that_lie_apart(
    new: dict[str, Any], verdict: str
) -> None:
    assert history.changes(_row(1.0, width=0.005), new)[1] == verdict


def test_history_follows_a_case_by_date(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = []
    for day, ms in ((2, 2.0), (1, 1.0)):
        content = _content(date=f"2026-01-0{day}T00:00:00+00:00", commit=f"{day}" * 40)
        content["rows"] = [_row(ms)]
        paths.append(tmp_path / f"{day}.json")
        results.write(paths[-1], content)
    assert main(["bench", "history", *map(str, paths)]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines[3:5]]
    assert [row[0] for row in rows] == ["2026-01-01", "2026-01-02"]
    assert rows[1][3:] == ["2.000", "slower"]


def test_tables_that_are_older_than_their_kernels_are_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = revision.git(revision.SOURCE, "rev-list", "--max-parents=0", "HEAD")
    if not root:
        pytest.skip("no repository")
    for commit, code in ((root.split()[0], 1), (PLACE["commit"], 0)):
        path = tmp_path / f"{code}.json"
        results.write(path, _content(commit=commit))
        assert main(["bench", "history", "--stale", str(path)]) == code
    assert len(capsys.readouterr().out.splitlines()) > 10
    both = [str(tmp_path / f"{code}.json") for code in (1, 0)]
    assert main(["bench", "history", "--stale", *both]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert "0.json: 0 commits" in second
    assert "1.json: 0 commits" not in first


def test_a_table_without_a_commit_is_as_old_as_the_commit_that_wrote_it(tmp_path: Path) -> None:
    old = revision.SOURCE / "benchmarks" / "results" / "cpu.json"
    if not revision.git(revision.SOURCE, "log", "-1", "--format=%H", "--", str(old)):
        pytest.skip("no repository")
    wrote = history.measured_at(old)
    assert wrote is not None
    assert history.commits_since(wrote)
    copied = tmp_path / "cpu.json"
    copied.write_text(old.read_text())
    assert history.measured_at(copied) is None
    other = tmp_path / "step.json"
    other.write_text(json.dumps({"machine": {"commit": wrote}, "rows": []}))
    assert history.measured_at(other) == wrote


def test_exponents_are_those_of_powers() -> None:
    sizes = [8, 16, 32, 64, 128]
    square = sweep.fitted(sizes, [3e-3 * s**2 for s in sizes])
    assert square is not None
    assert square.value == pytest.approx(2)
    assert square.high - square.low < 1e-6
    noisy = sweep.fitted(sizes, [s * f for s, f in zip(sizes, (1, 1.1, 0.9, 1.1, 1), strict=True)])
    assert noisy is not None
    assert noisy.low < 1 < noisy.high
    assert sweep.fitted(sizes[:2], [1, 2]) is None


def test_disturbed_rows_are_left_out_of_exponents() -> None:
    sizes = (8, 16, 32, 64)
    rows = [_row(float(s), value=s, quiet=s < 64) for s in sizes]
    rows[-1]["ms"] = 1e6
    table = sweep.report(rows, "B", PLACE).tables[1].rows
    exponents = {way: value for way, value, *_ in table}
    assert exponents["a.b tiny: dpkern cpu"] == pytest.approx(1)
    wild = sweep.report([{**row, "quiet": True} for row in rows], "B", PLACE).tables[1].rows
    assert wild[0][1] > 2  # type: ignore[operator]


def test_a_sweep_changes_one_size_and_draws_a_picture() -> None:
    plan = suite.BenchPlan(
        ops=("ghost.clip_factors",), backends=("cpu",), sizes=("tiny",), quick=True, seconds=0.01
    )
    found = list(sweep.swept(plan, "B", [4, 8]))
    assert [row["sizes"]["B"] for row in found] == [4, 8]
    report = sweep.report(found, "B", PLACE)
    (figure,) = report.figures
    assert (figure.log_x, figure.log_y) == (True, True)
    with pytest.raises(InvalidInput, match="axis: expected one of"):
        sweep.check_axis("Q", suite.size_names(plan))
