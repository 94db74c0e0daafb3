"""One thread at a time runs the module or takes a step.

Passes and steps write into what the engine keeps of the samples in the module, and probes set its
parameters and put them back. A thread that evaluates the module while another trains it therefore
waits for the pass or the step that runs, as at a lock.

Torch does not tell of every pass that failed: not of one that was interrupted, nor of one whose
output a hook refused. Who waits looks whether the other thread is still at it.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from threading import Lock, get_ident

from torch import nn

from ..base.errors import UnsupportedModule

PATIENCE = 60.0
"""Seconds to wait for a pass or a step that runs; the thread in it may wait for this one."""

_LOOK = 0.02
"""Seconds between two looks at the other thread."""

_MODULE = nn.modules.module.__file__
_ENGINE = str(Path(__file__).parent)


class Turns:
    """The thread whose turn it is."""

    def __init__(self) -> None:
        self.holder = 0
        """Identity of the thread in a pass or a step; 0: none."""
        self._lock = Lock()

    def take(self) -> None:
        """Wait until no other thread is in a pass or a step; a thread that has the turn keeps it.

        Raises:
            UnsupportedModule: the other thread does not come to an end.
        """
        me = get_ident()
        if self.holder == me or self._lock.acquire(blocking=False):
            self.holder = me
            return
        end = time.monotonic() + PATIENCE
        while not self._lock.acquire(timeout=_LOOK):
            other = self.holder
            if other and not _is_inside(other) and self.holder == other:
                break  # the lock goes over as it is
            if time.monotonic() > end:
                raise UnsupportedModule(
                    "threads",
                    expected="one thread at a time in the private module",
                    got=f"a pass or a step of another thread that has not ended for {PATIENCE:g} s",
                    remedy="Wait for no thread that evaluates the module inside of a pass or a "
                    "step, or evaluate a copy: copy.deepcopy(model.state_dict()) in a module of "
                    "its own.",
                )
        self.holder = me

    def give(self) -> None:
        """Let the next thread have its turn; without a turn nothing changes."""
        if self.holder == get_ident():
            self.holder = 0
            self._lock.release()


def _is_inside(thread: int) -> bool:
    """Whether a thread runs some module, or the engine; one that has ended runs nothing."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        place = frame.f_code.co_filename
        if place == _MODULE or place.startswith(_ENGINE):
            return True
        frame = frame.f_back
    return False
