"""The tests of a device, each file in a process of its own: ``python -m tests.gpu_run``.

What the processes print is streamed, line by line and under the file's name; their JUnit files are
put together after each one, so that what was finished is known if the rest is killed. A file
fails if a test does, if it is not finished in time, or if all its tests were skipped. Not yet run
on a GPU.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

FOLDER = Path(__file__).parent
ON_A_DEVICE = re.compile(r"mark\.gpu|\bevery_backend\b")
NONE_COLLECTED = 5
_PRINTING = threading.Lock()


@dataclass(frozen=True)
class Outcome:
    """One file's tests."""

    name: str
    seconds: float
    wrong: str
    suites: tuple[ElementTree.Element, ...]

    def count(self, what: str) -> int:
        """Return the number of ``tests``, ``failures``, ``errors`` or ``skipped``."""
        return sum(int(suite.get(what, 0)) for suite in self.suites)

    @property
    def line(self) -> str:
        """The line of the summary."""
        kinds = ("tests", "failures", "errors", "skipped")
        numbers = ", ".join(f"{self.count(kind)} {kind}" for kind in kinds)
        verdict = f"FAILED ({self.wrong})" if self.wrong else "ok"
        return f"{self.name}: {verdict}, {numbers}, {self.seconds:.0f} s"


def files(folder: Path = FOLDER) -> list[Path]:
    """Files with tests of a device, the largest first."""
    found = [path for path in folder.rglob("test_*.py") if ON_A_DEVICE.search(path.read_text())]
    return sorted(found, key=lambda path: -path.stat().st_size)


def say(text: str) -> None:
    """One line, whole."""
    with _PRINTING:
        print(text, flush=True)


class Run:
    """All files, some at a time.

    Args:
        require: backends without which no file passes.
        until: when everything has to be over, by ``time.monotonic``.
        junit: the file of all results.
        selected: pytest's options that choose tests.
    """

    def __init__(
        self, require: str, until: float, junit: Path, selected: Sequence[str] = ()
    ) -> None:
        self.until, self.junit = until, junit
        # Deprecations of other versions than ours are theirs; all other warnings stay errors.
        self.options = [
            *("-v", "-rfEs", "--tb=short", "-p", "no:cacheprovider"),
            *("-W", "default::DeprecationWarning", "-W", "default::FutureWarning"),
            *([f"--require-backends={require}"] if require else []),
            *(selected or ("-m", "gpu and not evidence")),
        ]
        self.outcomes: list[Outcome] = []

    def all(self, paths: Sequence[Path], processes: int) -> int:
        """1 if a file failed, or if nothing at all passed."""
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(processes) as pool:
            for _ in pool.map(lambda path: self._one(path, Path(folder)), paths):
                pass
        self.outcomes.sort(key=lambda each: (not each.wrong, each.name))
        for outcome in self.outcomes:
            say(outcome.line)
        ran = sum(each.count("tests") - each.count("skipped") for each in self.outcomes)
        wrong = sum(bool(each.wrong) for each in self.outcomes)
        say(f"{len(self.outcomes)} files, {ran} tests ran, {wrong} files failed")
        return int(wrong > 0 or ran == 0)

    def _one(self, path: Path, folder: Path) -> None:
        report, started = folder / f"{path.stem}.xml", time.monotonic()
        wrong = "not started: no time was left"
        if started < self.until:
            code = self._streamed(path, report)
            wrong = {0: "", NONE_COLLECTED: "", None: "not finished in time"}.get(
                code, f"exit {code}"
            )
        found = ElementTree.parse(report).getroot() if report.exists() else None
        suites = () if found is None else tuple(found.iter("testsuite"))
        outcome = Outcome(path.stem, time.monotonic() - started, wrong, suites)
        if not wrong and 0 < outcome.count("tests") == outcome.count("skipped"):
            outcome = Outcome(path.stem, outcome.seconds, "every test was skipped", suites)
        with _PRINTING:
            self.outcomes.append(outcome)
            self._write()

    def _streamed(self, path: Path, report: Path) -> int | None:
        """pytest's exit code, None if it was killed for the time."""
        command = [sys.executable, "-m", "pytest", *self.options, f"--junitxml={report}", str(path)]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as process:
            late = threading.Event()

            def stop() -> None:
                late.set()
                process.kill()

            timer = threading.Timer(max(0.0, self.until - time.monotonic()), stop)
            timer.start()
            assert process.stdout is not None
            for line in process.stdout:
                say(f"[{path.stem}] {line.rstrip()}")
            code = process.wait()
            timer.cancel()
        return None if late.is_set() else code

    def _write(self) -> None:
        whole = ElementTree.Element("testsuites")
        for outcome in self.outcomes:
            for suite in outcome.suites:
                suite.set("name", outcome.name)
            whole.extend(outcome.suites)
        part = self.junit.with_suffix(".part")
        ElementTree.ElementTree(whole).write(part, encoding="unicode", xml_declaration=True)
        part.replace(self.junit)


def main(argv: Sequence[str] | None = None) -> int:
    """Run every file; 1 if one failed."""
    parser = argparse.ArgumentParser(description="the tests of a device")
    parser.add_argument("--require", default="", help="backends, separated by commas")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 1) * 3 // 4))
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--junit", type=Path, default=Path("junit_gpu.xml"))
    parser.add_argument("files", nargs="*", type=Path)
    given = parser.parse_args(argv)
    run = Run(given.require, time.monotonic() + given.seconds, given.junit)
    return run.all(given.files or files(), given.processes)


if __name__ == "__main__":
    raise SystemExit(main())
