"""Triton's interpreter without its repetitions: what it computes stays the same.

It exchanges the functions of ``triton.language`` at every call of a device function, although the
launch around it has done so already, and builds a table of types at every operation. Both together
take a third of its time.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest


def without_repetitions(patch: pytest.MonkeyPatch) -> None:
    """Let each launch exchange the functions of a module once, until ``patch`` is undone."""
    from triton.runtime import interpreter

    language = interpreter.tl
    exchange, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    any_type = interpreter._get_np_dtype
    of_numbers = cache(any_type)
    done: set[tuple[bool, ...]] = set()

    @cache
    def seen_by(fn: Any) -> tuple[bool, ...]:
        names = fn.__globals__.values()
        return tuple(any(x is module for x in names) for module in (language, language.core))

    def exchanged(fn: Any) -> Any:
        seen = seen_by(fn)
        if seen in done:
            return interpreter._LangPatchScope()
        done.add(seen)
        return exchange(fn)

    def launched(self: Any, *args: Any, **kwargs: Any) -> Any:
        done.clear()
        return launch(self, *args, **kwargs)

    def numpy_type(kind: Any) -> Any:
        kind = kind.element_ty if isinstance(kind, language.block_type) else kind
        return of_numbers(kind) if type(kind) is language.dtype else any_type(kind)

    patch.setattr(interpreter, "_patch_lang", exchanged)
    patch.setattr(interpreter.GridExecutor, "__call__", launched)
    patch.setattr(interpreter, "_get_np_dtype", numpy_type)
