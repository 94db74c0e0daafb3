"""Check that what the pages import from dpkern exists."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from dpkern.base.errors import MissingDependency

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

IMPORT = re.compile(r"^from (dpkern[\w.]*) import ([\w, ]+)$", re.MULTILINE)


def missing(text: str) -> Iterator[str]:
    """Yield the imported names of a page that do not exist."""
    for module, names in IMPORT.findall(text):
        try:
            package = importlib.import_module(module)
        except MissingDependency:  # run where it is installed: integrations/test_frameworks_page.py
            continue
        for name in names.split(", "):
            full = f"{module}.{name}"
            if not hasattr(package, name) and find_spec(full) is None:
                yield full


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_imports_of_a_page_exist(page: Path) -> None:
    try:
        assert not list(missing(page.read_text()))
    except MissingDependency as error:  # a framework, which make wrappers installs
        pytest.skip(str(error))


def test_names_that_are_gone_are_found() -> None:
    page = "```python\nfrom dpkern.objective import Training, generated\n```"
    assert list(missing(page)) == ["dpkern.objective.Training"]


def test_pages_import_something() -> None:
    assert sum(len(IMPORT.findall(page.read_text())) for page in PAGES) > 5
