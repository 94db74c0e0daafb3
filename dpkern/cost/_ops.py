"""Turn calls of our ops into lines of a step: the closed form of a call, booked under a phase."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..base.counts import Item
from ..base.rng import Key, Purpose, Stream
from .forms import FORMS


def call(op: str, phase: str, *args: Any, **kwargs: Any) -> list[Item]:
    """Return the lines of one op call, named ``phase: line``; arguments as its form takes them."""
    items = FORMS[op](*args, **kwargs).items
    return [replace(item, name=f"{phase}: {item.name}") for item in items]


def shaped(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor that has only a shape."""
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def stream(purpose: Purpose) -> Stream:
    """Return a stream of a fixed key; counts do not depend on which one."""
    return Key.from_unsafe_seed(0).stream(purpose, 1)


__all__ = ["call", "shaped", "stream"]
