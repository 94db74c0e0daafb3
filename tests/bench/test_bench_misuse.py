"""Uses of ``dpkern bench`` that would lose a result, ignore an option or compare unlike things."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dpkern.base import dispatch
from dpkern.base.errors import InvalidInput
from dpkern.bench import environment, history, results, suite, sweep
from dpkern.bench.outcome import tensors_in
from dpkern.cli import main
from dpkern.commands import bench

PLACE = environment.environment()
KEYS: dict[str, Any] = dict.fromkeys(results.KEY)
ROW: dict[str, Any] = KEYS | {
    "op": "a.b",
    "case": "tiny",
    "backend": "cpu",
    "threads": 1,
    "cache": "warm",
    "ms": 1.0,
    "ms interval": [0.999, 1.001],
    "quiet": True,
    "guard": {"flags": []},
    "torch": "mm",
    "torch ms": 2.0,
    "GB/s": 1.0,
}


def _content(complete: bool = False, ms: float = 1.0, **place: Any) -> dict[str, Any]:
    row = ROW | {"ms": ms, "ms interval": [ms * 0.999, ms * 1.001]}
    return results.result(PLACE | place, {}, complete, [row])


def test_the_folder_of_a_result_is_made_before_anything_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "new" / "deeper" / "run.json"
    results.check_place(path, complete=False)
    assert path.parent.is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match="Name a folder that can be made"):
        results.check_place(tmp_path / "file" / "run.json", complete=False)
    with pytest.raises(InvalidInput, match="a folder"):
        results.check_place(tmp_path, complete=True)


@pytest.mark.parametrize("complete", [False, True])
def test_tables_take_no_other_files_place(tmp_path: Path, complete: bool) -> None:
    with pytest.raises(InvalidInput, match="takes no other file's place"):
        results.write(tmp_path / "run.md", _content(complete))
    (tmp_path / "notes.md").write_text("mine")
    with pytest.raises(InvalidInput, match="takes no other file's place"):
        results.write(tmp_path / "notes.json", _content(complete))
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(InvalidInput, match="a result of dpkern bench"):
        results.write(tmp_path / "other.json", _content(complete))
    assert (tmp_path / "notes.md").read_text() == "mine"
    results.write(tmp_path / "run.json", _content(complete))
    results.write(tmp_path / "run.json", _content(complete))


@pytest.mark.parametrize("part", [{"seconds": 0.01}, {"caches": ("cold",)}])
def test_hurried_and_cold_runs_are_no_complete_table(part: dict[str, Any]) -> None:
    assert not suite.BenchPlan(threads=suite.torch_threads_here(), **part).complete


def test_a_misspelt_op_gets_the_nearest_name() -> None:
    with pytest.raises(InvalidInput, match=r"Did you mean linear_norm\?"):
        suite.ops_of(suite.BenchPlan(ops=("lin_norm",)))


def test_rows_of_changed_sizes_say_so_in_the_table() -> None:
    plan = suite.BenchPlan(
        ops=("ghost.clip_factors",),
        backends=("cpu",),
        sizes=("tiny",),
        shape={"B": 24},
        quick=True,
        seconds=0.01,
    )
    (row,) = suite.rows(plan)
    assert results.cells(row)[0] == "ghost.clip_factors tiny, B=24"


def test_a_wrong_kernel_gets_no_number_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "ghost.clip_factors"
    reference = suite.OPS[name].reference

    def planted(*args: Any, **named: Any) -> Any:
        found = reference(*args, **named)
        for _, tensor in tensors_in(found, "result"):
            tensor.add_(1)
        return found

    def here(plan: suite.BenchPlan) -> Any:
        yield PLACE
        yield from suite.rows(plan)

    monkeypatch.setattr(bench.worker, "measured", here)
    part = ["--op", name, "--size", "tiny", "--quick", "--threads", "1", "--backend", "cpu"]
    with dispatch.replaced("cpu", [(name, planted, None)]):
        assert main(["bench", *part, "--json"]) == 1
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert "wrong" in row
    assert "ms" not in row


def test_options_before_a_command_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "run.json")
    results.write(Path(path), _content())
    assert main(["bench", "--op", "clip", "history", path, path]) == 2
    assert "options of history behind it, got --op" in capsys.readouterr().err
    assert main(["bench", "history", path, path]) == 0


def test_history_takes_one_file_outside_of_the_repository(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.json"
    results.write(path, _content())
    assert main(["bench", "history", str(path)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("a.b tiny, cpu, threads: 1\n")
    assert max(map(len, printed.splitlines())) <= 80


@pytest.mark.parametrize("other", [{"processor": "another"}, {"cores": 999}])
def test_times_of_other_machines_get_no_verdict(other: dict[str, Any]) -> None:
    ((_, times),) = history.followed([_content(), _content(ms=2.0, **other)])
    assert times[1]["verdict"] == history.OTHER_MACHINE
    assert "ratio" not in times[1]
    ((_, times),) = history.followed([_content(), _content(ms=2.0)])
    assert times[1]["verdict"] == "slower"


@pytest.mark.parametrize("commit", [None, "0" * 40])
def test_the_age_of_a_result_without_a_known_commit_is_refused(
    tmp_path: Path, commit: str | None
) -> None:
    path = tmp_path / "run.json"
    results.write(path, _content(commit=commit))
    assert main(["bench", "history", "--stale", str(path)]) == 2


def test_a_sweep_takes_no_more_threads_than_there_are_and_no_size_of_0() -> None:
    def never(_: suite.BenchPlan) -> list[Any]:
        raise AssertionError("measured")

    plan = suite.BenchPlan(ops=("ghost.clip_factors",))
    for axis, values in (("threads", [1, 4096]), ("B", [4, 0])):
        with pytest.raises(InvalidInput, match="values: expected an int >= 1"):
            list(sweep.swept(plan, axis, values, never))
    assert torch.get_num_threads() < 4096
