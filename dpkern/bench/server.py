"""Run calls of one revision when asked to, in a process of its own.

Today's cases and clocks measure both sides: ``dpkern.bench`` of the tree that runs is put into the
other revision's package. Requests and answers are lines of JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..base.errors import BackendError, DPKernError

GRAFT = """
import importlib.util, sys
revision, bench = sys.argv[1:3]
sys.path[0] = revision
import dpkern
spec = importlib.util.spec_from_file_location(
    "dpkern.bench", bench + "/__init__.py", submodule_search_locations=[bench]
)
module = importlib.util.module_from_spec(spec)
sys.modules["dpkern.bench"] = module
spec.loader.exec_module(module)
from dpkern.bench.server import serve
serve()
"""
SAMPLE = 2e-3
"""Seconds of one sample at least: what a request costs is little beside it."""


class Server:
    """A process that runs calls of one revision.

    Args:
        folder: what holds the revision's ``dpkern``.
        threads: of torch and of every kernel.
        variables: the process' environment.
    """

    def __init__(self, folder: Path, threads: int, variables: dict[str, str]) -> None:
        bench = Path(__file__).parent
        path = f"{folder}:{variables.get('PYTHONPATH', '')}".rstrip(":")
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-c", GRAFT, str(folder), str(bench)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**variables, "PYTHONPATH": path},
        )
        self.ask(threads=threads)

    def ask(self, **request: Any) -> Any:
        """Return the answer to a request.

        Raises:
            DPKernError: the process has ended.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise DPKernError(
                f"revision {self.folder}",
                expected="a dpkern that runs today's cases",
                got=f"code {self.process.wait()}",
                remedy="Compare revisions that declare the same ops; its error stands above.",
            )
        return json.loads(answer)

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Served:
    """The call that is prepared now."""

    def __init__(self) -> None:
        self.work: Callable[[], Any] = lambda: None

    def answer(self, request: dict[str, Any]) -> Any:
        import torch

        from . import guard

        if "threads" in request:
            torch.set_num_threads(request["threads"])
            return {}
        if "prepare" in request:
            return self._prepare(**request["prepare"])
        if "sample" in request:
            work, burst = self.work, request["sample"]
            began = time.perf_counter()
            for _ in range(burst):
                work()
            return (time.perf_counter() - began) / burst
        return asdict(guard.counters())

    def _prepare(self, op: str, case: str, dtype: str | None, backend: str) -> dict[str, Any]:
        import torch

        from ..base.dispatch import OPS
        from .case import sized
        from .cases import FACTS
        from .measure import burst_of, call, verify

        kind = None if dtype is None else getattr(torch, dtype)
        try:
            found = sized(OPS[op], FACTS[op], case, {}, kind)
            with torch.no_grad():
                verify(found, backend)
                self.work = call(found, backend)
                return {"burst": burst_of(self.work, torch.device("cpu"), SAMPLE)}
        except BackendError as error:
            return {"refused": error.got}
        except (
            AssertionError,
            DPKernError,
            RuntimeError,
            ValueError,
            KeyError,
            TypeError,
        ) as error:
            return {"wrong": f"{type(error).__name__}: {error}"[:300]}


def serve() -> None:
    """Answer requests until there are no more."""
    lines, served = sys.stdout, _Served()
    with redirect_stdout(sys.stderr):
        for line in sys.stdin:
            print(json.dumps(served.answer(json.loads(line))), file=lines, flush=True)
