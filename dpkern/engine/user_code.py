"""Find the user's own code among the frames of a call."""

from __future__ import annotations

import sys
from types import CodeType, FrameType

import torch

from ..ops import direct

_OUR_FILES = (torch.__path__[0], __file__.rsplit("/", 2)[0])

_CODES: dict[int, tuple[CodeType, bool]] = {}
"""Code objects by ``id``, with whether they belong to torch, to dpkern or to no file.

They are kept, so that no other one gets the same ``id``; their hashes take microseconds each.
"""


def is_ours(code: CodeType) -> bool:
    """Whether a code object is none of the user's."""
    known = _CODES.get(id(code))
    if known is None:
        path = code.co_filename
        known = _CODES[id(code)] = code, path.startswith((*_OUR_FILES, "<"))
    return known[1]


CallSite = tuple[tuple[int, int], ...] | bytes
"""The frames of a call: each code object, by ``id``, with the place of its instruction."""

_call_site = direct.look("call_site")


def call_site(depth: int = 4, *, ours: int = 0) -> CallSite:
    """Return the instructions of the user's code that the running call comes from.

    Loops that call the same library for several losses differ in their own frames.

    Args:
        depth: maximum number of frames.
        ours: number of calls, from the caller's on, that are known to be dpkern's.
    """
    if _call_site is not None:
        site: bytes = _call_site(is_ours, 1 + ours, depth)
        return site
    found: list[tuple[int, int]] = []
    frame: FrameType | None = sys._getframe(1 + ours)
    while frame is not None and len(found) < depth:
        code = frame.f_code
        known = _CODES.get(id(code))
        if not (is_ours(code) if known is None else known[1]):
            found.append((id(code), frame.f_lasti))
        frame = frame.f_back
    return tuple(found)


def lines_up() -> int:
    """Return how many calls the user's innermost frame is above the caller, as warnings count."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and is_ours(frame.f_code):
        frame, level = frame.f_back, level + 1
    return level


def user_line() -> str:
    """Return file and line of the innermost frame that is neither torch's nor dpkern's."""
    frame = sys._getframe(1)
    while frame is not None:
        if not is_ours(frame.f_code):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return "an unknown line"


__all__ = ["CallSite", "call_site", "is_ours", "lines_up", "user_line"]
