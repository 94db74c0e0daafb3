"""End what takes too long, by the processor's time."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class TooLong(Exception):
    """A model or a loop took more than its seconds."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise ``TooLong`` in this block after so many seconds of CPU time."""

    def stop(*_: Any) -> None:
        raise TooLong(f"more than {seconds:g} s of CPU time")

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
