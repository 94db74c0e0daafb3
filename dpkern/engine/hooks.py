"""Module hooks that belong to an engine and not to the module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._C._dynamo.eval_frame import get_eval_frame_callback

from .uncompiled import breaks_graphs, uncompiled


class Hook:
    """A hook of the module that its copies and pickles do not take along."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    @breaks_graphs
    def __call__(self, *args: Any) -> Any:
        """Call it: the engine's own work is no part of a compiled module."""
        if get_eval_frame_callback() is None:
            return self.call(*args)  # as ``uncompiled`` does, with fewer calls
        return self._outside(*args)

    @uncompiled
    def _outside(self, *args: Any) -> Any:
        return self.call(*args)

    def __reduce__(self) -> Any:
        return _no_hook, ()


def _no_hook() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*_: Any) -> None:
    pass
