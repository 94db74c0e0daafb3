"""What ``python -m benchmarks`` keeps: whole tables in their place, parts where they are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks import __main__ as command
from benchmarks import host_report
from dpkern.bench import results
from dpkern.bench.environment import SCHEMA, environment

MEASURED: list[Any] = []


def _measured(plan: Any, console: Any) -> dict[str, Any]:
    MEASURED.append(plan)
    return results.result(environment(), plan.as_json(), plan.complete, [])


def test_every_op_is_measured_where_no_command_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "measure", _measured)
    path = tmp_path / "ops.json"
    done = CliRunner().invoke(command.app, ["--out", str(path)])
    assert done.exit_code == 0, done.output
    assert MEASURED[-1].complete
    assert results.read(path)["complete"]


def test_a_part_of_a_table_is_kept_only_where_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"model": "tiny"}
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    monkeypatch.setattr(host_report, "measured", lambda *_: row)
    monkeypatch.setattr(host_report, "markdown", lambda *_: "| table |\n")
    name = next(iter(host_report.MODELS))
    done = CliRunner().invoke(command.app, ["host", name])
    assert done.exit_code == 0, done.output
    assert "not written" in done.output
    assert list(tmp_path.iterdir()) == []
    kept = tmp_path / "part.json"
    assert CliRunner().invoke(command.app, ["host", name, "--json", str(kept)]).exit_code == 0
    machine = json.loads(kept.read_text())["machine"]
    assert machine["schema"] == SCHEMA
    assert {"commit", "dirty", "date", "processor", "variables"} <= machine.keys()
    assert CliRunner().invoke(command.app, ["host"]).exit_code == 0
    assert (tmp_path / "host.json").exists()
