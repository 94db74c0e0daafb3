"""What a closed form is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..primitives import EXECUTED, Itemised

Form = Callable[..., Itemised]
"""An op's arguments, and by keyword what its data decides, to what it takes."""


def executed(form: Form) -> Form:
    """The form of an op that a counted kernel executes: all its lines are known from there."""

    def proved(*args: Any, **kwargs: Any) -> Itemised:
        items = form(*args, **kwargs).items
        return Itemised(tuple(replace(item, evidence=EXECUTED) for item in items))

    return proved


__all__ = ["Form", "executed"]
