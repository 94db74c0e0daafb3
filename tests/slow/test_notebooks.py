"""The notebooks run from top to bottom, and carry no results that could be stale."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib as mpl
import pytest

pytestmark = pytest.mark.slow

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs" / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mpl.use("Agg")
    cells = [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
    assert cells
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells)
    names: dict[str, object] = {"__name__": "notebook"}
    for cell in cells:
        exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    assert "epsilon" in capsys.readouterr().out
    if path.stem == "lora_finetuning":
        assert names["after"] > names["before"] + 0.2  # type: ignore[operator]


def test_there_are_three() -> None:
    assert len(NOTEBOOKS) == 3
