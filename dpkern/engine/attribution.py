"""Attribute op calls to model parameters, so that profilers and counters report cost per layer."""

from __future__ import annotations

from contextvars import ContextVar, Token
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .uses import GradientSource

_names: ContextVar[tuple[str, ...]] = ContextVar("dpkern_whose", default=())


class attributed_to:
    """A block in which every op call works on the gradients of these sources."""

    __slots__ = ("_mine", "_token")

    def __init__(self, *sources: GradientSource) -> None:
        self._mine = tuple([source.name for source in sources])

    def __enter__(self) -> None:
        self._token: Token[tuple[str, ...]] = _names.set(self._mine)

    def __exit__(self, *error: object) -> None:
        _names.reset(self._token)


def attributed_parameters() -> tuple[str, ...]:
    """Return the names of the parameters that the running op call works on, in tensor order.

    The tuple is empty outside ``attributed_to``.
    """
    return _names.get()
