"""Take the steps of a run, one after the other, until none is left or a signal asks to stop."""

from __future__ import annotations

import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Generic, TypeVar

E = TypeVar("E")
"""The state after an epoch, a dataclass of plain values."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Steps(ABC, Generic[E]):
    """A sequence of training steps, and its position.

    Between steps everything here is consistent and may be saved.

    Attributes:
        history: the state after every epoch.
        seconds: spent in ``run``.
        between_steps: whether the run can be saved as it stands.
    """

    def __init__(self) -> None:
        self.history: list[E] = []
        self.seconds = 0.0
        self.between_steps = True

    @property
    @abstractmethod
    def done(self) -> int:
        """The number of steps taken, those before a checkpoint included."""

    @property
    @abstractmethod
    def total(self) -> int:
        """The number of steps of the whole run."""

    @property
    def finished(self) -> bool:
        """Whether no step is left."""
        return self.done >= self.total

    @abstractmethod
    def take(self) -> E | None:
        """Take one step; return the state after it where it completes an epoch."""

    def run(
        self,
        *,
        on_step: Callable[[int], None] | None = None,
        on_epoch: Callable[[E], None] | None = None,
    ) -> None:
        """Take the steps that are left.

        ``on_step(steps so far)`` and ``on_epoch(record)`` are called between steps. SIGINT and
        SIGTERM let the current step finish first.

        Raises:
            KeyboardInterrupt: interrupted. With ``between_steps`` the run can be saved as it
                stands; a second SIGINT does not wait for that.
        """
        started = time.perf_counter()
        try:
            with deferred_signals() as interrupted:
                while not self.finished:
                    self.between_steps = False
                    epoch = self.take()
                    if epoch is not None:
                        self.history.append(epoch)
                    self.between_steps = True
                    if on_step is not None:
                        on_step(self.done)
                    if epoch is not None and on_epoch is not None:
                        on_epoch(epoch)
                    if interrupted.is_set() and not self.finished:
                        raise KeyboardInterrupt
        finally:
            self.seconds += time.perf_counter() - started


@contextmanager
def deferred_signals() -> Iterator[threading.Event]:
    """Yield an event that the first SIGINT or SIGTERM sets instead of ending the process.

    The second one acts as usual. Outside the main thread, where Python delivers no signals,
    the event stays unset.
    """
    received = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    # None: installed by other than Python code, which could not be restored.
    previous = {number: handler for number, handler in handlers.items() if handler is not None}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def note(_number: int, _frame: FrameType | None) -> None:
        received.set()
        restore()

    for number in previous:
        signal.signal(number, note)
    try:
        yield received
    finally:
        restore()
