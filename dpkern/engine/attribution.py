"""Whose gradients are normed and summed now: for clocks and counters that see calls of ops."""

from __future__ import annotations

from contextvars import ContextVar, Token
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .uses import GradientSource

_names: ContextVar[tuple[str, ...]] = ContextVar("dpkern_whose", default=())


class attributed_to:
    """In this block the ops that are called norm and sum gradients of these sources."""

    __slots__ = ("_mine", "_token")

    def __init__(self, *sources: GradientSource) -> None:
        self._mine = tuple([source.name for source in sources])

    def __enter__(self) -> None:
        self._token: Token[tuple[str, ...]] = _names.set(self._mine)

    def __exit__(self, *error: object) -> None:
        _names.reset(self._token)


def attributed_parameters() -> tuple[str, ...]:
    """Names of the parameters, in the order of the call's tensors; empty where nobody says."""
    return _names.get()
