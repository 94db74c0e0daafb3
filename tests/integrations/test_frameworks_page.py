"""The page about frameworks runs from top to bottom."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")

pytest.importorskip("accelerate")
pytest.importorskip("lightning")
pytest.importorskip("transformers")

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile("\n".join(BLOCK.findall(PAGE.read_text())), PAGE.name, "exec"), names)
    trainer = names["trainer"]
    assert trainer.global_step == 8  # type: ignore[attr-defined]
    assert 2.9 < trainer.strategy.engine.get_epsilon(1e-3) <= 3  # type: ignore[attr-defined]
    accelerator = names["accelerator"]
    assert accelerator.engine.step.steps == 8  # type: ignore[attr-defined]
    assert 2.9 < accelerator.engine.get_epsilon(1e-3) <= 3  # type: ignore[attr-defined]
