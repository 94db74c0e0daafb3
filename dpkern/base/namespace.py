"""``torch.ops.dpkern``, filled at its first use: most programs never look into it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import _OpNamespace


class _Namespace(_OpNamespace):
    __module__ = _OpNamespace.__module__  # the names of operators in graphs begin with it

    def __init__(self, fill: Callable[[], object]) -> None:
        super().__init__("dpkern")
        self._fill = fill

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            self._fill()
        return super().__getattr__(name)


def open_namespace(fill: Callable[[], object]) -> None:
    """Have ``fill`` register the operators before the first of them is looked up."""
    torch.ops.dpkern = _Namespace(fill)  # type: ignore[attr-defined]


__all__ = ["open_namespace"]
