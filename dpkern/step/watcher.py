"""Let an audit see the sums of a step before their noise (``DPStep.watch``)."""

from __future__ import annotations

from typing import Protocol

import torch

from ..ops import clip

WATCHED = "an audit sees the sums of this run without noise, and knows its seed"
"""The reason why a step with a watcher certifies nothing."""


class Watcher(Protocol):
    """An audit that compares the clipped sums of two runs."""

    def added(self, result: clip.ClipResult) -> None:
        """Take note of one physical batch: its norms, in the order of its samples."""

    def summed(self, sums: list[torch.Tensor]) -> None:
        """Take note of the sums that are noised next, or put others into the list."""
