"""Track which record every row comes from, from the loader through the module to the loss."""

from __future__ import annotations

# Rules register themselves.
from . import (
    along,
    elementwise,
    escapes,
    indexing,
    layers,
    losses,
    moves,
    products,
    reductions,
    shapes,
)
from .boundary import ModuleBoundary
from .states import YieldedBatch
from .tensor import TrackedTensor, track, untracked

__all__ = [
    "ModuleBoundary",
    "TrackedTensor",
    "YieldedBatch",
    "along",
    "elementwise",
    "escapes",
    "indexing",
    "layers",
    "losses",
    "moves",
    "products",
    "reductions",
    "shapes",
    "track",
    "untracked",
]
