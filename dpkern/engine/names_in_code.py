"""The names that the code of a function looks up."""

from __future__ import annotations

import dis
import functools
import os
import types
from collections.abc import Iterator


def is_installed(code: types.CodeType) -> bool:
    """Whether the code is a package's: following all that it names would read whole libraries."""
    return any(part in code.co_filename for part in _INSTALLED)


_INSTALLED = (*("site-packages", "dist-packages"), os.path.dirname(os.__file__) + os.sep)


@functools.lru_cache(maxsize=4096)
def globals_of(code: types.CodeType) -> tuple[str, ...]:
    """Return the global names that a function and those written inside it read or write."""
    found = {i.argval: None for i in dis.get_instructions(code) if i.opname in _OF_GLOBALS}
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            found |= dict.fromkeys(globals_of(inner))
    return tuple(found)


_OF_GLOBALS = ("LOAD_GLOBAL", "STORE_GLOBAL", "LOAD_NAME")


def attributes_of(code: types.CodeType) -> Iterator[str]:
    """Yield the names that a function and those written inside it look up anywhere."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from attributes_of(inner)
