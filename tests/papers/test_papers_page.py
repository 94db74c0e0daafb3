"""docs/papers.md is what its generator writes, and misses no figure or table."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dpkern.papers.sources import PARTS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def table() -> ModuleType:
    spec = importlib.util.spec_from_file_location("papers_table", ROOT / "docs/papers_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def summary(table: Any) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(table.SUMMARY.read_text())
    return content


def test_the_page_is_the_generated_one(table: Any, summary: dict[str, Any]) -> None:
    assert table.PAGE.read_text() == table.page(summary), "run python docs/papers_table.py"


def test_another_verdict_makes_another_page(table: Any, summary: dict[str, Any]) -> None:
    changed = json.loads(json.dumps(summary))
    item = next(one for one in changed["items"] if one["item"] == "fig6" and one["verdicts"])
    item["verdicts"][0]["verdict"] = "fails"
    item["verdicts"][0]["claim"] = "something else"
    assert table.page(changed) != table.page(summary)


def test_every_part_has_a_command_a_picture_and_a_verdict(
    table: Any, summary: dict[str, Any]
) -> None:
    page = table.page(summary)
    judged = {(one["paper"], one["item"]) for one in summary["items"]}
    for part in PARTS:
        assert f"`{part.command}`" in page
        if (part.paper, part.item) == ("gredp", "table7"):  # needs the user's weights
            continue
        assert (part.paper, part.item) in judged
        assert (table.PICTURES / f"{part.stem}.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_belongs_to_a_part(table: Any) -> None:
    stems = {part.stem for part in PARTS}
    assert {path.stem for path in table.PICTURES.iterdir()} <= stems
