"""Count the true entries of a mask without making the host wait for a device."""

from __future__ import annotations

import torch

Count = int | torch.Tensor
"""An int on the CPU; on a device a 0-d int64 tensor, which becomes an int where it is read."""


def count(mask: torch.Tensor) -> Count:
    """Return the number of true entries."""
    return known(mask.sum())


def known(total: torch.Tensor) -> Count:
    """Return a 0-d count, as an int if it is on the CPU."""
    return int(total) if total.is_cpu else total


__all__ = ["Count", "count", "known"]
