"""Mark which phase of a private step is running, for counters and clocks.

    with phase(CLIP):        in the code that does the phase
        ...
    with listening() as running:
        step.finish()        whatever it calls may ask ``running()``: the innermost mark

Marks belong to one thread. Without a listener a mark is a shared object that does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

CLIP, MAP, NOISE, BACK = "clip and sum", "map", "noise", "map back"
UPDATE, LEARN, IMPORTANCE, PROJECT = "update", "learning", "importance", "projection"
CONSTANTS = "constants"
"""Tables that are made once for a configuration and kept: they are no part of a step."""

_marks: ContextVar[list[str] | None] = ContextVar("dpkern_phase", default=None)
followed: Callable[[], object] = _marks.get
"""None where nothing follows this thread's marks."""

_NOTHING = nullcontext()


def phase(name: str) -> AbstractContextManager[None]:
    """Mark the block as this phase."""
    marks = _marks.get()
    return _NOTHING if marks is None else _marked(marks, name)


@contextmanager
def _marked(marks: list[str], name: str) -> Iterator[None]:
    marks.append(name)
    try:
        yield
    finally:
        marks.pop()


@contextmanager
def listening() -> Iterator[Callable[[], str | None]]:
    """Follow this thread's marks: the yielded function returns the innermost one, or None."""
    marks: list[str] = []
    before = _marks.set(marks)
    try:
        yield lambda: marks[-1] if marks else None
    finally:
        _marks.reset(before)


__all__ = [
    *("BACK", "CLIP", "CONSTANTS", "IMPORTANCE", "LEARN", "MAP", "NOISE", "PROJECT", "UPDATE"),
    "followed",
    "listening",
    "phase",
]
