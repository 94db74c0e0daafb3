"""How many entries of a mask are true, without making the host wait for a device."""

from __future__ import annotations

import torch

Count = int | torch.Tensor
"""An int on the CPU; on a device a 0-d int64 tensor, which becomes an int where it is read."""


def count(mask: torch.Tensor) -> Count:
    """The number of true entries."""
    return known(mask.sum())


def known(total: torch.Tensor) -> Count:
    """A 0-d count: an int if it is on the CPU."""
    return int(total) if total.is_cpu else total


__all__ = ["Count", "count", "known"]
