"""One thread at a time runs the module or takes a step.

Passes and steps write into what the engine keeps of the samples in the module, and probes set its
parameters and put them back. A thread that evaluates the module while another trains it therefore
waits for the pass or the step that runs, as at a lock. Between a batch's forward pass and its step
the training thread needs the engine as the pass has left it: evaluations of other threads then run
as if there were no engine (``aside``).
"""

from __future__ import annotations

from threading import Lock, get_ident

from ..base.errors import UnsupportedModule

PATIENCE = 60.0
"""Seconds to wait for another thread: its pass may have been interrupted, and never end."""


class Turns:
    """The thread whose turn it is, and the one whose batch waits for its step."""

    def __init__(self) -> None:
        self.holder = 0
        """Identity of the thread in a pass or a step; 0: none."""
        self.trainer = 0
        """Identity of the thread whose batch has passed forward, until its step; 0: none."""
        self.aside = False
        """Whether the running pass evaluates while another thread's batch waits for its step."""
        self._lock = Lock()

    def take(self) -> None:
        """Wait until no other thread is in a pass or a step.

        A thread that has the turn keeps it: one that never gave it back, because its pass was
        interrupted, goes on with the next one.

        Raises:
            UnsupportedModule: the other thread's pass does not end.
        """
        me = get_ident()
        if self.holder != me:
            if not self._lock.acquire(timeout=PATIENCE):
                raise UnsupportedModule(
                    "threads",
                    expected="one thread at a time in the private module",
                    got=f"a pass or a step of another thread that has not ended for {PATIENCE:g} s",
                    remedy="Evaluate a copy, copy.deepcopy(model.state_dict()) in a module of its "
                    "own. If the other thread was interrupted, let it run the module once more.",
                )
            self.holder = me

    def give(self) -> None:
        """Let the next thread have its turn; without a turn nothing changes."""
        if self.holder == get_ident():
            self.aside = False
            self.holder = 0
            self._lock.release()

    def begin_batch(self) -> None:
        """Note that the thread whose turn it is passes samples forward for a step."""
        self.trainer = self.holder

    def end_batch(self) -> None:
        """Note that the samples have had their step, or are forgotten."""
        self.trainer = 0

    def evaluates_aside(self) -> bool:
        """Whether the batch of another thread than the running pass' waits for its step."""
        return self.trainer not in (0, self.holder)
