"""Whose samples: which record every row comes from, from the loader to the module and on to the loss."""

from __future__ import annotations

from . import indexing, losses, reductions, rowwise, shapes  # their rules register themselves
from .boundary import ModuleBoundary
from .states import YieldedBatch
from .tensor import TrackedTensor, track, untracked

__all__ = [
    "ModuleBoundary",
    "TrackedTensor",
    "YieldedBatch",
    "indexing",
    "losses",
    "reductions",
    "rowwise",
    "shapes",
    "track",
    "untracked",
]
