"""Keep the old names of public classes for as long as callers need to change them."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any


def old_names(module: str, renamed: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a module's ``__getattr__``, which finds old names under the new ones and warns.

    Args:
        module: name of the module that has the new names.
        renamed: new names by their old ones.
    """

    def find(name: str) -> Any:
        if name not in renamed:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        new = renamed[name]
        warnings.warn(f"{module}.{name} is now {module}.{new}", DeprecationWarning, stacklevel=2)
        return getattr(sys.modules[module], new)

    return find


__all__ = ["old_names"]
