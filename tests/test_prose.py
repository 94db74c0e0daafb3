"""Check that docstrings open as sentences: a verb, a noun phrase, or "Whether".

A function commands ("Return ...", "Clip ..."), a class or an attribute names a thing, a boolean
asks. A first line that opens with a question word, a preposition or a conjunction is a fragment of
a sentence whose subject only its author knows.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[1] / "dpkern"

PACKAGES = ("", *sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py")))
"""All packages of dpkern; "" stands for the files beside them."""

QUESTIONS = "what whatever who whoever whom whose how which where when why"
PREPOSITIONS = (
    "of as by from in with for on at behind over around without into onto to under within between "
    "through during per than beside besides beneath above below before after against along among "
    "beyond upon via until despite"
)
CONJUNCTIONS = "if unless because while although so that and or but"
PERSONS = "nobody somebody everybody anybody anyone someone"
BANNED = frozenset(f"{QUESTIONS} {PREPOSITIONS} {CONJUNCTIONS} {PERSONS}".split())
NO_COMMANDS = frozenset(("", *"the a an its their these those".split()))
"""Openings of formulas and noun phrases, which suit a class or a property and no function."""

FRAGMENT = re.compile(r"(?:^|[;:.,)] )None: ")
"""An argument's "None: the default", which should read "None selects the default"."""


class Docstring(NamedTuple):
    """A docstring in a source file."""

    kind: str  # module, class, function, property or attribute
    line: int
    text: str

    @property
    def opener(self) -> str:
        """The first word in lower case; empty before a formula or a quotation."""
        found = re.match(r"[A-Za-z][\w-]*", self.text.strip())
        return found[0].lower() if found else ""


def docstrings(source: str) -> Iterator[Docstring]:
    """Yield the docstrings of a module and of everything in it, attributes included."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for before, statement in zip([None, *node.body], node.body, strict=False):
            match statement:
                case ast.Expr(ast.Constant(str(text))) if before is None:
                    yield Docstring(_kind(node), statement.lineno, text)
                case ast.Expr(ast.Constant(str(text))) if isinstance(
                    before, ast.Assign | ast.AnnAssign
                ):
                    yield Docstring("attribute", statement.lineno, text)


def _kind(node: ast.AST) -> str:
    if isinstance(node, ast.Module):
        return "module"
    if isinstance(node, ast.ClassDef):
        return "class"
    decorators = " ".join(map(ast.unparse, getattr(node, "decorator_list", [])))
    return "property" if "property" in decorators else "function"


def faults(source: str) -> list[str]:
    """Return one line for each docstring that opens as a fragment or explains None by one."""
    found = []
    for doc in docstrings(source):
        first = doc.text.strip().split("\n")[0]
        if doc.opener in BANNED:
            found.append(f"line {doc.line}: {doc.kind} opens with {doc.opener!r}: {first}")
        elif doc.kind == "function" and doc.opener in NO_COMMANDS:
            found.append(f"line {doc.line}: a function commands, this one names: {first}")
        if FRAGMENT.search(" ".join(doc.text.split())):
            found.append(f"line {doc.line}: None is no sentence: {first}")
    return found


@pytest.mark.parametrize("package", PACKAGES, ids=lambda name: name or "dpkern")
def test_docstrings_open_as_sentences(package: str) -> None:
    assert len(PACKAGES) > 10
    files = sorted((PACKAGE / package).rglob("*.py") if package else PACKAGE.glob("*.py"))
    assert files
    wrong = [f"{f.relative_to(PACKAGE)} {fault}" for f in files for fault in faults(f.read_text())]
    assert not wrong, "\n".join(wrong)


BAD = '''"""What is said of rows."""

LIMIT = 3
"""Of the rows."""


class Rows:
    """Where rows stand."""

    @property
    def first(self):
        """Whose row comes first."""

    def count(self):
        """The number of rows."""

    def squares(self):
        """``x^2`` of each."""

    def take(self, place=None):
        """Take a row.

        Args:
            place: of the row; None: the first.
        """
'''


def test_each_kind_of_fragment_is_found() -> None:
    assert [fault.split(":")[0] for fault in faults(BAD)] == [
        "line 1",
        "line 4",
        "line 8",
        "line 12",
        "line 15",
        "line 18",
        "line 21",
    ]


GOOD = '''"""Count rows."""

LIMIT = 3
"""The largest number of rows."""


class Rows:
    """Per-user rows of a table, ``with`` whatever they hold."""

    @property
    def first(self):
        """The first row; None if there is none."""

    @property
    def empty(self):
        """Whether there is no row."""

    def take(self, place=None):
        """Take a row.

        Args:
            place: number of the row. None selects the first.
        """
'''


def test_sentences_pass() -> None:
    assert len(list(docstrings(GOOD))) == 6
    assert not faults(GOOD)
