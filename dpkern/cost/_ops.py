"""Our ops as lines of a step: the closed form of a call, booked under a phase."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..base.counts import Item
from ..base.rng import Key, Purpose, Stream
from .forms import FORMS


def call(op: str, phase: str, *args: Any, **kwargs: Any) -> list[Item]:
    """The lines of one call of an op, ``phase: line``; arguments as its form takes them."""
    items = FORMS[op](*args, **kwargs).items
    return [replace(item, name=f"{phase}: {item.name}") for item in items]


def shaped(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor that has only a shape."""
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def stream(purpose: Purpose) -> Stream:
    """Any stream: counts do not depend on it."""
    return Key.from_unsafe_seed(0).stream(purpose, 1)


__all__ = ["call", "shaped", "stream"]
