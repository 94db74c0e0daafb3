"""A pytest plugin that puts ``dpkern.compat.opacus`` in the place of ``opacus``.

    python -m pytest -p benchmarks.clients.opacus_shim FOLDER --outcomes FILE [--opacus]

What the shim does not have is a placeholder that raises ``NotInShim`` where it is used, so that the
other tests of a file still run. With ``--opacus`` nothing is replaced: these are the outcomes to
compare with. Every test has ``SECONDS`` and few examples of hypothesis.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import Phase, settings

SECONDS = 60
EXAMPLES = 2
SHIM = "dpkern.compat."
WORST = ("failed", "passed", "skipped")
"""Of several reports of one test, the first of these is its outcome."""


class NotInShim(Exception):
    """A test used a name of Opacus that the shim leaves out."""


class TooLong(BaseException):
    """A test took longer than ``SECONDS``; hypothesis does not try to find a smaller example."""


class Placeholder(type):
    """A class for each name that the shim leaves out: it may be imported and inherited from."""

    path = ""

    def __call__(cls, *_: Any, **__: Any) -> Any:
        raise NotInShim(cls.path)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return placeholder(f"{cls.path}.{name}")


def placeholder(path: str) -> Placeholder:
    return Placeholder(path.rpartition(".")[2], (), {"path": path})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of Opacus, in the shim or as a module of placeholders."""

    def find_spec(self, fullname: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != "opacus":
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        try:
            ours: ModuleType | None = importlib.import_module(SHIM + module.__name__)
        except ModuleNotFoundError:
            ours = None

        def find(name: str) -> Any:
            if hasattr(ours, name):
                return getattr(ours, name)
            if name.startswith("__"):
                raise AttributeError(name)
            return placeholder(f"{module.__name__}.{name}")

        module.__getattr__ = find  # type: ignore[method-assign]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, required=True)
    parser.addoption("--opacus", action="store_true")


def pytest_configure(config: pytest.Config) -> None:
    settings.register_profile(
        "few", max_examples=EXAMPLES, deadline=None, database=None, phases=[Phase.generate]
    )
    settings.load_profile("few")
    if not config.getoption("--opacus"):
        sys.meta_path.insert(0, Finder())
    config.pluginmanager.register(Outcomes(config.getoption("--outcomes")))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TooLong(f"longer than {SECONDS} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        return (yield)
    finally:
        signal.alarm(0)


class Outcomes:
    """Writes each test's outcome, with the kinds and the message of its error."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, dict[str, Any]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Iterator[None]:
        report: Any = yield
        if call.when == "call" or not report.passed:
            self.keep(item.nodeid, report.outcome, call.excinfo)
        return report

    def pytest_exception_interact(self, node: Any, call: Any) -> None:
        if isinstance(node, pytest.Collector):
            self.keep(node.nodeid, "failed", call.excinfo)

    def keep(self, test: str, outcome: str, excinfo: Any) -> None:
        old = self.found.get(test)
        if old and WORST.index(old["outcome"]) <= WORST.index(outcome):
            return
        row: dict[str, Any] = {"outcome": outcome}
        if excinfo is not None:
            error, kinds, says = excinfo.value, [], ""
            while error is not None:  # the first cause is what the test met
                kinds += [kind.__name__ for kind in type(error).__mro__[:-2]]
                if isinstance(error, BaseExceptionGroup):
                    error = error.exceptions[0]
                    continue
                says = " ".join(str(error).split())
                error = error.__cause__ or error.__context__
            row |= {"kinds": kinds, "says": says[:400]}
        self.found[test] = row
        self.path.write_text(json.dumps(self.found, indent=1))  # now: a run may be cut short
