"""Whether a module's output is held by the running call alone.

Nothing else sees what becomes of such a tensor, so the engine may mark it instead of an alias of
it. While hooks run, torch's own frames hold some references; how many is measured once, with a
module that keeps nothing of its output.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor, nn

from ..ops import direct
from .hooks import Hook

Holders = tuple[int, int]


def _holders_of(output: Tensor) -> Holders:
    return getrefcount(output), output._use_count()  # type: ignore[attr-defined]


holders_of: Callable[[Tensor], Holders] = direct.look("holders_of") or _holders_of
"""Count the references to a tensor's object, and those to what torch keeps behind it."""


def _is_held_as(output: Tensor, holders: Holders) -> bool:
    return _holders_of(output) == holders


is_held_as: Callable[[Tensor, Holders], bool] = direct.look("is_held_as") or _is_held_as
"""Whether ``holders_of`` says this of a tensor."""


class _Doubled(nn.Module):
    """A module that returns a fresh tensor and keeps nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.holders: Holders = (0, 0)

    def forward(self, x: Tensor) -> Tensor:
        return x + x

    def _count(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self.holders = holders_of(output)


@cache
def fewest_holders() -> Holders:
    """Return what ``holders_of`` says in a forward hook (``Hook``) that takes ``kwargs``."""
    module = _Doubled()
    module.register_forward_hook(Hook(module._count), with_kwargs=True)
    with torch.enable_grad():
        module(torch.zeros(1, requires_grad=True))
    return module.holders
