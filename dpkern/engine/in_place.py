"""Tell by its name whether an operation writes into its first operand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def writes_in_place(func: Callable[..., Any]) -> bool:
    """Whether the operation writes into its first operand."""
    name = getattr(func, "__name__", "")
    if name == "__set__":  # of an attribute
        attribute = getattr(func, "__self__", None)
        return getattr(attribute, "__name__", "") not in _WITHOUT_VALUES
    if name.startswith("__"):
        return name in _WRITERS
    return name.endswith("_")


_WRITERS = frozenset(
    """__setitem__ __iadd__ __isub__ __imul__ __itruediv__ __idiv__ __ifloordiv__ __imod__
    __ipow__ __iand__ __ior__ __ixor__ __ilshift__ __irshift__""".split()
)

_WITHOUT_VALUES = frozenset(
    "grad requires_grad names _backward_hooks _post_accumulate_grad_hooks".split()
)
"""Attributes of tensors whose assignment leaves the tensor's values as they are."""

__all__ = ["writes_in_place"]
