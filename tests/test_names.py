"""Names: one class name for one class, and old public names that still lead to their classes."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path
from types import ModuleType

import pytest

import dpkern
from dpkern import audit

ROOT = Path(__file__).parents[1]


def classes(sources: dict[str, str]) -> dict[str, list[str]]:
    """Return the places of each class name, those of nested classes too."""
    found = defaultdict(list)
    for place, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(f"{place}:{node.lineno}")
    return found


def twice(found: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return the class names that stand in several places."""
    return {name: places for name, places in found.items() if len(places) > 1}


def test_each_class_has_a_name_of_its_own() -> None:
    sources = {
        str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "dpkern").rglob("*.py")
    }
    found = classes(sources)
    assert len(found) > 400
    assert twice(found) == {}


def test_a_name_that_is_used_twice_is_found() -> None:
    nested = "def make():\n    class Part:\n        pass\n"
    found = classes({"a.py": "class Part:\n    pass\n", "b.py": nested})
    assert twice(found) == {"Part": ["a.py:1", "b.py:2"]}


OLD_MECHANISM_NAMES = {
    "Crop": "WhitenedCrop",
    "Diagonal": "DiagonalMap",
    "Memory": "MechanismState",
    "Open": "PartialNoiseMap",
    "Release": "ReleaseMap",
}


@pytest.mark.parametrize(("old", "new"), OLD_MECHANISM_NAMES.items())
def test_old_names_lead_to_their_classes_and_warn(old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"mechanisms.{old} is now .*{new}"):
        found = getattr(dpkern.mechanisms, old)
    assert found is getattr(dpkern.mechanisms, new)
    assert old not in dpkern.mechanisms.__all__


def test_names_that_never_were_are_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Relase'"):
        dpkern.mechanisms.Relase  # noqa: B018


@pytest.mark.parametrize(("old", "new"), audit.claims.OLD_NAMES.items())
@pytest.mark.parametrize("module", [audit, audit.claims])
def test_old_names_of_claims_lead_to_their_classes_and_warn(
    module: ModuleType, old: str, new: str
) -> None:
    with pytest.warns(DeprecationWarning, match=f"{module.__name__}.{old} is now .*{new}"):
        found = getattr(module, old)
    assert found is getattr(module, new)


def test_the_old_name_of_the_step_counter_leads_to_it_and_warns() -> None:
    with pytest.warns(DeprecationWarning, match="update.clock is now .*step_counter"):
        found = dpkern.ops.update.clock
    assert found is dpkern.ops.update.step_counter
