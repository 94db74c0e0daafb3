"""Refuse a name of Opacus that has no meaning here, with what to do instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NoReturn

from ...base.errors import InvalidInput


def refusals(module: str, remedies: Mapping[str, str]) -> Callable[[str], NoReturn]:
    """Return the ``__getattr__`` of a module that refuses these names.

    Args:
        module: the module's ``__name__``.
        remedies: what to do, by name.
    """

    def refuse(name: str) -> NoReturn:
        if name not in remedies:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        raise InvalidInput(
            f"{module}.{name}",
            expected="a name that a training loop needs",
            got="a part of Opacus that dpkern has no counterpart of",
            remedy=remedies[name],
        )

    return refuse


UNWRAPPED = "Leave the wrapper out: make_private returns the module itself, and its own state_dict."

__all__ = ["UNWRAPPED", "refusals"]
