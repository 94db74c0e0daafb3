"""Names: one class name for one class, and old public names that still lead to their classes."""

from __future__ import annotations

import ast
import inspect
from collections import defaultdict
from importlib import import_module
from inspect import isclass, isroutine
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


DOORS = [
    "dpkern",
    *(f"dpkern.{path.stem}" for path in sorted((ROOT / "dpkern").glob("[!_]*.py"))),
    *(f"dpkern.{name}" for name in ("audit", "compat.opacus", "cost", "engine", "integrations")),
    *(f"dpkern.{name}" for name in ("nn", "objective", "ops", "papers", "reports", "train")),
]


def undocumented(module: ModuleType) -> tuple[int, list[str]]:
    """Return how many of our names a module offers, and which of them lack a docstring."""
    offered, without = 0, [] if module.__doc__ else [module.__name__]
    for name in getattr(module, "__all__", None) or dir(module):
        found = getattr(module, name, None)
        ours = getattr(found, "__module__", "").startswith("dpkern")
        if name.startswith("_") or not ours or not (isclass(found) or isroutine(found)):
            continue
        members = {
            f"{name}.{key}": inspect.getdoc(getattr(found, key))
            for key, value in (vars(found).items() if isclass(found) else ())
            if not key.startswith("_") and (isroutine(value) or isinstance(value, property))
        }
        text = found.__doc__ or ""
        generated = isclass(found) and text.startswith(f"{found.__name__}(")
        members[name] = None if generated else text
        offered += len(members)
        without += [f"{module.__name__}.{key}" for key, text in members.items() if not text]
    return offered, without


def test_every_public_name_has_a_docstring() -> None:
    found = [undocumented(import_module(door)) for door in DOORS]
    assert sum(offered for offered, _ in found) > 500
    assert [name for _, without in found for name in without] == []


def test_a_name_without_a_docstring_is_found() -> None:
    module = ModuleType("door", "A door.")

    class Silent:
        def method(self) -> None: ...

    Silent.__module__ = "dpkern.door"
    module.Silent = Silent  # type: ignore[attr-defined]
    assert undocumented(module) == (2, ["door.Silent.method", "door.Silent"])


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
