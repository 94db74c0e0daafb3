"""Name operations alike, whichever way they were called.

``a + b``, ``b.__radd__(a)``, ``a.add(b)``, ``a.add_(b)`` and ``torch.add(a, b)`` are all ``add``.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from types import CodeType, FrameType

import torch

from ...ops import direct
from .tensor import Function

_SIDES = ("", "r", "i")
_OPERATORS = {
    **{
        f"__{side}{op}__": op
        for op in ("add", "sub", "mul", "matmul", "pow", "mod", "and", "or", "xor")
        for side in _SIDES
    },
    **{f"__{side}{op}__": "div" for op in ("truediv", "div") for side in _SIDES},
    **{f"__{side}floordiv__": "floor_divide" for side in _SIDES},
    **{f"__{op}__": op for op in "neg invert abs eq ne lt le gt ge pos lshift rshift".split()},
}
_REVERSED = {f"__r{op}__" for op in "sub pow truediv div floordiv mod matmul".split()}
_OUR_FILES = (torch.__path__[0], __file__.rsplit("/", 3)[0])


def name_of(func: Function) -> str:
    """Return the operation's name without the marks of operators and of writing in place."""
    try:
        return _name_of(func)
    except TypeError:  # not hashable
        return getattr(func, "__name__", "")


@lru_cache(maxsize=4096)
def _name_of(func: Function) -> str:
    name: str = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        return f"{attribute}.{name.strip('_')}"
    if name in _OPERATORS:
        return _OPERATORS[name]
    if name.endswith("_") and not name.startswith("__") and name != "requires_grad_":
        return name[:-1]
    return name


def has_reversed_operands(func: Function) -> bool:
    """Whether an operator was called with its operands swapped, as in ``__rsub__``."""
    return getattr(func, "__name__", "") in _REVERSED


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
