"""Imports point down: the floors of CONTRIBUTING.md are those of the code, and nothing is circular.

Every import statement is read, those inside functions too, and so are the names that
``import_module`` is given in letters. An import for type checkers only (``if TYPE_CHECKING``) may
not point up either; it closes no circle, for nothing runs it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "dpkern"


class Import(NamedTuple):
    """One module that a file imports."""

    place: str
    source: str
    target: str
    types_only: bool


def modules(root: Path) -> dict[str, Path]:
    """Files of the package by dotted name."""
    found = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def statements(
    tree: ast.AST, types_only: bool = False
) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Import statements, and whether only type checkers see them."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, types_only
        if not isinstance(node, ast.expr):  # no expression holds a statement
            checked = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            yield from statements(node, types_only or checked)


def by_name(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield what ``import_module`` is asked for, where the call says it in letters."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = getattr(node.func, "attr", None) or getattr(node.func, "id", "")
        if called.endswith("import_module"):
            named = ast.unparse(node.args[0]).lstrip("f").strip("'\"").partition(".{")[0]
            if named.split(".")[0] == PACKAGE:
                yield named, node.lineno


def imports(root: Path) -> list[Import]:
    """Every import of the package by itself."""
    known, found = modules(root), []
    for name, path in known.items():
        package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
        tree = ast.parse(path.read_text())
        found += [
            Import(f"{path.relative_to(root)}:{line}", name, target, False)
            for target, line in by_name(tree)
        ]
        for node, types_only in statements(tree):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            else:
                base = package[: len(package) - node.level + 1] if node.level else []
                origin = ".".join([*base, *([node.module] if node.module else [])])
                named = [f"{origin}.{alias.name}" for alias in node.names]
                own = {f"{PACKAGE}._C"}
                targets = [full if full in known or full in own else origin for full in named]
            place = f"{path.relative_to(root)}:{node.lineno}"
            found += [
                Import(place, name, target, types_only)
                for target in dict.fromkeys(targets)
                if target.split(".")[0] == PACKAGE
            ]
    return found


@cache
def our_imports() -> list[Import]:
    """Every import of the package as it is."""
    return imports(ROOT)


def floors(text: str) -> dict[str, int]:
    """Floor of each room, from the picture in CONTRIBUTING.md."""
    picture = text.split("## How the tree is laid out")[1].split("```")[1]
    rows = re.findall(r"^([1-9])  (\w+(?:  \w+)*) {3,}\S", picture, flags=re.MULTILINE)
    return {room: int(floor) for floor, rooms in rows for room in rooms.split()}


FLOORS = floors((ROOT / "CONTRIBUTING.md").read_text())


def room(module: str) -> str:
    """The folder under ``dpkern``; empty for the files at the top, which hand names on."""
    parts = module.split(".")
    if parts[1:] == ["_C"]:
        return "csrc"
    inner = len(parts) > 2 or (ROOT / PACKAGE / parts[-1] / "__init__.py").exists()
    return parts[1] if len(parts) > 1 and inner else ""


def upward(found: list[Import]) -> list[str]:
    """Imports of a room on the same or on a higher floor, or of the top."""
    wrong = []
    for place, source, target, _ in found:
        here, there = room(source), room(target)
        if here and here != there and (not there or FLOORS[there] >= FLOORS[here]):
            wrong.append(f"{place}: {here} imports {target}")
    return wrong


def circle(found: list[Import]) -> list[str]:
    """Files that import each other in a ring; empty if none do."""
    graph: dict[str, set[str]] = {}
    for _, source, target, types_only in found:
        inside = source.startswith(f"{target}.")  # a package, of which this is a part
        if not types_only and not inside and source != target:
            graph.setdefault(source, set()).add(target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_the_picture_shows_every_room() -> None:
    folders = {p.parent.name for p in (ROOT / PACKAGE).glob("*/__init__.py")}
    assert set(FLOORS) == folders | {"csrc", "benchmarks"}
    assert sorted(set(FLOORS.values())) == list(range(1, 8))


def test_no_import_points_up() -> None:
    assert upward(our_imports()) == []


def test_no_files_import_each_other() -> None:
    assert circle(our_imports()) == []


def test_what_stands_at_the_top_only_hands_names_on() -> None:
    """All but the door: ``cli`` puts the commands together."""
    for path in (ROOT / PACKAGE).glob("*.py"):
        tree = ast.parse(path.read_text())
        made = [n.name for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef)]
        assert made in ([], ["__getattr__", "__dir__"]) or path.stem == "cli"


@pytest.mark.parametrize(
    ("file", "text", "wrong"),
    [
        ("base/low.py", "from ..engine import high\n", "engine"),
        ("base/low.py", "def f():\n    from ..engine.high import x\n", "engine"),
        ("base/low.py", "if TYPE_CHECKING:\n    from ..engine.high import x\n", "engine"),
        ("base/low.py", "import dpkern.engine.high\n", "engine"),
        ("engine/high.py", "from .. import __version__\n", "dpkern"),
        ("engine/high.py", "from ..cost import other\n", "cost"),
        ("base/low.py", "import_module(f'dpkern.engine.{name}')\n", "engine"),
        ("base/low.py", "importlib.import_module('dpkern.engine')\n", "engine"),
        ("engine/high.py", "from ..base import low\n", None),
        ("ops/kernels.py", "from .. import _C\n", None),
    ],
)
def test_an_import_that_points_up_is_seen(
    tmp_path: Path, file: str, text: str, wrong: str | None
) -> None:
    for name in ("base/low.py", "engine/high.py", "cost/other.py", "ops/kernels.py"):
        path = tmp_path / PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text if name == file else "")
        (path.parent / "__init__.py").touch()
    (tmp_path / PACKAGE / "__init__.py").touch()
    found = upward(imports(tmp_path))
    assert len(found) == (wrong is not None)
    assert wrong is None or wrong in found[0]


def test_a_circle_is_seen(tmp_path: Path) -> None:
    (tmp_path / PACKAGE / "base").mkdir(parents=True)
    folder = tmp_path / PACKAGE / "base"
    (folder / "one.py").write_text("def f():\n    from .two import g\n")
    (folder / "two.py").write_text("from . import one\n")
    assert len(circle(imports(tmp_path))) == 3
    (folder / "one.py").write_text("if TYPE_CHECKING:\n    from .two import g\n")
    assert circle(imports(tmp_path)) == []
