"""Check the pages that people learn from: their code runs, and the messages they explain exist."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dpkern.cli import app

pytest.importorskip("sklearn")

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
QUICKSTART = DOCS / "quickstart.md"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
QUOTED = re.compile(r"^\| (`[^|]*`) \|", re.MULTILINE)


def program(page: Path) -> str:
    """Return the Python of a page, in its order."""
    return "\n".join(BLOCK.findall(page.read_text()))


@pytest.mark.parametrize("name", ["quickstart", "migrate"])
def test_the_code_of_a_page_runs_from_top_to_bottom(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    found: dict[str, object] = {}
    exec(compile(program(DOCS / f"{name}.md"), name, "exec"), found)
    said = capsys.readouterr().out
    if name == "quickstart":
        accuracy = re.search(r"held-out accuracy (\d+)%", said)
        assert accuracy is not None
        assert int(accuracy[1]) > 75
        assert "epsilon at most 3" in said or "epsilon at most 2.9" in said
        assert "BatchNorm" in said
        assert "GroupNorm" in said
        written = {"digits.pt", "run.pt", "cells.csv", "ranges.toml"}
        assert {path.name for path in tmp_path.iterdir()} == written
        assert_the_command_trains(tmp_path)


def assert_the_command_trains(folder: Path) -> None:
    """Run the page's command on the table and the ranges that its code has written."""
    (command,) = re.findall(r"^dpkern (train --data .*)$", QUICKSTART.read_text(), re.MULTILINE)
    done = CliRunner().invoke(app, command.split())
    assert done.exit_code == 0, done.output
    assert "30 with a public range" in done.output
    report = json.loads((folder / "cells" / "report.json").read_text())
    assert report["epsilon_certified"] <= 3
    assert report["test_accuracy"] > 0.8
    assert (folder / "cells" / "report.html").exists()


def strings(node: ast.AST) -> Iterator[str]:
    """Yield the texts of a tree; what an f-string inserts is left out."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            yield inner.value


def test_messages_that_are_explained_are_messages() -> None:
    texts = "\n".join(
        text
        for path in sorted((ROOT / "dpkern").rglob("*.py"))
        for text in strings(ast.parse(path.read_text()))
    )
    messages = [
        message
        for cell in QUOTED.findall((DOCS / "troubleshooting.md").read_text())
        for message in re.findall("`([^`]*)`", cell)
    ]
    assert len(messages) > 10
    assert not [message for message in messages if message not in texts]
