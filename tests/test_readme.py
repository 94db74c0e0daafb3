"""The README's snippet is a program, its table of steps is what was measured, and it is short."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import readme_table

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BEGIN = "# README: from here\n"


def test_the_snippet_is_the_example() -> None:
    snippet = README.split("```python\n")[1].split("```")[0].replace("import dpkern\n\n", "")
    example = (ROOT / "examples" / "quickstart.py").read_text()
    assert example.split(BEGIN)[1] == snippet


def test_the_table_of_steps_is_what_was_measured() -> None:
    measured = json.loads(readme_table.RESULTS.read_text())
    before, shown, after = readme_table.parts(README)
    assert before + shown + after == README
    assert shown == readme_table.table(measured)
    assert shown.count("\n| ") >= 4


def test_the_page_is_short() -> None:
    assert len(README.splitlines()) < 120


def test_ratios_of_a_busy_machine_are_left_out_of_the_table() -> None:
    measured = json.loads(readme_table.RESULTS.read_text())
    plain = readme_table.table(measured).splitlines()
    for row in measured["speed"]:
        row["guard"] = {"flags": []}
    quiet = readme_table.table(measured).splitlines()
    assert "; machine quiet |" in quiet[0]
    assert quiet[1:] == plain[1:]
    for row in measured["speed"]:
        row["guard"]["flags"] = ["others"] * (row["threads"] == 2)
    marked = readme_table.table(measured).splitlines()
    assert "rows disturbed |" in marked[0]
    assert all(" / -" in line for line in marked[2:])
