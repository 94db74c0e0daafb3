"""Share work among threads.

Kernels run without Python's lock, so its threads are enough. A pool of OpenMP or numba's own would
end a process that was forked from one that used it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ....base.threads import allowed

Result = TypeVar("Result")

_pool: ThreadPoolExecutor | None = None


def _forget() -> None:
    global _pool
    _pool = None  # its threads stayed in the parent


os.register_at_fork(after_in_child=_forget)


def _threads() -> ThreadPoolExecutor:
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="dpkern")
    return _pool


def team_of(count: int, grain: int) -> int:
    """Return as many threads as torch uses, but none with less than ``grain`` items."""
    return max(1, min(allowed(), count // max(1, grain)))


def in_parts(count: int, team: int, body: Callable[[int, int, int], Result]) -> list[Result]:
    """Run ``body(part, begin, end)`` for nearly equal parts of ``0 .. count``, the first here."""
    cuts = [count * part // team for part in range(team + 1)]
    others = [_threads().submit(body, part, cuts[part], cuts[part + 1]) for part in range(1, team)]
    return [body(0, cuts[0], cuts[1]), *(other.result() for other in others)]
